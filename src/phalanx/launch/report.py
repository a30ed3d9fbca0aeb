"""The last thing on the screen when a job failed: who, how, where to read on. Pure text."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from phalanx.launch.logs import shown
from phalanx.launch.verdict import Ending

_WIDTH = 88

_SIGNALS = {
    signal.SIGKILL: (
        "killed from outside without warning, often by the kernel's out-of-memory killer (see dmesg)",
        "被外部强制终止:常见原因是内核内存不足(见 dmesg)、调度器限额或 kill -9",
    ),
    signal.SIGSEGV: (
        "a memory error in native code; the Python stack at that moment is in the log",
        "本地代码内存错误;当时的 Python 调用栈在日志中",
    ),
    signal.SIGABRT: ("native code gave up; its reason is in the log", "本地代码主动中止;原因在日志中"),
    signal.SIGBUS: (
        "memory behind a mapping is gone: a full /dev/shm or disk, or a truncated file",
        "映射内存失效:/dev/shm 或磁盘已满,或文件被截断",
    ),
    signal.SIGTERM: ("asked to end by someone other than this launcher", "被本启动器以外的进程要求结束"),
    signal.SIGFPE: ("an arithmetic error in native code", "本地代码算术错误"),
    signal.SIGILL: (
        "an instruction this processor does not have: a library built for another one",
        "处理器不支持的指令:库是为其他处理器编译的",
    ),
}

_WORDS = {
    "en": {
        "title": "{title} failed first",
        "early": "ended early with exit code 0, while others still waited for it",
        "signal": "ended by signal {number} ({name})",
        "raised": "raised {error}",
        "code": "ended with exit code {code}",
        "log": "log file",
        "where": "on {host}, pid {pid}",
        "lines": "last lines of its log",
        "others": "the others followed",
    },
    "zh": {
        "title": "{title} 最先失败",
        "early": "提前以退出码 0 结束,而其他进程仍在等待它",
        "signal": "被信号 {number}({name})终止",
        "raised": "抛出 {error}",
        "code": "以退出码 {code} 结束",
        "log": "日志文件",
        "where": "主机 {host},进程 {pid}",
        "lines": "日志最后几行",
        "others": "其他进程随之结束",
    },
}


def how(ending: Ending, language: str = "en") -> str:
    """Return in words how a process ended, a signal with what usually sends it."""
    words = _WORDS[language]
    if ending.code < 0:
        number = -ending.code
        known = number in set(signal.Signals)
        text = words["signal"].format(number=number, name=signal.Signals(number).name if known else "?")
        if known and (hint := _SIGNALS.get(signal.Signals(number))):
            text += f": {hint[language == 'zh']}"
        return text
    if ending.error:
        return words["raised"].format(error=ending.error)
    if ending.code == 0:
        return words["early"]
    return words["code"].format(code=ending.code)


def render(first: Ending, others: Sequence[Ending], language: str = "en") -> str:
    """Return the framed report of a failed job.

    Args:
        first: The process that failed first.
        others: Endings of the rest, told in one line each.
        language: "en" or "zh".
    """
    words = _WORDS[language]
    lines = [f" {words['title'].format(title=first.title)} ".center(_WIDTH, "=")]
    lines.append(f"{first.title} {how(first, language)}")
    lines.append(words["where"].format(host=first.host, pid=first.pid))
    followers = [f"{e.title}: {how(e, language)}" for e in others if e.failed and e.title != first.title]
    if followers:
        lines += [f"{words['others']}:", *(f"    {line.splitlines()[0][:_WIDTH]}" for line in followers[:8])]
        if len(followers) > 8:
            lines.append(f"    ... (+{len(followers) - 8})")
    if first.traceback:
        lines += ["", *first.traceback.rstrip("\n").split("\n")]
    elif first.last_lines:
        lines += ["", f"{words['lines']}:", *(f"    {line}" for line in first.last_lines)]
    lines += ["", f"{words['log']}: {shown(first.log_file)}", "=" * _WIDTH]
    return "\n".join(lines) + "\n"

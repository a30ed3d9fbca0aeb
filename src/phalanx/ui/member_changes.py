"""`translate_change`: the Chinese of what an elastic job says of its ranks and workers that come and go (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.i18n import to_chinese

_FIXED = {
    "the job starts": "作业启动",
    "by its own wish": "自行要求",
    "stopped by a signal": "被信号暂停",
    "stopped by a debugger": "被调试器暂停",
    "gone": "进程已不存在",
    "ended": "进程已结束",
}
"""Sentences, and parts of them, in which nothing is filled in."""

_ENDINGS = ("raised {error}", "ended with exit code {code}")

_MEMBER = r"(?:rank \d+ \([^)]+\)|n\d+\.\d+(?: \(pid \d+\))?|worker \d+)"
_NODE = r"\S+ \(node \d+\)"
_NEXT = re.compile(rf"; (?=(?:{_MEMBER}|{_NODE}) )")
"""Between two changes that one sentence tells of."""


def translate_change(text: str) -> str:
    """Return a sentence about members in Chinese; one that is not of the table is returned as it is."""
    if text in _FIXED:
        return _FIXED[text]
    if len(changes := _NEXT.split(text)) > 1:
        return "；".join(map(translate_change, changes))
    for pattern, chinese in _SENTENCES:
        if match := pattern.fullmatch(text):
            return chinese(match)
    return text


def _member(text: str) -> str:
    """Return a member or node in Chinese, as a sentence goes on after it: `rank 1 (n0.1)` is `进程 1（n0.1）`."""
    text = re.sub(r" \((.+)\)", lambda match: f"（{match[1].replace(', ', '，')}）", text)
    text = re.sub(r"^rank ", "进程 ", re.sub(r"^worker ", "工作进程 ", text)).replace("（node ", "（节点 ")
    return text if text.endswith("）") else f"{text} "


def _servers(text: str) -> str:
    return "参数服务器 " + "、".join(re.findall(r"\d+", text))


def _split_push(match: re.Match[str]) -> str:
    push, worker, have, lack = match.groups()
    return (
        f"工作进程 {worker} 的推送 {push} 已写入{_servers(have)} 的表，没有写入{_servers(lack)} 的表："
        "该工作进程在发送时丢失。训练继续，各表保留这一差异"
    )


_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.DOTALL), chinese)
    for pattern, chinese in (
        (rf"({_MEMBER}) leaves \((.+)\)", lambda m: f"{_member(m[1])}退出（{translate_change(m[2])}）"),
        (rf"({_MEMBER}) left", lambda m: f"{_member(m[1])}已退出"),
        (rf"({_MEMBER}) joins", lambda m: f"{_member(m[1])}加入"),
        (rf"({_MEMBER}) takes the place of a lost one", lambda m: f"{_member(m[1])}接替一个丢失的工作进程"),
        (rf"({_MEMBER}) was killed by (.+)", lambda m: f"{_member(m[1])}被信号 {m[2]} 终止"),
        (
            rf"({_MEMBER}) ended with exit code 0 while others waited for it",
            lambda m: f"{_member(m[1])}以退出码 0 结束，而其他进程还在等待它",
        ),
        (
            rf"({_MEMBER}) is frozen: no processor time and no I/O for (\S+) s, and others waited for it",
            lambda m: f"{_member(m[1])}停止响应：{m[2]} 秒内没有占用处理器，也没有 I/O，而其他进程在等待它",
        ),
        (
            rf"({_MEMBER}) is frozen: (.+), while others waited (\S+) s for it",
            lambda m: f"{_member(m[1])}停止响应：{translate_change(m[2])}，其他进程已等待它 {m[3]} 秒",
        ),
        (
            rf"({_MEMBER}) is frozen: (.+) for (\S+) s",
            lambda m: f"{_member(m[1])}停止响应：{translate_change(m[2])}，已 {m[3]} 秒",
        ),
        (
            rf"({_MEMBER}) (raised .+|ended with .+)",
            lambda m: f"{_member(m[1])}{to_chinese(m[2], _ENDINGS) or m[2]}",
        ),
        (rf"({_NODE}) is gone: its launcher has ended", lambda m: f"{_member(m[1])}丢失：其启动器已结束"),
        (rf"({_NODE}) is gone or cut off: (.+)", lambda m: f"{_member(m[1])}丢失或失去连接：{translate_change(m[2])}"),
        (rf"({_NODE}) has ended", lambda m: f"{_member(m[1])}已结束"),
        (rf"({_NODE}) was started again", lambda m: f"{_member(m[1])}被重新启动"),
        (r"no sign of life for (\S+) s", lambda m: f"已 {m[1]} 秒没有消息"),
        (r"it did not vote within (\S+) s", lambda m: f"未在 {m[1]} 秒内投票"),
        (
            r"its launcher did not answer within (\S+) s, while ranks waited",
            lambda m: f"有进程在等待，而其启动器未在 {m[1]} 秒内应答",
        ),
        (r"scaled to (\d+) ranks", lambda m: f"规模调整为 {m[1]} 个进程"),
        (r"node (\d+) is there", lambda m: f"节点 {m[1]} 已加入"),
        (r"node (\d+) is about to be taken away", lambda m: f"节点 {m[1]} 即将被收回"),
        (
            r"push (\d+) of worker (\d+) is in the tables of (.+) and not in those of (.+): the worker was lost .+",
            _split_push,
        ),
    )
)

"""The messages a person must act on, in English and in Chinese: one table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from phalanx.cluster.messages.descriptions import DESCRIPTIONS
from phalanx.cluster.messages.planner import PLANNER
from phalanx.cluster.messages.planner_errors import PLANNER_ERRORS
from phalanx.cluster.messages.rank_tables import RANK_TABLES
from phalanx.errors import nearest

LANGUAGES = ("en", "zh")

LOG_LINE = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
"""How a log line looks, the launcher's and a script's own."""

TABLE: dict[str, tuple[str, str]] = {
    **PLANNER,
    **PLANNER_ERRORS,
    **DESCRIPTIONS,
    **RANK_TABLES,
    "waiting": ("server not ready, wait 3 sec to retry...", "服务尚未就绪，3 秒后重试..."),
    "waiting for": ("not ready endpoints:{names}", "尚未就绪的端点：{names}"),
    "waiting because": ("not ready endpoints:{names} ({why})", "尚未就绪的端点：{names}（{why}）"),
    "ranks late": ("still waiting for {names}", "仍在等待 {names}"),
    "not started yet": ("not started yet", "尚未启动"),
    "unknown name": ("no host of this name yet", "尚无此主机名"),
    "hosts missing": (
        (
            "{missing} of {total} hosts did not come within {timeout_s:g} s: {names}. Start the job there too; "
            "--timeout changes how long to wait."
        ),
        (
            "{total} 台主机中有 {missing} 台未在 {timeout_s:g} 秒内加入：{names}。请在这些主机上也启动任务；"
            "用 --timeout 调整等待时间。"
        ),
    ),
    "first host silent": (
        (
            "The first host did not answer at {place} within {timeout_s:g} s ({why}). Start the job there too, "
            "check the address and that the port is open; --timeout changes how long to wait."
        ),
        (
            "首台主机在 {timeout_s:g} 秒内未在 {place} 应答（{why}）。请在该主机上也启动任务，"
            "并检查地址和端口是否开放；用 --timeout 调整等待时间。"
        ),
    ),
    "ranks missing": (
        (
            "Waited {timeout_s:g} s for {total} ranks; {missing} did not come: {names}. Look into their logs for why "
            "they did not start. If they are slow, allow more time: --timeout, or PHALANX_RENDEZVOUS_TIMEOUT_S."
        ),
        (
            "等待 {total} 个进程共 {timeout_s:g} 秒；有 {missing} 个未加入：{names}。请查看其日志了解未启动的原因；"
            "若只是启动慢，请用 --timeout 或 PHALANX_RENDEZVOUS_TIMEOUT_S 延长等待。"
        ),
    ),
    "port in use": (
        "{flag} {port} on {address} is in use by {owner}. End that process, or choose another port.",
        "{address} 上的 {flag} {port} 已被 {owner} 占用。请结束该进程，或换一个端口。",
    ),
    "disk full": (
        "the file system of {folder} is full, {needed} bytes are needed and {free} are free",
        "{folder} 所在的文件系统已满，需要 {needed} 字节，剩余 {free} 字节",
    ),
    "log folder unwritable": (
        "--log_dir {folder} cannot be written to ({why}). Choose another folder.",
        "无法写入 --log_dir {folder}（{why}）。请换一个目录。",
    ),
    "log folder full": (
        "What the ranks print is lost until there is room: {why}. The job goes on.",
        "在腾出空间之前，各进程的输出会丢失：{why}。任务继续运行。",
    ),
    "log file lost": (
        "{what} was not written ({why}). The job is not affected.",
        "未能写入 {what}（{why}）。任务不受影响。",
    ),
    "not listed": (
        "`phalanx ps` will not show this job: {why}",
        "`phalanx ps` 不会显示此任务：{why}",
    ),
    "output lost": (
        "[phalanx] {bytes} bytes of output are missing here: the file system was full",
        "[phalanx] 此处缺少 {bytes} 字节的输出：文件系统曾满",
    ),
    "unknown owner": ("a process of another user or container", "其他用户或容器的进程"),
    "script missing": (
        "training_script '{script}' does not exist (looked in {folder}). Check the path.",
        "训练脚本 training_script '{script}' 不存在（在 {folder} 中查找）。请检查路径。",
    ),
    "script is a folder": (
        "training_script '{script}' is a directory. Give the Python file to run, e.g. {example}.",
        "训练脚本 training_script '{script}' 是目录。请给出要运行的 Python 文件，如 {example}。",
    ),
    "script unreadable": (
        "training_script '{script}' cannot be read. Check its permissions.",
        "训练脚本 training_script '{script}' 无法读取。请检查权限。",
    ),
    "unknown flag": (
        "No such option '{flag}'.{nearest} `{program} --help` lists all.",
        "没有选项 '{flag}'。{nearest}全部选项见 `{program} --help`。",
    ),
    "nearest flag": (" Did you mean '{flag}'?", "您是否想写 '{flag}'？"),
    "stopped": ("stopped by {signal}; every process of the job has ended", "被 {signal} 停止；任务的所有进程均已结束"),
    "failed first": ("{title} failed first", "{title} 最先失败"),
    "ended early": (
        "ended early with exit code 0, while others still waited for it",
        "提前以退出码 0 结束，而其他进程仍在等待它",
    ),
    "ended by signal": ("ended by signal {number} ({name})", "被信号 {number}（{name}）终止"),
    "raised": ("raised {error}", "抛出 {error}"),
    "ended with code": ("ended with exit code {code}", "以退出码 {code} 结束"),
    "fork server lost": (
        "the fork server (pid {pid}), from which every process of this host is started, {how}. They ended with it.",
        "本机所有进程的派生进程 fork server（进程 {pid}）{how}。这些进程随之结束。",
    ),
    "log file": ("log file", "日志文件"),
    "where": ("on {host}, pid {pid}", "主机 {host}，进程 {pid}"),
    "last lines": ("last lines of its log", "日志最后几行"),
    "others followed": ("the others followed", "其他进程随之结束"),
    "SIGKILL": (
        "killed from outside without warning, often by the kernel's out-of-memory killer (see dmesg)",
        "被外部强制终止：常见原因是内核内存不足（见 dmesg）、调度器限额或 kill -9",
    ),
    "SIGSEGV": (
        "a memory error in native code; the Python stack at that moment is in the log",
        "本地代码内存错误；当时的 Python 调用栈在日志中",
    ),
    "SIGABRT": ("native code gave up; its reason is in the log", "本地代码主动中止；原因在日志中"),
    "SIGBUS": (
        "memory behind a mapping is gone: a full /dev/shm or disk, or a truncated file",
        "映射内存失效：/dev/shm 或磁盘已满，或文件被截断",
    ),
    "SIGTERM": ("asked to end by someone other than this launcher", "被本启动器以外的进程要求结束"),
    "SIGFPE": ("an arithmetic error in native code", "本地代码算术错误"),
    "SIGILL": (
        "an instruction this processor does not have: a library built for another one",
        "处理器不支持的指令：库是为其他处理器编译的",
    ),
    "job queued": (
        "{job} is queued. Watch it: phalanx job logs -f {job}",
        "{job} 已排队。查看日志：phalanx job logs -f {job}",
    ),
    "job next": ("attempt {number}", "第 {number} 次尝试"),
    "job ended": ("{job}: {state}", "{job}：{state}"),
    "job ended because": ("{job}: {state}. {reason}", "{job}：{state}。{reason}"),
    "job detail": ("All of it: phalanx job show {job}", "详情：phalanx job show {job}"),
    "job interrupted": (
        "Asked {job} to stop; waiting for it to save and end. Ctrl-C once more leaves it to that.",
        "已请求停止 {job}；正在等待其保存并结束。再按 Ctrl-C 不再等待。",
    ),
    "job goes on": (
        "{job} goes on: phalanx job logs -f {job} shows it again, phalanx job stop {job} ends it.",
        "{job} 继续运行：phalanx job logs -f {job} 再次查看，phalanx job stop {job} 停止。",
    ),
    "job failed rank": (
        "The log of rank {rank}, which failed; --rank chooses another.",
        "失败进程 {rank} 的日志；用 --rank 另选。",
    ),
    "which workspace": (
        "You are in several workspaces: {names}. Say which: -w NAME.",
        "您属于多个工作空间：{names}。请用 -w NAME 指明。",
    ),
    "workspace taken": ("in workspace {name}, your only one", "工作空间：{name}（您唯一的工作空间）"),
    "job no log": ("{job} has written nothing there yet.", "{job} 在此尚无日志。"),
    "job empty log": ("{job} wrote nothing to the log of {rank}.", "{job} 没有向 {rank} 的日志写入内容。"),
    "job unknown log": ("{job} has no log of {rank}.", "{job} 没有 {rank} 的日志。"),
    "no job said": (
        (
            "There is no job to submit. Give a file, `phalanx job submit job.yaml`, "
            "or a command: `phalanx job submit --name mnist -- python train.py`."
        ),
        (
            "没有要提交的作业。请给出文件：`phalanx job submit job.yaml`，"
            "或命令：`phalanx job submit --name mnist -- python train.py`。"
        ),
    ),
    "no job file": (
        "cannot read the job in {where}: {why}. Give a YAML or JSON file.",
        "无法读取 {where} 中的作业：{why}。请给出 YAML 或 JSON 文件。",
    ),
    "no such job": (
        "There is no job {name!r}. `phalanx job list` shows those there are.",
        "没有作业 {name!r}。用 `phalanx job list` 查看现有作业。",
    ),
    "no such workspace": (
        "There is no workspace {name!r}. `phalanx workspace list` shows those there are.",
        "没有工作空间 {name!r}。用 `phalanx workspace list` 查看现有的。",
    ),
    "no such file in code": (
        "there is no file {path} {where}.{hint} Commit it, stop ignoring it, or correct the command.",
        "{where}没有文件 {path}。{hint} 请提交该文件、取消忽略，或改正命令。",
    ),
    "on this machine": ("on this machine", "本机上"),
    "in the code": ("in the code", "代码中"),
    "job cannot run": ("job {name!r} cannot run as it is written:", "作业 {name!r} 照此写法无法运行："),
    "job other logs": ("Its logs: {names}. Choose with --rank.", "其日志：{names}。用 --rank 选择。"),
    "job late": (
        "{job} has not ended after {timeout} s; it is {state}.",
        "{timeout} 秒后 {job} 仍未结束；状态：{state}。",
    ),
    "job more": (
        "The newest {limit}. `--limit` shows more, `--state` and `--workspace` choose.",
        "仅显示最新 {limit} 个。用 --limit 显示更多，用 --state、--workspace 筛选。",
    ),
    "job stopping": ("{job}: {state}", "{job}：{state}"),
    "command": ("Command", "命令"),
    "retry of": ("Retry of", "重试自"),
    "kept": ("{what} {name} is kept in workspace {workspace}.", "{what} {name} 已保存到工作空间 {workspace}。"),
    "workspace made": ("workspace {name} is made.", "工作空间 {name} 已建立。"),
    "member put": (
        "{name} is {role} in workspace {workspace}. A token of theirs: phalanx token add NAME --owner {name}",
        "{name} 在工作空间 {workspace} 中的角色：{role}。为其建立令牌：phalanx token add NAME --owner {name}",
    ),
    "removed": ("{what} {name} is removed.", "{what} {name} 已删除。"),
    "remove workspace": (
        "Remove workspace {name} with its configurations, secrets, and the records and logs of its jobs?",
        "删除工作空间 {name} 及其配置、密钥、作业记录和日志？",
    ),
    "secret value": ("Value of {name}", "{name} 的值"),
    "token once": (
        (
            "Keep this token of {owner}; it is not shown again. Whoever has it may do what {owner} may. "
            "Commands find it in PHALANX_TOKEN."
        ),
        "请保存 {owner} 的这个令牌，之后不再显示。持有者拥有 {owner} 的全部权限。命令从 PHALANX_TOKEN 读取它。",
    ),
    "serving": (
        "Jobs and console at {address}/ui. Ctrl-C ends the server; jobs go on.",
        "作业接口与控制台：{address}/ui。按 Ctrl-C 结束服务；作业继续运行。",
    ),
    "sign in with": ("Sign in with this token, good for {hours} h:", "用此令牌登录，{hours} 小时内有效："),
    "workspace": ("workspace", "工作空间"),
    "member": ("member", "成员"),
    "code": ("code", "代码"),
    "dataset": ("dataset", "数据集"),
    "secret": ("secret", "密钥"),
    "token": ("token", "令牌"),
    "expires": ("expires", "过期时间"),
    "never": ("never", "永不"),
}
"""English and Chinese by key; fields in braces."""


def language(env: Mapping[str, str] | None = None) -> str:
    """Return "zh" or "en": what PHALANX_LANG says, else the language of the user's locale.

    Args:
        env: Variables to read; the process's own when omitted.
    """
    env = os.environ if env is None else env
    for name in ("PHALANX_LANG", "LC_ALL", "LANG"):
        if value := env.get(name, "").strip():
            return "zh" if value.startswith("zh") else "en"
    return "en"


def text(key: str, **values: object) -> str:
    """Return a message in the user's language with its fields filled in."""
    return TABLE[key][language() == "zh"].format(**values)


def meant(name: str, candidates: Iterable[str]) -> str:
    """Return a question for the known name nearest to `name`, in the user's language, or an empty string."""
    match = nearest(name, candidates)
    return "" if match is None else text("nearest flag", flag=match)

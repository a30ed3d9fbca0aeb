"""`translate_reason`: the Chinese of the sentences that say why a job is in its state or failed (pure).

The store keeps these sentences in English, for all readers; what is not of this table is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.i18n import to_chinese
from phalanx.jobs.models import Cause
from phalanx.ui.i18n import speaker
from phalanx.ui.member_changes import translate_change

_AMOUNT = r"[\d.]+ (?:cpu|GiB of memory|gpu)"
_AMOUNTS = rf"{_AMOUNT}(?:, {_AMOUNT})*"
_LACKING = rf"{_AMOUNT}, (?:none is|{_AMOUNT} are) free"
_RESOURCES = {"cpu": "核 CPU", "GiB of memory": "GiB 内存", "gpu": "个 GPU"}

_ENDINGS = (
    "raised {error}",
    "ended by signal {number} ({name})",
    "ended early with exit code 0, while others still waited for it",
    "ended with exit code {code}",
    "hung: {why}",
    "killed from outside without warning, often by the kernel's out-of-memory killer (see dmesg)",
    "a memory error in native code; the Python stack at that moment is in the log",
    "native code gave up; its reason is in the log",
    "memory behind a mapping is gone: a full /dev/shm or disk, or a truncated file",
    "asked to end by someone other than this launcher",
    "an arithmetic error in native code",
    "an instruction this processor does not have: a library built for another one",
)
"""What the launcher says of the end of a process, as its catalogue has it."""

_SLURM = {
    "a node failed": "节点故障",
    "a node did not start": "节点未能启动",
    "a job of higher priority took the nodes": "节点被优先级更高的作业占用",
    "cancelled by somebody, and not by us": "被他人取消，并非由本系统发起",
    "taken back": "被收回",
    "its time ran out": "时间用完",
    "its deadline passed": "超过截止时间",
    "it used more memory than it had asked for": "使用的内存超过申请的数量",
    "not looked at yet": "尚未处理",
    "waits until enough nodes are free": "等待足够的空闲节点",
    "other jobs are before it": "前面还有其他作业",
    "its time to begin has not come": "未到开始时间",
    "waits for another job": "等待另一个作业",
    "waits for a job that can never end as it should; cancel it": "所依赖的作业不可能满足条件；请取消本作业",
    "held by an administrator": "被管理员挂起",
    "held; `scontrol release` lets it go": "已挂起；用 `scontrol release` 放行",
    "could not be started; an administrator must look": "无法启动；需要管理员处理",
    "waits for a licence": "等待许可证",
    "a node that it needs is down": "所需节点已宕机",
    "nodes that it needs are down, drained or reserved": "所需节点宕机、停用或被预留",
    "a node that it needs is down, drained or reserved": "所需节点宕机、停用或被预留",
    "its partition is down": "分区已停",
    "its partition takes no jobs now": "分区目前不接受作业",
    "asks for more nodes than its partition allows": "申请的节点数超过分区上限",
    "asks for more time than its partition allows": "申请的时间超过分区上限",
    "its nodes are being set up": "正在准备节点",
    "waits for its reservation": "等待预留的资源",
    "its account is not valid": "账户无效",
    "its QOS is not valid": "QOS 无效",
    "a limit of its user, account or QOS is reached": "用户、账户或 QOS 的额度已用完",
    "waits": "等待中",
}
"""What the Slurm backend says of states and of reasons to wait, before Slurm's own words."""


def _amounts(text: str) -> str:
    """The amounts of a sentence in Chinese: `4 cpu` is `4 核 CPU`."""
    return re.sub(r"([\d.]+) (cpu|GiB of memory|gpu)", lambda match: f"{match[1]} {_RESOURCES[match[2]]}", text)


def _lacking(text: str) -> str:
    parts = []
    for part in text.split("; "):
        need, _, left = part.partition(", ")
        free = "没有空闲" if left == "none is free" else f"空闲 {_amounts(left.removesuffix(' are free'))}"
        parts.append(f"{_amounts(need)}，{free}")
    return "；".join(parts)


def _place(text: str) -> str:
    number = re.match(r"\d+", text)
    return "排在下一个" if number is None else f"排在第 {number[0]} 位"


def _process(text: str) -> str:
    """Return a process of a job in Chinese: `rank 1` is `进程 1`."""
    name, _, number = text.partition(" ")
    return {"rank": f"进程 {number}", "server": f"参数服务器 {number}", "the": "启动器"}.get(name, text)


def _aside(text: str | None, form: str = "{}") -> str:
    return "" if text is None else f"（{form.format(text)}）"


def _ending(text: str) -> str:
    """Return how a process ended in Chinese: by a signal, with what usually sends it."""
    text = text.removeprefix("was ")
    signal, colon, why = text.partition("): ")
    if text.startswith("ended by signal ") and colon:
        return f"{_ending(signal + ')')}：{_ending(why)}"
    return to_chinese(text, _ENDINGS) or text


_PLACE = r"(?P<place>next in line|\d+(?:st|nd|rd|th) in line)"
_ENDED = r"(?P<how>raised .+|(?:was )?ended (?:by|with|early) .+|hung: .+)"
_CAUSE = rf"(?P<cause>{'|'.join(Cause)})"
_OUTSIDE = {"killed from outside": "被外部终止", "asked to end from outside": "被外部要求结束"}
_VERBS = {"started": "无法启动", "supervised": "运行中无法继续监管"}

_FIXED = {
    "its process is gone": "其进程已不存在",
    "its backend knows nothing of it any more": "后端已没有它的记录",
    "Slurm does not know the job any more": "Slurm 中已没有该作业",
    "the cluster has no such workload": "集群中没有该工作负载",
    "was not started": "没有启动",
}
"""What backends say of a node that left no exit record."""

_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.DOTALL), chinese)
    for pattern, chinese in (
        (
            rf"needs (?P<lacking>{_LACKING}(?:; {_LACKING})*); {_PLACE}",
            lambda m: f"需要 {_lacking(m['lacking'])}；{_place(m['place'])}",
        ),
        (
            rf"fits now, but (?P<first>\S+), which is first in line, would start later; {_PLACE}",
            lambda m: f"资源已够，但会使排在最前的 {m['first']} 更晚开始；{_place(m['place'])}",
        ),
        (r"more than (?P<n>\d+) jobs are before it in line", lambda m: f"前面还有超过 {m['n']} 个作业"),
        (
            rf"needs more than this machine has \((?P<need>{_AMOUNTS}), it has (?P<has>{_AMOUNTS})\)",
            lambda m: f"所需资源超过本机（需要 {_amounts(m['need'])}，本机有 {_amounts(m['has'])}）",
        ),
        (r"the quota of queue (?P<queue>\S+) is used up", lambda m: f"队列 {m['queue']} 的配额已用完"),
        (r"submitted by (?P<who>\S+)", lambda m: f"由 {m['who']} 提交"),
        (r"stopped by (?P<who>\S+)", lambda m: f"由 {m['who']} 停止"),
        (r"attempt (?P<n>\d+)", lambda m: f"第 {m['n']} 次尝试"),
        (
            rf"attempt (?P<n>\d+) failed \({_CAUSE}: (?P<why>.+)\); restart (?P<restart>\d+) of (?P<most>\d+)",
            lambda m: (
                f"第 {m['n']} 次尝试失败（{speaker('zh')('cause ' + m['cause'])}：{translate_reason(m['why'])}）；"
                f"第 {m['restart']} 次重启，最多 {m['most']} 次"
            ),
        ),
        (
            r"(?:slurm: )?(?P<words>[^(]+) \(Slurm: (?P<slurm>.+)\)",
            lambda m: f"{_SLURM.get(m['words'], m['words'])}（Slurm：{m['slurm']}）",
        ),
        (
            r"(?P<what>.+): (?P<how>killed from outside|asked to end from outside)",
            lambda m: f"{translate_reason(m['what'])}：{_OUTSIDE[m['how']]}",
        ),
        (
            r"(?P<what>.+): out of memory \((?P<word>.+)\)",
            lambda m: f"{translate_reason(m['what'])}：内存不足（{m['word']}）",
        ),
        (
            r"(?P<what>.+): (?P<why>the kernel killed .+ because memory ran out)",
            lambda m: f"{translate_reason(m['what'])}：{translate_reason(m['why'])}",
        ),
        (
            r"the kernel killed (?:(?P<n>\d+) processes|a process) of this machine because memory ran out",
            lambda m: f"内存耗尽，内核终止了本机的 {m['n'] or 1} 个进程",
        ),
        (
            r"node (?P<node>\d+) was lost: (?P<why>.+), and it left no exit record",
            lambda m: f"节点 {m['node']} 丢失：{translate_reason(m['why'])}；没有留下退出记录",
        ),
        (
            r"node (?P<node>\d+) was (?P<how>asked to end.*|ended with node .+), and not by us",
            lambda m: f"节点 {m['node']} {translate_reason(m['how'])}，并非由本系统发起",
        ),
        (r"asked to end(?: by (?P<signal>\w+))?", lambda m: f"被要求结束{_aside(m['signal'])}"),
        (r"ended with node (?P<node>\d+), which failed", lambda m: f"因节点 {m['node']} 失败而结束"),
        (
            r"node (?P<node>\d+) has not been heard of for (?P<s>\S+) s",
            lambda m: f"节点 {m['node']} 已 {m['s']} 秒没有消息",
        ),
        (
            r"no rank wrote a line or a run event for (?P<s>\d+) s \(retries\.hang_after\)",
            lambda m: f"所有进程已 {m['s']} 秒没有输出日志或运行事件（retries.hang_after）",
        ),
        (
            r"rank (?P<rank>\S+) fell silent first, (?P<s>\d+) s before the others; (?P<rest>.+)",
            lambda m: f"进程 {m['rank']} 最先停止输出，比其他进程早 {m['s']} 秒；{translate_reason(m['rest'])}",
        ),
        (r"still running after max_runtime, (?P<s>\S+) s", lambda m: f"超过 max_runtime（{m['s']} 秒）仍在运行"),
        (
            r"could not be submitted(?: for (?P<s>\d+) s)?: (?P<error>.+)",
            lambda m: f"无法提交{_aside(m['s'], '已尝试 {} 秒')}：{m['error']}",
        ),
        (
            r"(?P<command>'.+'|\".+\") could not be (?P<verb>started|supervised): (?P<error>.+)",
            lambda m: f"{m['command']} {_VERBS[m['verb']]}：{m['error']}",
        ),
        (r"no node of the job started; see (?P<file>\S+)", lambda m: f"没有任何节点启动；见 {m['file']}"),
        (r"its time ran out \(Kubernetes: (?P<words>.+)\)", lambda m: f"时间用完（Kubernetes：{m['words']}）"),
        (
            r"pod (?P<pod>\S+) used more memory than its limit \(Kubernetes: OOMKilled\)",
            lambda m: f"Pod {m['pod']} 使用的内存超过上限（Kubernetes：OOMKilled）",
        ),
        (
            r"pod (?P<pod>\S+) was ended by the cluster \(Kubernetes: (?P<why>.+)\)",
            lambda m: f"Pod {m['pod']} 被集群终止（Kubernetes：{m['why']}）",
        ),
        (
            r"ending attempt (?P<n>\d+): (?P<rest>.+)",
            lambda m: f"正在结束第 {m['n']} 次尝试：{translate_reason(m['rest'])}",
        ),
        (
            rf"(?P<who>rank \d+|server \d+|the launcher|torchrun) {_ENDED}",
            lambda m: f"{_process(m['who'])} {_ending(m['how'])}",
        ),
    )
)


def translate_reason(text: str) -> str:
    """Return a sentence about a job in Chinese; one that is not of the table is returned as it is."""
    if text in _FIXED:
        return _FIXED[text]
    for pattern, chinese in _SENTENCES:
        if match := pattern.fullmatch(text):
            return chinese(match)
    return translate_change(text)

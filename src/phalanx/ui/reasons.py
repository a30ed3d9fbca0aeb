"""`translate_reason`: the Chinese of the sentences that say why a job is in its state or failed (pure).

The store keeps these sentences in English, for all readers; what is of no sentence here is shown as it is.
"""

from __future__ import annotations

import re

from phalanx.i18n.translation import Placeholder, Sentences, Translator
from phalanx.jobs.models import Cause
from phalanx.ui.i18n import speaker
from phalanx.ui.member_changes import translate_change

_AMOUNT = r"[\d.]+ (?:cpu|GiB of memory|gpu)"
_AMOUNTS = rf"{_AMOUNT}(?:, {_AMOUNT})*"
_LACKING = rf"{_AMOUNT}, (?:none is|{_AMOUNT} are) free"
_RESOURCES = {"cpu": "核 CPU", "GiB of memory": "GiB 内存", "gpu": "个 GPU"}

_ENDINGS: Sentences = (
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
"""What the launcher says of the end of a process."""

_SLURM: Sentences = (
    "a node failed",
    "a node did not start",
    "a job of higher priority took the nodes",
    "cancelled by somebody, and not by us",
    "taken back",
    "its time ran out",
    "its deadline passed",
    "it used more memory than it had asked for",
    "not looked at yet",
    "waits until enough nodes are free",
    "other jobs are before it",
    "its time to begin has not come",
    "waits for another job",
    "waits for a job that can never end as it should; cancel it",
    "held by an administrator",
    "held; `scontrol release` lets it go",
    "could not be started; an administrator must look",
    "waits for a licence",
    "a node that it needs is down",
    "nodes that it needs are down, drained or reserved",
    "a node that it needs is down, drained or reserved",
    "its partition is down",
    "its partition takes no jobs now",
    "asks for more nodes than its partition allows",
    "asks for more time than its partition allows",
    "its nodes are being set up",
    "waits for its reservation",
    "its account is not valid",
    "its QOS is not valid",
    "a limit of its user, account or QOS is reached",
    "waits",
)
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


def _cause(text: str) -> str:
    return speaker("zh")(f"cause {text}")


_translate_ending = Translator(_ENDINGS)
_translate_slurm = Translator(_SLURM)


def _ending(text: str) -> str:
    """Return how a process ended in Chinese: by a signal, with what usually sends it."""
    text = text.removeprefix("was ")
    signal, colon, why = text.partition("): ")
    if text.startswith("ended by signal ") and colon:
        return f"{_ending(signal + ')')}：{_ending(why)}"
    return _translate_ending(text) or text


def translate_reason(text: str) -> str:
    """Return a sentence about a job in Chinese; one that is of none here is returned as it is."""
    return _translate(text) or translate_change(text)


_REASONS: Sentences = (
    "its process is gone",
    "its backend knows nothing of it any more",
    "Slurm does not know the job any more",
    "the cluster has no such workload",
    "was not started",
    "needs {lacking}; {place}",
    "fits now, but {first}, which is first in line, would start later; {place}",
    "more than {n} jobs are before it in line",
    "needs more than this machine has ({need}, it has {has})",
    "the quota of queue {queue} is used up",
    "submitted by {who}",
    "stopped by {who}",
    "attempt {n}",
    "attempt {n} failed ({cause}: {why}); restart {restart} of {most}",
    "slurm: {slurm_words} (Slurm: {slurm})",
    "{slurm_words} (Slurm: {slurm})",
    "{what}: {outside}",
    "{what}: out of memory ({word})",
    "{what}: {killed}",
    "the kernel killed {n} processes of this machine because memory ran out",
    "the kernel killed a process of this machine because memory ran out",
    "node {node} was lost: {why}, and it left no exit record",
    "node {node} was {stopped}, and not by us",
    "asked to end by {signal}",
    "asked to end",
    "ended with node {node}, which failed",
    "node {node} has not been heard of for {s} s",
    "no rank wrote a line or a run event for {s} s (retries.hang_after)",
    "rank {rank} fell silent first, {s} s before the others; {rest}",
    "still running after max_runtime, {s} s",
    "could not be submitted for {s} s: {error}",
    "could not be submitted: {error}",
    "{command} could not be started: {error}",
    "{command} could not be supervised: {error}",
    "no node of the job started; see {file}",
    "its time ran out (Kubernetes: {kubernetes})",
    "pod {pod} used more memory than its limit (Kubernetes: OOMKilled)",
    "pod {pod} was ended by the cluster (Kubernetes: {kubernetes})",
    "ending attempt {n}: {rest}",
    "{process} {ending}",
    "killed from outside",
    "asked to end from outside",
)

_REASON = Placeholder(translate=translate_reason)
_NUMBER = Placeholder(r"\d+")
_WORD = Placeholder(r"\S+")

_translate = Translator(
    _REASONS,
    {
        "lacking": Placeholder(rf"{_LACKING}(?:; {_LACKING})*", _lacking),
        "place": Placeholder(r"next in line|\d+(?:st|nd|rd|th) in line", _place),
        "need": Placeholder(_AMOUNTS, _amounts),
        "has": Placeholder(_AMOUNTS, _amounts),
        "cause": Placeholder("|".join(Cause), _cause),
        "slurm_words": Placeholder(r"[^(]+", lambda text: _translate_slurm(text) or text),
        "outside": Placeholder("killed from outside|asked to end from outside", translate_reason),
        "killed": Placeholder("the kernel killed .+ because memory ran out", translate_reason),
        "stopped": Placeholder("asked to end.*|ended with node .+", translate_reason),
        "process": Placeholder(r"rank \d+|server \d+|the launcher|torchrun", _process),
        "ending": Placeholder(r"raised .+|(?:was )?ended (?:by|with|early) .+|hung: .+", _ending),
        "command": Placeholder(r"'.+'|\".+\""),
        "signal": Placeholder(r"\w+"),
        **dict.fromkeys(("what", "why", "rest"), _REASON),
        **dict.fromkeys(("n", "node", "most", "restart"), _NUMBER),
        **dict.fromkeys(("first", "queue", "who", "rank", "s", "pod", "file"), _WORD),
    },
)

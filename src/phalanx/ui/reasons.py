"""`translate_reason`: the Chinese of the sentences that say why a job is in its state (pure).

The store keeps these sentences in English, for all readers; what is not of this table is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_AMOUNT = r"[\d.]+ (?:cpu|GiB of memory|gpu)"
_AMOUNTS = rf"{_AMOUNT}(?:, {_AMOUNT})*"
_LACKING = rf"{_AMOUNT}, (?:none is|{_AMOUNT} are) free"
_RESOURCES = {"cpu": "核 CPU", "GiB of memory": "GiB 内存", "gpu": "个 GPU"}


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


_PLACE = r"(?P<place>next in line|\d+(?:st|nd|rd|th) in line)"

_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), chinese)
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
    )
)


def translate_reason(text: str) -> str:
    """Return a sentence about a job in Chinese; one that is not of the table is returned as it is."""
    for pattern, chinese in _SENTENCES:
        if match := pattern.fullmatch(text):
            return chinese(match)
    return text

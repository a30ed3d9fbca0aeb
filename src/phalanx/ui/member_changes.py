"""`translate_change`: the Chinese of what an elastic job says of its ranks and workers that come and go (pure)."""

from __future__ import annotations

import re

from phalanx.i18n.translation import Placeholder, Sentences, Translator

_MEMBER_ENDINGS: Sentences = ("raised {error}", "ended with exit code {code}")

_MEMBER = r"(?:rank \d+ \([^)]+\)|n\d+\.\d+(?: \(pid \d+\))?|worker \d+)"
_NODE = r"\S+ \(node \d+\)"
_NEXT = re.compile(rf"; (?=(?:{_MEMBER}|{_NODE}) )")
"""Between two changes that one sentence tells of."""

_CHANGES: Sentences = (
    "the job starts",
    "by its own wish",
    "stopped by a signal",
    "stopped by a debugger",
    "gone",
    "ended",
    "{member} leaves ({why})",
    "{member} left",
    "{member} joins",
    "{member} takes the place of a lost one",
    "{member} was killed by {signal}",
    "{member} ended with exit code 0 while others waited for it",
    "{member} is frozen: no processor time and no I/O for {s} s, and others waited for it",
    "{member} is frozen: {why}, while others waited {s} s for it",
    "{member} is frozen: {why} for {s} s",
    "{member} {ending}",
    "{node} is gone: its launcher has ended",
    "{node} is gone or cut off: {why}",
    "{node} has ended",
    "{node} was started again",
    "no sign of life for {s} s",
    "it did not vote within {s} s",
    "its launcher did not answer within {s} s, while ranks waited",
    "scaled to {n} ranks",
    "node {n} is there",
    "node {n} is about to be taken away",
    (
        "push {push} of worker {worker} is in the tables of {have} and not in those of {lack}: the worker "
        "was lost while it sent it. Training continues, and the tables keep that difference"
    ),
)


def translate_change(text: str) -> str:
    """Return a sentence about members in Chinese; one that is of none here is returned as it is."""
    if len(changes := _NEXT.split(text)) > 1:
        return "；".join(map(translate_change, changes))
    return _translate(text) or text


def _member(text: str) -> str:
    """Return a member or node in Chinese, as a sentence continues after it: `rank 1 (n0.1)` is `进程 1（n0.1）`."""
    text = re.sub(r" \((.+)\)", lambda match: f"（{match[1].replace(', ', '，')}）", text)
    text = re.sub(r"^rank ", "进程 ", re.sub(r"^worker ", "工作进程 ", text)).replace("（node ", "（节点 ")
    return text if text.endswith("）") else f"{text} "


def _servers(text: str) -> str:
    return "参数服务器 " + "、".join(re.findall(r"\d+", text))


_translate_member_ending = Translator(_MEMBER_ENDINGS)

_translate = Translator(
    _CHANGES,
    {
        "member": Placeholder(_MEMBER, _member),
        "node": Placeholder(_NODE, _member),
        "ending": Placeholder("raised .+|ended with .+", lambda text: _translate_member_ending(text) or text),
        "why": Placeholder(translate=translate_change),
        "have": Placeholder(translate=_servers),
        "lack": Placeholder(translate=_servers),
        "s": Placeholder(r"\S+"),
        **dict.fromkeys(("n", "push", "worker"), Placeholder(r"\d+")),
    },
)

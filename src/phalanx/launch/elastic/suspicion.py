"""`Suspicion`: what becomes of processes that ranks have waited for: judged where they run, fenced or waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.elastic.nodes.node_group import NodeGroup
from phalanx.launch.elastic.suspects import Suspects

FENCE_S = 0.5
"""How long a process may take to die of SIGKILL before the others continue without it."""

JUDGE_S = 1.0
"""How long another node may take to say that it judges one of its processes, before it counts as cut off."""


@dataclass(slots=True)
class _Fence:
    reason: str
    deadline: float


@dataclass
class Suspicion:
    """Suspects of all nodes that ranks here report, and those of this node that any rank reports."""

    group: NodeGroup
    fence: Callable[[str, str], str]
    """Kills a process that is frozen for a reason; returns the reason with the process's name."""

    answer: Callable[[str, str, str], None]
    """Tells a reporter why it has to wait for a suspect."""

    lose: Callable[[str, str], None]
    """Counts a process as gone."""

    _suspects: Suspects = field(default_factory=Suspects)
    _fences: dict[str, _Fence] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)
    """By node: until when it may take to answer."""

    def take(self, reporter: str, details: dict[str, Any]) -> None:
        """Take what a rank of this node reports."""
        now = time.monotonic()
        membership = self.group.membership
        self._suspects.note_speaker(reporter, now)
        for suspect in details["ids"]:
            member = membership.members.get(suspect)
            if member is None or suspect == reporter:
                continue
            question = {"id": suspect, "reporter": reporter, "waited_s": details["waited_s"], "epoch": details["epoch"]}
            if member.node == self.group.node:
                self._open_case(question, now)
            elif suspect not in membership.gone:
                self.group.mesh.send(member.node, {"judge": question})
                self._asked.setdefault(member.node, now + JUDGE_S)

    def take_from_node(self, node: int, message: dict[str, Any]) -> None:
        """Take a question or an answer of another node."""
        if "judge" in message:
            self.group.mesh.send(node, {"judging": {}})
            self._open_case(message["judge"], time.monotonic())
        elif "judging" in message:
            self._asked.pop(node, None)

    def _open_case(self, question: dict[str, Any], now: float) -> None:
        membership, suspect = self.group.membership, question["id"]
        view = membership.view
        if suspect in membership.finished and view is not None and question["epoch"] == view.epoch:
            self.lose(suspect, f"{suspect} ended with exit code 0 while others waited for it")
        elif suspect not in self._fences and membership.is_awaited(suspect):
            waited_s = float(question["waited_s"])
            self._suspects.suspect(membership.members[suspect], question["reporter"], waited_s, now)

    def is_fenced(self, member_id: str) -> bool:
        """Whether a process was killed here, and has not ended yet."""
        return member_id in self._fences

    def close(self, member_id: str) -> str | None:
        """Forget a process that has ended; returns why it was fenced, or None if it was not."""
        self._suspects.close(member_id)
        fence = self._fences.pop(member_id, None)
        return None if fence is None else fence.reason

    def update(self, now: float) -> None:
        """Judge what can be judged."""
        for verdict in self._suspects.verdicts(now):
            if verdict.is_frozen:
                reason = self.fence(verdict.member.id, verdict.why)
                self._fences[verdict.member.id] = _Fence(reason, now + FENCE_S)
                continue
            for reporter in verdict.reporters:
                self.answer(reporter, verdict.member.id, verdict.why)
        for member_id, fence in self._fences.items():
            if now > fence.deadline:  # the kernel cannot end it yet, but it runs no more
                self.lose(member_id, fence.reason)
        for node in [node for node, until in self._asked.items() if now > until]:
            del self._asked[node]
            self.group.mesh.drop(node, f"its launcher did not answer within {JUDGE_S:g} s, while ranks waited")

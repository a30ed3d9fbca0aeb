"""`Suspects`: judges processes that others have waited for: frozen, or at work."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.cluster.view import Member
from phalanx.launch.process.usage import ProcessUsage, stopped_state

LONGEST_WATCH_S = 2.0
"""How long a process that could run is watched before it counts as frozen, where others waited as long."""

SHORTEST_WATCH_S = 0.3
LOOK_S = 0.25
"""Between two looks at what a process and its children did: each reads much of /proc."""


@dataclass(frozen=True, slots=True)
class SuspectVerdict:
    """What became of a suspicion."""

    member: Member
    is_frozen: bool
    why: str
    reporters: tuple[str, ...]
    """Members that asked."""


@dataclass(slots=True)
class _Case:
    member: Member
    since: float
    until: float
    waited_s: float
    before: ProcessUsage
    next_probe: float
    reporters: set[str] = field(default_factory=set)


class Suspects:
    """Open cases. A process that asks about another is no suspect itself: it waits, and says so."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._spoke_at: dict[str, float] = {}

    def note_speaker(self, member_id: str, now: float) -> None:
        """Note that a member said something, so that it is not frozen."""
        self._spoke_at[member_id] = now

    def suspect(self, member: Member, reporter: str, waited_s: float, now: float) -> None:
        """Open a case, or add to it."""
        case = self._cases.get(member.id)
        if case is None:
            watch_s = min(max(waited_s, SHORTEST_WATCH_S), LONGEST_WATCH_S)
            activity = ProcessUsage.measure(member.pid)
            case = _Case(member, now, now + watch_s, waited_s, activity, now + SHORTEST_WATCH_S)
            self._cases[member.id] = case
        case.reporters.add(reporter)

    def close(self, member_id: str) -> None:
        """Forget a process that is gone."""
        self._cases.pop(member_id, None)
        self._spoke_at.pop(member_id, None)

    def verdicts(self, now: float) -> list[SuspectVerdict]:
        """Return the cases that are clear, and close them."""
        clear = []
        for case in list(self._cases.values()):
            verdict = self._judge(case, now)
            if verdict is not None:
                clear.append(SuspectVerdict(case.member, *verdict, tuple(sorted(case.reporters))))
                del self._cases[case.member.id]
        return clear

    def _judge(self, case: _Case, now: float) -> tuple[bool, str] | None:
        if state := stopped_state(case.member.pid):
            return True, f"is frozen: {state}, while others waited {case.waited_s:.1f} s for it"
        if self._spoke_at.get(case.member.id, 0.0) >= case.since - LONGEST_WATCH_S:
            return False, "waits for another itself"
        if now < case.next_probe:
            return None
        watched_s, case.next_probe = now - case.since, now + LOOK_S
        if work := ProcessUsage.measure(case.member.pid).describe_since(case.before, watched_s):
            return False, work
        if now < case.until:
            return None
        return True, f"is frozen: no processor time and no I/O for {watched_s:.1f} s, and others waited for it"

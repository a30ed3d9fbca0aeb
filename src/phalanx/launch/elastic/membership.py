"""`Membership`: decides the members of a job, view by view (pure).

    joiner -> ready -> member -> finished (exit code 0)
                              -> gone
                              -> leaving (in no view any more, ends at the next step)

Losses make a view at once. Joins and departures wait until every member has taken up the view before, so that ranks
have one planned change at a time. An unplanned view has the members of the view before without those that are gone.

What happens is kept as sets that only grow, and every method may be called twice: nodes tell each other what happened,
in any order, and have the same state in the end. One of them asks for the next view; the others adopt it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.cluster.view import Member, View


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """How many ranks a job may have."""

    least: int
    most: int


def distribute_ranks(size: int, capacity: Mapping[int, int]) -> dict[int, int]:
    """Return how many ranks each node gets, one after another, so that no node has more than it can.

    Args:
        size: Ranks of the job.
        capacity: Most ranks of each node.
    """
    targets = dict.fromkeys(sorted(capacity), 0)
    for _ in range(max(capacity.values(), default=0)):
        for node in targets:
            if size > 0 and targets[node] < capacity[node]:
                targets[node] += 1
                size -= 1
    return targets


@dataclass
class Membership:
    """Who belongs to the job. Methods record what happened; `next_view` says what follows from it."""

    limits: SizeLimits
    view: View | None = None
    targets: dict[int, int] = field(default_factory=dict)
    """Ranks that each node should have."""

    version: tuple[int, int] = (0, -1)
    """Of the targets: how often they were changed, and the node that did it last; the greater one counts."""

    surplus: set[str] = field(default_factory=set)
    """Members that are to leave because of the targets."""

    draining: set[str] = field(default_factory=set)
    """Launchers whose node is about to be taken away."""

    members: dict[str, Member] = field(default_factory=dict)
    """Every process that was started, by id."""

    ready: list[str] = field(default_factory=list)
    """Joiners that are set up, in the order in which they said so."""

    gone: dict[str, str] = field(default_factory=dict)
    """Processes that died or were fenced, and why."""

    finished: set[str] = field(default_factory=set)
    """Processes that ended well."""

    took_up: dict[str, int] = field(default_factory=dict)
    """The newest epoch that each process computes in."""

    departures: dict[str, str] = field(default_factory=dict)
    """Members that are to leave, and why."""

    leaving: set[str] = field(default_factory=set)
    """Processes that a view left out, and that have not ended."""

    refusal: str = ""
    """Why the job cannot continue; empty while it can."""

    _broke_off: dict[str, str] = field(default_factory=dict)
    """Processes that were gone before all had continued without them."""

    def start(self, ids: Sequence[str], store: str) -> View:
        """Return view 0, of members that have all started."""
        view = View(
            epoch=0,
            members=tuple(self.members[member_id] for member_id in ids),
            store=store,
            reason="the job starts",
            planned=True,
        )
        self.adopt(view)
        return view

    # What happened.

    def add(self, member: Member) -> None:
        """Count a process that was started; one that is in no view is a joiner."""
        self.members[member.id] = member

    def admit(self, member_id: str) -> None:
        """Take a joiner that is set up into the next planned view."""
        if member_id not in self.ready:
            self.ready.append(member_id)

    def lose(self, member_id: str, reason: str) -> bool:
        """Count a process as gone or fenced; returns whether the ranks are concerned."""
        self.finished.discard(member_id)
        if member_id in self.gone:
            return False
        concerns = self.is_awaited(member_id)
        if concerns and member_id in self.leaving:
            self._broke_off[member_id] = reason
        self.gone[member_id] = reason
        self.leaving.discard(member_id)
        return concerns

    def finish(self, member_id: str) -> None:
        """Count a process that ended well."""
        if member_id not in self.gone:
            self.finished.add(member_id)
        self.leaving.discard(member_id)

    def depart(self, member_ids: Iterable[str], reason: str) -> None:
        """Have members leave at the next planned view."""
        for member_id in member_ids:
            self.departures.setdefault(member_id, reason)

    def take_up(self, member_id: str, epoch: int) -> bool:
        """Note that a member computes in a view; returns whether it was the last to do so."""
        was_settled = self.is_settled
        self.took_up[member_id] = max(epoch, self.took_up.get(member_id, -1))
        return self.is_settled and not was_settled

    def scale(self, targets: dict[int, int], reason: str, version: tuple[int, int]) -> None:
        """Change how many ranks each node should have, unless a later change is known."""
        if version <= self.version:
            return
        self._keep_surplus()
        self.targets, self.version = dict(targets), version
        for node, target in targets.items():
            self.surplus.update(self._staying(node)[target:])
        self.depart(self.surplus, reason)

    def adopt_targets(self, targets: dict[int, int], surplus: set[str], version: tuple[int, int]) -> None:
        """Take what a change of another node came to, unless a later one is known."""
        if version > self.version or not self.targets:
            self._keep_surplus()
            self.targets, self.surplus, self.version = targets, surplus, version

    def _keep_surplus(self) -> None:
        for member_id in self.surplus:
            self.departures.pop(member_id, None)
        self.surplus = set()

    def drain(self, launch: str) -> None:
        """Give a launcher no more ranks."""
        self.draining.add(launch)

    def adopt(self, view: View) -> None:
        """Continue with a newer view."""
        before = () if self.view is None else self.view.ids
        if self.view is None:
            self.targets = self.targets or dict(Counter(member.node for member in view.members))
        self.view = view
        self.members |= {member.id: member for member in view.members}
        out = set(before) - set(view.ids)
        self.leaving = {i for i in self.leaving | out if i not in self.gone and i not in self.finished}
        self.surplus -= out
        self._broke_off.clear()

    # What follows.

    @property
    def active(self) -> tuple[str, ...]:
        """Members of the view that compute, by rank."""
        ids = () if self.view is None else self.view.ids
        return tuple(i for i in ids if i not in self.finished and i not in self.gone)

    @property
    def joiners(self) -> list[str]:
        """Processes that run and are in no view yet."""
        out = self.gone.keys() | self.finished | self.leaving
        return [i for i in self.members if i not in out and (self.view is None or i not in self.view.ids)]

    @property
    def _losses(self) -> dict[str, str]:
        ids = () if self.view is None else self.view.ids
        return {i: self.gone[i] for i in ids if i in self.gone} | self._broke_off

    def is_awaited(self, member_id: str) -> bool:
        """Whether members wait for this one: in the view, or in the one before, which not all have left."""
        return member_id in self.active or (member_id in self.leaving and not self.is_settled)

    @property
    def is_settled(self) -> bool:
        """Whether every member computes in the view."""
        if self.view is None:
            return False
        epoch = self.view.epoch
        return epoch == 0 or all(self.took_up.get(i, -1) >= epoch for i in self.active)

    @property
    def has_finished(self) -> bool:
        """Whether a member of the view has ended well, so that the job is about to end."""
        return self.view is not None and not self.finished.isdisjoint(self.view.ids)

    @property
    def is_over(self) -> bool:
        """Whether every member has finished, and whoever leaves has left."""
        return self.view is not None and not self.active and not self._losses and not self.leaving

    def missing(self, node: int) -> int:
        """Return how many joiners to start on a node."""
        if self.refusal or self.has_finished or self._losses or not self.is_settled:
            return 0
        return max(0, self.targets.get(node, 0) - len(self._staying(node)) - len(self._joiners_on(node)))

    def surplus_joiners(self, node: int) -> list[str]:
        """Return joiners on a node that are not needed any more."""
        return self._joiners_on(node)[max(0, self.targets.get(node, 0) - len(self._staying(node))) :]

    def _staying(self, node: int) -> list[str]:
        return [i for i in self.active if i not in self.departures and self.members[i].node == node]

    def _joiners_on(self, node: int) -> list[str]:
        return [i for i in self.joiners if self.members[i].node == node]

    def next_view(self, stores: Mapping[int, str]) -> View | None:
        """Return the view that is due, to be adopted; None where nothing has changed, or where `refusal` says why not.

        Args:
            stores: `host:port` of the store on each node; its ranks will meet in that of the lowest node among them.
        """
        if self.view is None or self.refusal:
            return None
        if self._losses:
            return self._next_unplanned(self.view, stores)
        if self.is_settled and not self.has_finished:
            return self._next_planned(self.view, stores)
        return None

    def _next_unplanned(self, view: View, stores: Mapping[int, str]) -> View | None:
        reason = "; ".join(dict.fromkeys(self._losses.values()))
        # Those who have finished did their part.
        left = len(self.active) + len(self.finished.intersection(view.ids))
        if not self.active:
            self.refusal = f"{reason}: no rank is left"
            return None
        if left < self.limits.least:
            self.refusal = f"{reason}: {left} of at least {self.limits.least} ranks are left"
            return None
        members = [m for m in view.members if m.id in self.active]
        return _view_after(view, members, stores, reason, planned=False)

    def _next_planned(self, view: View, stores: Mapping[int, str]) -> View | None:
        departures = {i: why for i, why in self.departures.items() if i in self.active}
        stay = [m for m in view.members if m.id not in departures]
        joiners = self.joiners
        ready = [self.members[i] for i in self.ready if i in joiners and i not in self.departures]
        new = ready[: max(0, self.limits.most - len(stay))]
        # Whoever wants to leave waits for another where too few would be left.
        if not stay or len(stay) + len(new) < self.limits.least or not (new or departures):
            return None
        reasons = [f"{i} leaves ({why})" for i, why in departures.items()] + [f"{m.id} joins" for m in new]
        return _view_after(view, [*stay, *new], stores, "; ".join(reasons), planned=True)


def _view_after(
    before: View, members: Sequence[Member], stores: Mapping[int, str], reason: str, *, planned: bool
) -> View:
    store = stores[min(member.node for member in members)]
    return View(epoch=before.epoch + 1, members=tuple(members), store=store, reason=reason, planned=planned)

"""`ElasticRecovery`: complete every global batch of an elastic job while ranks leave and join.

Parameters change only after all members have said that their reductions are whole (`_commit`). When a member is lost
before that, the others form the groups of the next membership epoch, tell each other how far they are, and share out
the lost member's replicas of the open global batch; the partial sums they have stay. Members join and leave between two
global batches.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from phalanx.cluster.view import View
from phalanx.comm import process_group
from phalanx.comm.context import Context
from phalanx.comm.groups import name_axes
from phalanx.comm.membership import MembershipClient, wait_for
from phalanx.comm.replicas import Replicas, assign_replicas
from phalanx.errors import PeerLostError
from phalanx.parallel.data.replica_round import gradient_group
from phalanx.parallel.elastic.peer_state import receive_state, send_state
from phalanx.parallel.session import session
from phalanx.plan.value import Axis

logger = logging.getLogger("phalanx.parallel")

ResultT = TypeVar("ResultT")

LOSS_S = 5.0
"""How long after an error of another backend the launcher may take to say that a member is lost."""


class ReplicaSums(Protocol):
    """What accumulates the gradients of one model over a global batch."""

    def roll_back(self, finished: Sequence[int]) -> None:
        """Be as after the backward pass of a replica that is not the last: its gradients are in the partial sums."""

    def finish(self) -> None:
        """Forget the partial sums: the parameters change now."""


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """How far one member is when a membership epoch begins."""

    committed: int
    """Global batches whose gradients are complete on all members."""

    is_open: bool
    """Whether it has gradients of the next one."""

    is_whole: bool
    """Whether it has the sums over all replicas of that."""

    assignment: dict[str, tuple[int, ...]]
    """The replicas of that which each member computes or has computed, as this one knows; empty for one that joins."""

    is_joining: bool = False

    calls: int = 0
    """Repeatable calls that are complete on all members."""

    is_call_complete: bool = False
    """Whether it has the result of the next one."""

    @classmethod
    def from_json(cls, text: str) -> MemberProgress:
        """Read what `to_json` wrote."""
        value = json.loads(text)
        return cls(**{**value, "assignment": {id: tuple(local) for id, local in value["assignment"].items()}})

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def share_out(locals_: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of each rank once those that nobody has are shared out, to ranks that have fewest.

    Every rank makes another pass of its loop, for what the loop does to complete gradients: one that gets no further
    replica computes its last again.

    Args:
        locals_: What each rank has.
        count: All replicas.
    """
    result = [list(local) for local in locals_]
    for replica in sorted(set(range(count)).difference(*locals_)):
        min(result, key=len).append(replica)
    return tuple(
        (*after, *before[-1:]) if len(after) == len(before) else tuple(after)
        for before, after in zip(locals_, result, strict=True)
    )


def use_mesh_of(context: Context) -> None:
    """Let the Plans of distributed models, which split batches over all ranks, be of as many ranks as there are now."""
    for record in session.models.values():
        if record.applied is not None:
            mesh = (Axis(name=record.applied.plan.step.batch_axes[0], size=context.world_size),)
            record.applied = replace(record.applied, plan=record.applied.plan.model_copy(update={"mesh": mesh}))
            name_axes({axis.name: (None, axis.size) for axis in mesh})


@dataclass
class ElasticRecovery:
    """The part of this rank in an elastic job."""

    context: Context
    membership: MembershipClient
    replicas: Replicas
    failure: PeerLostError | None = None
    """What a reduction of the global batch at hand failed with."""

    committed: int = 0
    """Global batches whose gradients were complete on all members."""

    is_stop_requested: bool = False
    """Whether this rank was asked to end the job, or a part of it failed here."""

    is_stopping: bool = False
    """Whether any rank was, by the update at hand: the same on all ranks."""

    calls: int = 0
    """Repeatable calls that were complete on all members."""

    has_joined: bool = False
    """Whether this rank took the state of a peer."""

    _models: list[weakref.ref[ReplicaSums]] = field(default_factory=list)
    _agreed: int = -1
    """The newest planned view that all members have."""

    _is_moved: bool = False
    """Whether the assignment of replicas is to be made anew at the next global batch."""

    _took_over: int = -1
    """The global batch in which replicas were taken over last."""

    _commit_at: float | None = None

    def __post_init__(self) -> None:
        self.replicas.on_round_start = self.start_round

    def add(self, model: ReplicaSums) -> None:
        """Let a model's gradients be part of every global batch."""
        self._models.append(weakref.ref(model))

    def lose(self, error: BaseException) -> bool:
        """Note that a reduction failed; return whether this job goes on without the rank that was lost."""
        if not isinstance(error, PeerLostError):
            if not self._is_of_loss():
                return False
            error = PeerLostError(str(error))
        self.failure = self.failure or error
        return True

    def _is_of_loss(self) -> bool:
        """Return whether the launcher says, now or soon, that a member is lost; gloo has no error of its own for it."""
        view = self.membership.view
        assert view is not None
        newest = self.membership.await_newer(view.epoch, LOSS_S)
        return newest is not None and not set(view.ids) <= set(newest.ids)

    # -- a global batch ----------------------------------------------------------------------------------------

    def complete(self) -> bool:
        """Return whether the parameters may change: all replicas are in the gradients, on all members.

        Called after this rank's last replica. Collective. False if this rank has got further replicas to compute first.
        """
        if self.failure is None:
            try:
                self._commit()
            except RuntimeError as error:
                if not self.lose(error):
                    raise
        if self.failure is not None and not self._recover(is_open=True)[0]:
            return False
        self.committed += 1
        for model in self._live():
            model.finish()
        return True

    def _commit(self) -> None:
        """Tell the other members that the sums are whole here, and learn which planned view all have. Collective."""
        self.membership.receive()
        newest, view = self.membership.newest, self.membership.view
        assert newest is not None
        assert view is not None
        # A view that came after a loss may have some that were to join before, and did not yet.
        is_to_take = newest.ids != view.ids and (newest.planned or set(view.ids) <= set(newest.ids))
        epoch = newest.epoch if is_to_take else -1
        agreed = torch.tensor([epoch, -int(self.is_stop_requested)], dtype=torch.int64)
        if len(view.members) > 1:
            wait_for(dist.all_reduce(agreed, dist.ReduceOp.MIN, async_op=True))
        self._agreed, self.is_stopping = int(agreed[0]), bool(agreed[1])
        now = time.monotonic()
        if self._commit_at is not None:
            self.membership.count_step(now - self._commit_at)
        self._commit_at = now

    def repeat(self, call: Callable[[], ResultT]) -> ResultT:
        """Return what a collective call returns, made again by the ranks that are left where one was lost in it.

        For calls that change nothing, such as an evaluation, between two global batches. Collective.
        """
        if self.membership.is_joining:
            return call()
        while True:
            is_complete, self._commit_at = False, None
            try:
                result = call()
                is_complete = True
                self._commit()
            except RuntimeError as error:
                if not self.lose(error):
                    raise
                _, members = self._recover(is_call_complete=is_complete)
                is_passed = any(progress.calls > self.calls for progress in members)
                if not is_passed and not all(progress.is_call_complete for progress in members):
                    continue
            self.calls += 1
            return result

    def _live(self) -> list[ReplicaSums]:
        return [model for reference in self._models if (model := reference()) is not None]

    # -- membership epochs -------------------------------------------------------------------------------------

    def start_round(self) -> None:
        """Take up a planned view that all members have, before the first batch of a global batch is loaded."""
        if self.membership.is_joining:
            self.join()
        if self._agreed >= 0:
            view, self._agreed = self.membership.view_of(self._agreed), -1
            self._leave_unless_in(view)
            self._recover(view=view)
        elif self._is_moved and self.committed > self._took_over:
            self._reassign()

    def join(self) -> None:
        """Become a member of the job that runs, with the state of a peer. For a process that was started beside it."""
        self.membership.send("ready")
        while self.membership.is_joining:
            view = self.membership.newest
            if view is None or self.membership.id not in view.ids:
                self.membership.receive(0.5)
                continue
            try:
                self._recover(view=view, is_joining=True)
            except PeerLostError as error:
                if self.membership.newest is view:
                    raise
                logger.info("joining again: %s", error)
                continue
            self.membership.is_joining = False
            self.has_joined = True

    def _recover(
        self,
        *,
        is_open: bool = False,
        view: View | None = None,
        is_joining: bool = False,
        is_call_complete: bool = False,
    ) -> tuple[bool, list[MemberProgress]]:
        """Form the groups of the next membership epoch and agree on what is left to do. Collective over its members.

        Returns:
            Whether the sums of the global batch at hand are whole on all members, and the members' progress.
        """
        started, failure = time.monotonic(), self.failure
        before = None if is_joining else self.membership.view
        assignment = {} if before is None else dict(zip(before.ids, map(tuple, self.replicas.by_rank), strict=True))
        mine = MemberProgress(
            self.committed, is_open, is_open and failure is None, assignment, is_joining, self.calls, is_call_complete
        )
        while True:
            view = view or self._next_view(failure)
            try:
                self.context.take_view(view)
                use_mesh_of(self.context)
                if len(view.members) > 1:
                    gradient_group(self.context)
                everyone = self._exchange(mine, len(view.members))
                self._take_in(view, everyone, is_joining=is_joining)
                break
            except RuntimeError as error:
                if is_joining or not self.lose(error):
                    raise
                failure, view = self.failure, None
        self.failure = None
        is_whole = self._continue(mine, everyone, view)
        lost = () if before is None else tuple(id for id in before.ids if id not in view.ids)
        self._report(view, lost, time.monotonic() - started, everyone)
        return is_whole, [progress for progress in everyone if not progress.is_joining]

    def _next_view(self, failure: PeerLostError | None) -> View:
        """Return the view of those that are left, without such as join: they do so between two global batches.

        Raises:
            SystemExit: If this rank leaves the job.
            PeerLostError: If the launcher sends no view.
        """
        assert self.membership.view is not None
        view = self.membership.await_newer(self.membership.view.epoch)
        if view is None:
            raise failure or PeerLostError("the launcher sent no view of the members that are left")
        self._leave_unless_in(view)
        return view.only(self.membership.view.ids)

    def _leave_unless_in(self, view: View) -> None:
        if self.membership.id not in view.ids:
            logger.info("this rank leaves the job: %s", view.reason)
            raise SystemExit(0)

    def _exchange(self, mine: MemberProgress, size: int) -> list[MemberProgress]:
        """Return the progress of every member, in the order of their ranks. Collective."""
        if size == 1:
            return [mine]
        store = process_group.meeting().store
        store.set(f"progress/{self.context.rank}", mine.to_json())
        keys = [f"progress/{rank}" for rank in range(size)]
        if not store.wait(keys, process_group.REFORM_TIMEOUT_S):
            raise PeerLostError("a member of the new membership epoch did not say how far it is")
        return [MemberProgress.from_json(store.get(key)) for key in keys]

    def _take_in(self, view: View, everyone: list[MemberProgress], *, is_joining: bool) -> None:
        """Give those that join the state of the first of the others."""
        joiners = [rank for rank, progress in enumerate(everyone) if progress.is_joining]
        first = next((rank for rank, progress in enumerate(everyone) if not progress.is_joining), None)
        if first is None:
            raise PeerLostError("nobody is left who has the state of the job")
        if is_joining:
            receive_state(first)
            self.committed, self.calls = everyone[first].committed, everyone[first].calls
        elif self.context.rank == first:
            for rank in joiners:
                send_state(rank)

    def _continue(self, mine: MemberProgress, everyone: list[MemberProgress], view: View) -> bool:
        """Decide what becomes of the open global batch, alike on all members; see `_recover` for what is returned."""
        members = [progress for progress in everyone if not progress.is_joining]
        ahead = max(progress.committed for progress in members)
        is_whole = all(progress.is_whole and progress.committed == ahead for progress in members)
        open_ = next((progress for progress in members if progress.is_open and progress.committed == ahead), None)
        if open_ is None:
            self._reassign()
        else:
            locals_ = [open_.assignment.get(member.id, ()) for member in view.members]
            shares = tuple(locals_) if is_whole else share_out(locals_, self.replicas.count)
            self.replicas.take_over(shares, self.context.rank)
            self._took_over, self._is_moved = ahead, True
        if is_whole or mine.committed < ahead:  # others have heard that all sums were whole, this rank's too
            return True
        if mine.is_open:
            for model in self._live():
                model.roll_back(open_.assignment[self.membership.id] if open_ is not None else ())
        return False

    def _reassign(self) -> None:
        self._is_moved = False
        self.replicas.reassign(assign_replicas(self.replicas.count, self.context.world_size), self.context.rank)

    def _report(self, view: View, lost: Sequence[str], seconds: float, everyone: list[MemberProgress]) -> None:
        new = [view.members[rank].id for rank, progress in enumerate(everyone) if progress.is_joining]
        self._commit_at = None
        self.membership.send(
            "joined", epoch=view.epoch, step=self.committed, seconds=round(seconds, 4), lost=list(lost), new=new
        )
        if self.context.rank == 0:
            log = logger.warning if lost else logger.info
            log(
                "membership epoch %d: %d ranks, after %s; this rank waited %.2f s, replicas of each rank: %s",
                view.epoch,
                len(view.members),
                view.reason or "a change",
                seconds,
                ", ".join(str(len(local)) for local in self.replicas.by_rank),
            )

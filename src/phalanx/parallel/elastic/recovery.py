"""`ElasticRecovery`: complete every global batch of an elastic job while ranks leave and join.

Parameters change only after all members have said that their reductions are whole (`_commit`). When a member is lost
before that, the others form the groups of the next membership epoch, tell each other how far they are, and share out
the lost member's replicas of the open global batch; the partial sums they have stay. Members join and leave between two
global batches.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from phalanx.cluster.view import View
from phalanx.comm import process_group
from phalanx.comm.batch.replicas import Replicas, assign_replicas
from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient, wait_for
from phalanx.comm.groups import name_axes
from phalanx.comm.timeouts import collective_timeout
from phalanx.errors import PeerLostError
from phalanx.parallel.data.replica_round import gradient_group
from phalanx.parallel.elastic.peer_state import receive_state, send_state
from phalanx.parallel.elastic.progress import Agreement, MemberProgress
from phalanx.parallel.session import session
from phalanx.plan.value import Axis

logger = logging.getLogger("phalanx.parallel")

ResultT = TypeVar("ResultT")

MOST_ATTEMPTS = 5
"""How often members of one view meet again after their groups were not formed."""

LOSS_S = 5.0
"""How long after an error of another backend the launcher may take to say that a member is lost."""


class ReplicaSums(Protocol):
    """What accumulates the gradients of one model over a global batch."""

    def roll_back(self, finished: Sequence[int]) -> None:
        """Be as after the backward pass of a replica that is not the last: its gradients are in the partial sums."""

    def finish(self) -> None:
        """Forget the partial sums: the parameters change now."""


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

    _shares: tuple[tuple[int, ...], ...] | None = None
    """The replicas of each rank in the global batch that comes next, where others have begun it."""

    _is_whole: bool = False
    """Whether this rank has the sums over all replicas of the open global batch."""

    _waiting: tuple[View, int] | None = None
    """The view in use with those that join, who wait until the others begin a global batch, and their attempt."""

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
        return newest is not None and (not newest.planned or not set(view.ids) <= set(newest.ids))

    # -- a global batch ----------------------------------------------------------------------------------------

    def complete(self) -> bool:
        """Return whether the parameters may change: all replicas are in the gradients, on all members.

        Called after this rank's last replica. Collective. False if this rank has got further replicas to compute first.
        """
        self._is_whole = self.failure is None
        if self.failure is None:
            try:
                self._commit()
            except RuntimeError as error:
                if not self.lose(error):
                    raise
        if self.failure is not None and not self._recover(is_open=True)[0]:
            return False
        self._is_whole = False
        self.committed += 1
        for model in self._live():
            model.finish()
        return True

    def _commit(self) -> None:
        """Tell the other members that the sums are whole here, and learn which planned view all have. Collective.

        Raises:
            PeerLostError: If the membership has changed, or changes meanwhile.
        """
        self.membership.check()
        newest, view = self.membership.newest, self.membership.view
        assert newest is not None
        assert view is not None
        epoch = newest.epoch if newest.epoch > view.epoch else -1
        agreed = torch.tensor([epoch, -int(self.is_stop_requested)], dtype=torch.int64)
        if len(view.members) > 1:
            wait_for(dist.all_reduce(agreed, dist.ReduceOp.MIN, async_op=True))
        self._agreed, self.is_stopping = int(agreed[0]), bool(agreed[1])
        now = time.monotonic()
        if self._commit_at is not None:
            self.membership.count_step(now - self._commit_at)
        elif not self.committed:
            self.membership.send("joined", epoch=view.epoch, step=0, seconds=0.0, lost=[], new=[])
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
        """Take up what members have agreed on, before the first batch of a global batch is loaded."""
        if self.membership.is_joining:
            self.join()
        if self._agreed >= 0:
            view, self._agreed = self.membership.view_of(self._agreed), -1
            self._leave_unless_in(view)
            self._recover(view=view, is_between=True)
        elif self._shares is not None:
            self.replicas.take_over(self._shares, self.context.rank)
            self._shares = None
        elif self.committed > self._took_over and self._waiting is not None:
            view, attempt = self._waiting
            self._recover(view=view, attempt=attempt, is_between=True)
        elif self.committed > self._took_over and self._is_moved:
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
            except RuntimeError as error:
                if self.membership.await_newer(view.epoch) is None:
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
        attempt: int = 0,
        is_between: bool = False,
        is_joining: bool = False,
        is_call_complete: bool = False,
    ) -> tuple[bool, list[MemberProgress]]:
        """Form the groups of the next membership epoch and agree on what is left to do. Collective over its members.

        Args:
            is_open: Whether this rank has gradients of a global batch that is not committed.
            view: The members; the newest that comes where one was lost.
            attempt: How often members of this view have met before.
            is_between: Whether this rank is about to begin a global batch.
            is_joining: Whether this rank joins.
            is_call_complete: Whether this rank has the result of the repeatable call that is under way.

        Returns:
            Whether the sums of the global batch at hand are whole on all members, and the members' progress.
        """
        started, failure = time.monotonic(), self.failure
        before = None if is_joining else self.membership.view
        mine = MemberProgress(
            self.committed,
            computed=tuple(self.replicas.local) if is_open else (),
            is_whole=is_open and self._is_whole,
            is_between=is_between,
            is_joining=is_joining,
            calls=self.calls,
            is_call_complete=is_call_complete,
        )
        while True:
            if view is None:
                view, attempt = self._next_view(failure), 0
            self.membership.use(view)
            try:
                everyone = self._exchange(mine, view, attempt)
                agreement = Agreement.of(everyone, self.replicas.count)
                if is_joining and view.ids.index(self.membership.id) not in agreement.members:
                    attempt += 1
                    continue
                self._form(view, everyone, agreement, attempt, is_joining=is_joining)
                has_all = len(agreement.members) == len(view.members)
                self._waiting = None if has_all else (view, attempt + 1)
                break
            except RuntimeError as error:
                is_lost = is_joining or self.lose(error)
                newer = self.membership.await_newer(view.epoch, LOSS_S)
                if not is_lost or (newer is not None and is_joining) or attempt > MOST_ATTEMPTS:
                    raise
                if newer is None:  # one did not come, and is asked about when the others meet again
                    logger.warning("meeting again: %s", error)
                    attempt += 1
                else:
                    failure, view = self.failure, None
        self.failure = None
        is_whole = self._continue(mine, agreement)
        again = 0 if is_whole or not is_open else len(self.replicas.local) - len(mine.computed)
        lost = () if before is None else tuple(id for id in before.ids if id not in view.ids)
        new = [view.members[index].id for index in agreement.members if everyone[index].is_joining]
        self._report(lost, new, time.monotonic() - started, again)
        return is_whole, [progress for progress in everyone if not progress.is_joining]

    def _next_view(self, failure: PeerLostError | None) -> View:
        """Return the view of those that are left.

        Raises:
            SystemExit: If this rank leaves the job.
            PeerLostError: If the launcher sends no view.
        """
        assert self.membership.view is not None
        view = self.membership.await_newer(self.membership.view.epoch)
        if view is None:
            raise failure or PeerLostError("the launcher sent no view of the members that are left")
        self._leave_unless_in(view)
        return view

    def _leave_unless_in(self, view: View) -> None:
        if self.membership.id not in view.ids:
            logger.info("this rank leaves the job: %s", view.reason)
            raise SystemExit(0)

    def _exchange(self, mine: MemberProgress, view: View, attempt: int) -> list[MemberProgress]:
        """Return the progress of every member of a view, by rank. Collective.

        A member may be in the middle of its computation; the launcher says whether it is alive.
        """
        if len(view.members) == 1:
            return [mine]
        store = process_group.store_of(view, f"progress/{attempt}")
        store.set(self.membership.id, mine.to_json())
        process_group.await_members(store, view.ids, view, collective_timeout().total_seconds())
        return [MemberProgress.from_json(store.get(id)) for id in view.ids]

    def _form(
        self, view: View, everyone: list[MemberProgress], agreement: Agreement, attempt: int, *, is_joining: bool
    ) -> None:
        """Form the groups of those that go on now, and give those of them that join the state of another."""
        self.context.take_view(view.part(agreement.members), attempt)
        use_mesh_of(self.context)
        if len(agreement.members) > 1:
            gradient_group(self.context)
        joiners = [rank for rank, index in enumerate(agreement.members) if everyone[index].is_joining]
        source = agreement.members.index(agreement.source)
        if is_joining:
            receive_state(source)
            self.committed, self.calls = agreement.committed, everyone[agreement.source].calls
        elif self.context.rank == source:
            for rank in joiners:
                send_state(rank)

    def _continue(self, mine: MemberProgress, agreement: Agreement) -> bool:
        """Take up this rank's part of what is agreed; see `_recover` for what is returned."""
        is_behind = not mine.is_joining and mine.committed < agreement.committed
        self._shares = None
        if agreement.is_whole or is_behind:  # the replicas change after this update, of which others have heard
            self._shares, self._is_moved = agreement.shares, True
        elif agreement.shares is None:
            self._reassign()
        else:
            self.replicas.take_over(agreement.shares, self.context.rank)
            self._is_moved = True
        if agreement.shares is not None:
            self._took_over = agreement.committed
        if agreement.is_whole or is_behind:
            return True
        if mine.computed:
            for model in self._live():
                model.roll_back(mine.computed)
        return False

    def _reassign(self) -> None:
        self._is_moved = False
        self.replicas.reassign(assign_replicas(self.replicas.count, self.context.world_size), self.context.rank)

    def _report(self, lost: Sequence[str], new: Sequence[str], seconds: float, again: int) -> None:
        """Tell the launcher, and whoever reads the log; `again` replicas are computed here that had been computed."""
        self._commit_at, view = None, self.membership.view
        assert view is not None
        rows = 0 if self.context.rows_for is None else self.context.rows_for(self.replicas.count) // self.replicas.count
        self.membership.send(
            "joined",
            epoch=view.epoch,
            step=self.committed,
            seconds=round(seconds, 4),
            redone=again * rows,
            lost=list(lost),
            new=list(new),
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

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
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from phalanx.cluster.view import View
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient, wait_for
from phalanx.errors import ConfigError, PeerLostError, ShardLostError
from phalanx.parallel.data.replicas.round_place import check_places, same_place
from phalanx.parallel.elastic.assignment import ReplicaAssignment
from phalanx.parallel.elastic.meeting import (
    await_next_view,
    exchange_progress,
    form_groups,
    leave_unless_in,
    report_epoch,
    rows_of_replica,
)
from phalanx.parallel.elastic.optimizer_shards import OptimizerShards
from phalanx.parallel.elastic.progress import Agreement, MemberProgress
from phalanx.parallel.elastic.shard_recovery import ShardRecovery

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

    is_sharded: bool = False
    """Whether ranks shard the state of optimizers, which may not be distributed yet."""

    shards: OptimizerShards = field(init=False)
    """Keeps the shards of optimizers' state complete, where ranks shard it."""

    _models: list[weakref.ref[ReplicaSums]] = field(default_factory=list)
    _agreed: int = -1
    """The newest planned view that all members have."""

    _is_whole: bool = False
    """Whether this rank has the sums over all replicas of the open global batch."""

    _waiting: tuple[View, int] | None = None
    """The view in use with those that join, who wait until the others begin a global batch, and their attempt."""

    _commit_at: float | None = None

    _assignment: ReplicaAssignment = field(init=False)

    def __post_init__(self) -> None:
        self._assignment = ReplicaAssignment(self.context, self.replicas)
        self.shards = OptimizerShards(self.context, self.membership)
        self.replicas.on_round_start = self.start_round

    def add(self, model: ReplicaSums) -> None:
        """Let a model's gradients be part of every global batch."""
        self._models.append(weakref.ref(model))

    def lose(self, error: BaseException) -> bool:
        """Note that a reduction failed; return whether this job continues without the rank that was lost."""
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
                self._commit(self._epoch_and_position())
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

    def _epoch_and_position(self) -> tuple[int, int]:
        """Return the epoch of the global batch at hand, and the position after it."""
        turn = self.replicas.turn
        return (-1, -1) if turn is None else turn.place

    def _commit(self, epoch_and_position: tuple[int, int] = (-2, -2)) -> None:
        """Tell the other members that the sums are whole here, and learn which planned view all have. Collective.

        Args:
            epoch_and_position: Of the global batch that the sums are of; of a call that changes nothing a constant.

        Raises:
            ConfigError: On all members, if they have sums of different global batches; nothing was updated with them.
            PeerLostError: If the membership has changed, or changes meanwhile.
        """
        self.membership.check()
        newest, view = self.membership.newest, self.membership.view
        assert newest is not None
        assert view is not None
        epoch = newest.epoch if newest.epoch > view.epoch else -1
        agreed = torch.tensor(
            [epoch, -int(self.is_stop_requested), *same_place(*epoch_and_position)], dtype=torch.int64
        )
        if len(view.members) > 1:
            wait_for(dist.all_reduce(agreed, dist.ReduceOp.MIN, async_op=True))
        check_places(agreed[2:].tolist(), self.replicas)
        self._agreed, self.is_stopping = int(agreed[0]), bool(agreed[1])
        now = time.monotonic()
        if self._commit_at is not None:
            self.membership.count_step(now - self._commit_at)
        elif not self.committed:
            self.membership.send("joined", epoch=view.epoch, step=0, seconds=0.0, lost=[], new=[])
        self._commit_at = now

    def share_update(self, shards: ShardRecovery) -> None:
        """Give all members the parameters that each has updated, where ranks shard optimizer state. Collective.

        Args:
            shards: Those of the optimizer.
        """
        try:
            shards.share_update()
        except RuntimeError as error:
            if not self.lose(error):
                raise
            self._recover(is_after_update=True)

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
                _, members = self._recover(is_after_update=True, is_call_complete=is_complete)
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
            self._hand_over(view)
            leave_unless_in(view, self.membership)
            self._recover(view=view, is_between=True)
        elif self._assignment.take_shares() or self.committed <= self._assignment.took_over:
            return
        elif self._waiting is not None:
            view, attempt = self._waiting
            self._recover(view=view, attempt=attempt, is_between=True)
        else:
            self._assignment.renew()

    def join(self) -> None:
        """Become a member of the job that runs, with the state of a peer. For a process that was started beside it."""
        if self.is_sharded and self.shards.is_empty:
            raise ConfigError(
                "a rank joins a job whose ranks shard optimizer state, and its optimizer is not distributed yet. Give "
                "it to px.distribute before px.load, Checkpointer.resume() and the first batch."
            )
        self.membership.send("ready")
        while self.membership.is_joining:
            view = self.membership.newest
            if view is None or self.membership.id not in view.ids:
                self.membership.receive(0.5)
                continue
            try:
                self._recover(view=view, is_joining=True)
            except ShardLostError:
                raise
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
        is_after_update: bool = False,
        view: View | None = None,
        attempt: int = 0,
        is_between: bool = False,
        is_joining: bool = False,
        is_call_complete: bool = False,
    ) -> tuple[bool, list[MemberProgress]]:
        """Form the groups of the next membership epoch and agree on what is left to do. Collective over its members.

        Args:
            is_open: Whether this rank has gradients of a global batch that is not committed.
            is_after_update: Whether this rank has made the update of the last one, and does not begin the next yet.
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
        own = MemberProgress(
            self.committed,
            computed=tuple(self.replicas.local) if is_open else (),
            is_whole=is_open and self._is_whole,
            is_between=is_between,
            is_joining=is_joining,
            calls=self.calls,
            is_call_complete=is_call_complete,
            usual_s=self.membership.timed_step_s,
        )
        while True:
            if view is None:
                view, attempt = await_next_view(self.membership, failure), 0
            self.membership.use(view)
            mine = self.shards.add_to(own)
            try:
                everyone = exchange_progress(mine, self.membership, view, attempt)
                # A rank that has just joined need not wait longer for a frozen one than those that have timed steps.
                self.membership.expect_step(max(progress.usual_s for progress in everyone))
                agreement = Agreement.of(everyone, self.replicas.count)
                if mine.is_joining and view.ids.index(self.membership.id) not in agreement.members:
                    attempt += 1
                    continue
                form_groups(self.context, view, everyone, agreement, attempt)
                if mine.is_joining:
                    self.committed, self.calls = agreement.committed, everyone[agreement.source].calls
                self.shards.take(everyone, mine, agreement)
                has_all = len(agreement.members) == len(view.members)
                self._waiting = None if has_all else (view, attempt + 1)
                break
            except ShardLostError:
                raise
            except RuntimeError as error:
                if own.is_joining and not self.membership.is_joining:  # it has shards that others may not have any more
                    own = MemberProgress(self.committed, is_between=True, calls=self.calls)
                if self._is_view_over(error, view, attempt, is_joining=own.is_joining):
                    failure, view = self.failure, None
                else:  # one did not come, and is asked about when the others meet again
                    logger.warning("meeting again: %s", error)
                    attempt += 1
        self.failure, self._agreed = None, -1
        is_whole = self._continue(mine, agreement, is_after_update=is_after_update)
        again = 0 if is_whole or not is_open else len(self.replicas.local) - len(mine.computed)
        lost = () if before is None else tuple(id for id in before.ids if id not in view.ids)
        new = [view.members[index].id for index in agreement.members if everyone[index].is_joining]
        # A global batch follows, or what is left of one: the first of a rank that joins already tells it what is usual.
        self._commit_at = time.monotonic() if self.committed else None
        redone = again * rows_of_replica(self.context, self.replicas)
        report_epoch(
            self.context, self.membership, self.replicas, step=self.committed, waited_s=time.monotonic() - started,
            lost=lost, new=new, redone=redone,
        )  # fmt: skip
        return is_whole, [progress for progress in everyone if not progress.is_joining]

    def _is_view_over(self, error: RuntimeError, view: View, attempt: int, *, is_joining: bool) -> bool:
        """Return whether a newer view is there after an error, which is raised if meeting again is of no use."""
        is_lost = is_joining or self.lose(error)
        newer = self.membership.await_newer(view.epoch, LOSS_S)
        if not is_lost or (newer is not None and is_joining) or attempt > MOST_ATTEMPTS:
            raise error
        return newer is not None

    def _hand_over(self, view: View) -> None:
        """Give the shards of ranks that leave to those that stay, while all are there."""
        now = self.membership.view
        assert now is not None
        stay = [rank for rank, id in enumerate(now.ids) if id in view.ids]
        if len(stay) == len(now.ids):
            return
        try:
            self.shards.hand_over(stay)
        except RuntimeError as error:
            if not self.lose(error):
                raise
            logger.warning("a rank was lost while others left, whose shards may be lost with them: %s", error)

    def _continue(self, mine: MemberProgress, agreement: Agreement, *, is_after_update: bool) -> bool:
        """Take up this rank's part of what is agreed; see `_recover` for what is returned."""
        is_complete = agreement.is_whole or agreement.leaves_behind(mine)
        self._assignment.take(agreement, is_later=is_complete or is_after_update)
        if mine.computed and not is_complete:
            for model in self._live():
                model.roll_back(mine.computed)
        return is_complete

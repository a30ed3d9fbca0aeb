"""`OptimizerShards`: the shards of all optimizers of a job, which move together while ranks leave and join.

Optimizers are updated one after the other, in the same order on all ranks, and no rank continues after an update before
all have its parameters. So members differ in the updates of one optimizer at most: shards of the others move at once,
and those of that one when every member has made the update that some have made.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient
from phalanx.errors import ConfigError
from phalanx.parallel.elastic.progress import Agreement, MemberProgress
from phalanx.parallel.elastic.shard_recovery import ShardChange, ShardRecovery, is_behind
from phalanx.parallel.elastic.sharded_state import ShardedState


@dataclass(frozen=True, slots=True)
class _Move:
    """What moves of one optimizer's shards."""

    shards: ShardRecovery
    change: ShardChange
    updates: int
    """How often the furthest member has updated them."""

    is_early: bool
    """Whether some member has one update less."""


class OptimizerShards:
    """See the module.

    Args:
        context: Tells which of how many ranks this one is.
        membership: Leads to the launcher.
    """

    def __init__(self, context: Context, membership: MembershipClient) -> None:
        self._context, self._membership = context, membership
        self._optimizers: list[ShardRecovery] = []
        self._count = 0

    @property
    def is_empty(self) -> bool:
        """Whether no optimizer shards its state."""
        return not self._optimizers

    def add(self, state: ShardedState) -> None:
        """Keep the shards of another optimizer complete, and those of optimizers that are gone no more.

        Every rank calls it in the same order.
        """
        if self._optimizers:
            gc.collect()  # what only a ring of references keeps is gone on the other ranks, too
        self._optimizers = [each for each in self._optimizers if each.state.is_in_use]
        self._optimizers.append(ShardRecovery(self._count, state, self._context, self._membership))
        self._count += 1

    def of(self, state: ShardedState) -> ShardRecovery:
        """Return what keeps the shards of one optimizer complete."""
        return next(each for each in self._optimizers if each.state is state)

    def add_to(self, progress: MemberProgress) -> MemberProgress:
        """Return what others are told of this rank, with its shards."""
        optimizers = (each.progress(is_joining=progress.is_joining) for each in self._optimizers)
        return replace(progress, optimizers=tuple(optimizers))

    def take(self, everyone: Sequence[MemberProgress], mine: MemberProgress, agreement: Agreement) -> None:
        """Let shards move, but for those of an update that this rank has to make first. Collective.

        Raises:
            ShardLostError: If nobody is left who has one of them; the launcher ends the job.
            PeerLostError: If a member is lost meanwhile.
            ConfigError: If this rank joins, and has not distributed all optimizers that the others have.
        """
        members = [everyone[index] for index in agreement.members]
        if mine.is_joining:
            self._check_all_added(members)
        moves = [self._plan(shards, members) for shards in self._optimizers]
        self._make([move for move in moves if not move.is_early], is_new=mine.is_joining)
        for move in moves:
            if not move.is_early:
                continue
            if is_behind(mine.of_optimizer(move.shards.number), move.updates):
                move.shards.postpone(move.change)
            else:
                move.shards.make(move.change)

    def _check_all_added(self, members: Sequence[MemberProgress]) -> None:
        others = max((each.number + 1 for progress in members for each in progress.optimizers), default=0)
        if others > self._count:
            raise ConfigError(
                f"a rank joins a job whose ranks shard the state of {others} optimizers, and {self._count} of its own "
                "are distributed yet. Give all to px.distribute before px.load, Checkpointer.resume() and the first "
                "batch."
            )

    def _plan(self, shards: ShardRecovery, members: Sequence[MemberProgress]) -> _Move:
        progress = [member.of_optimizer(shards.number) for member in members]
        updates = max(each.updates for each in progress)
        is_early = any(is_behind(each, updates) for each in progress)
        return _Move(shards, shards.plan(progress, updates), updates, is_early)

    def _make(self, moves: Sequence[_Move], *, is_new: bool) -> None:
        """Let shards move of which all members have made the same updates. Collective."""
        for move in moves:
            move.shards.send(move.change, is_new=is_new)
            move.shards.updates = move.updates
        if moves:
            self._membership.is_joining = False  # from here on it has what others may not have any more
        if any(not move.change.is_empty for move in moves):
            moves[0].shards.meet()
        for move in moves:
            move.shards.settle(move.change)

    def hand_over(self, stay: Sequence[int]) -> None:
        """Give the shards of ranks that are about to leave to those that stay. Collective over all of them.

        Args:
            stay: The ranks that stay.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        for shards in self._optimizers:
            shards.make(shards.plan_hand_over(stay))

"""`ShardRecovery`: keep the shards of an optimizer's state complete while ranks leave and join.

An update has two parts: each rank updates its own shards, for which it needs no other rank, and then all take over the
parameters of the others. So whoever is left after a loss has the shards that it keeps as they are after the newest
update, or can update them; `ShardChange` says what moves from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient, wait_for
from phalanx.errors import ShardLostError
from phalanx.parallel.elastic.messages import exchange_trees
from phalanx.parallel.elastic.progress import ShardProgress
from phalanx.parallel.elastic.sharded_state import ShardedState, StateSlice
from phalanx.parallel.elastic.state_shards import WHOLE, MovePlan, StateShard, plan_moves, shards_of

logger = logging.getLogger("phalanx.parallel")

Shards = tuple[StateShard, ...]


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What moves between the ranks of a group, alike on each of them."""

    needed: tuple[Shards, ...]
    """The shards that each rank keeps afterwards."""

    states: MovePlan
    values: MovePlan
    """Of the parameters, to ranks that have not got what others updated."""

    @classmethod
    def of(
        cls, current: Sequence[Shards], needed: Sequence[Shards], is_stale: Sequence[bool], total: int
    ) -> ShardChange:
        """Plan it.

        Args:
            current: The shards that each rank keeps now.
            needed: Those that it is to keep.
            is_stale: Whether it has only those of the parameters.
            total: All blocks.
        """
        states = plan_moves(current, needed, total)
        present = [shards if stale else (WHOLE,) for shards, stale in zip(current, is_stale, strict=True)]
        values = plan_moves(present, [(WHOLE,) if stale else () for stale in is_stale], total)
        return cls(tuple(needed), states, values)

    @property
    def is_empty(self) -> bool:
        """Whether nothing moves."""
        return not self.states.moves and not self.values.moves


class ShardRecovery:
    """The part of a rank in keeping the shards of one optimizer's state.

    Args:
        number: Which optimizer of the job it is.
        state: The shards of this rank.
        context: Tells which of how many ranks this one is.
        membership: Leads to the launcher.
    """

    def __init__(self, number: int, state: ShardedState, context: Context, membership: MembershipClient) -> None:
        self.number, self.state, self._context, self._membership = number, state, context, membership
        self.updates = 0
        """How often this rank has updated its shards; those that it joined after count."""

        self.is_stale = False
        """Whether this rank has updated its shards, and has not got the parameters of others."""

        self._postponed: ShardChange | None = None
        """What moves once this rank has made the update that others have made."""

    def progress(self, *, is_joining: bool) -> ShardProgress:
        """Return what others are told of this rank; one that joins has no shards yet."""
        shards = () if is_joining else tuple((shard.index, shard.count) for shard in self.state.shards)
        return ShardProgress(self.number, self.updates, shards, self.is_stale)

    def standard(self, ranks: int) -> list[Shards]:
        """Return the shards of each of so many ranks."""
        return [shards_of(rank, ranks, self.state.mirror) for rank in range(ranks)]

    def plan(self, members: Sequence[ShardProgress], updates: int) -> ShardChange:
        """Return what moves so that the members that continue have all shards.

        Args:
            members: What each of them has.
            updates: How many the furthest of them has made.

        Raises:
            ShardLostError: If nobody is left who has one of the shards; the launcher ends the job.
        """
        self._postponed = None
        current = [tuple(StateShard(*shard) for shard in each.shards) for each in members]
        stale = [each.is_stale or is_behind(each, updates) for each in members]
        change = ShardChange.of(current, self.standard(len(members)), stale, self.state.table.total)
        missing = sum(map(len, change.states.missing))
        if missing:
            raise self._abandon(
                f"{missing / self.state.table.total:.0%} of the optimizer's state was on ranks that are lost"
                + (" together with their mirrors" if self.state.mirror else ", and had no mirror (mirror=1)")
                + "; training continues from the newest checkpoint when the job is started again (--max-restarts)"
            )
        return change

    def _abandon(self, why: str) -> ShardLostError:
        """Tell the launcher to end the job, and return the error that says why."""
        self._membership.send("abandon", why=why)
        return ShardLostError(why)

    def make(self, change: ShardChange) -> None:
        """Let shards move. Collective over the ranks of the change.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        self.send(change)
        if not change.is_empty:
            self.meet()
        self.settle(change)

    def postpone(self, change: ShardChange) -> None:
        """Let shards move when this rank has made an update that others have made."""
        self._postponed = change

    def send(self, change: ShardChange, *, is_new: bool = False) -> None:
        """Send and receive what moves; what this rank kept stays. Collective over the ranks of the change.

        Args:
            change: What moves.
            is_new: Whether this rank keeps nothing yet.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        rank, state = self._context.rank, self.state
        received: list[StateSlice] = []
        if not change.is_empty:
            for tree in exchange_trees(
                [self._message_to(change, rank, target) for target in range(len(change.needed))]
            ):
                if tree is not None:
                    received += state.unpack_state(tree["state"])
                    for values in tree["values"]:
                        state.unpack_values(values)
        before = () if is_new else state.shards
        state.install((*change.needed[rank], *before), received, is_new=is_new)
        self.is_stale = False

    def settle(self, change: ShardChange) -> None:
        """Keep what this rank needs only: every rank has what it was sent."""
        self.state.install(change.needed[self._context.rank], ())

    def _message_to(self, change: ShardChange, source: int, target: int) -> dict[str, Any] | None:
        states, values = (
            [move.blocks for move in plan.moves if (move.source, move.target) == (source, target)]
            for plan in (change.states, change.values)
        )
        if not states and not values:
            return None
        return {
            "state": [part for blocks in states for part in self.state.pack_state(blocks)],
            "values": [self.state.pack_values(blocks) for blocks in values],
        }

    def meet(self) -> None:
        """Wait until every rank has what it was sent: one that ends its script now must not be needed any more.

        Collective.

        Raises:
            PeerLostError: If a member is lost meanwhile; what this rank kept before may be needed again.
        """
        if self._context.world_size > 1:
            wait_for(dist.all_reduce(torch.zeros(1), async_op=True))

    def share_update(self) -> None:
        """Give all ranks the parameters that each has updated, after the update. Collective.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        self.updates += 1
        self.is_stale = True
        change, self._postponed = self._postponed, None
        if change is not None:
            self.make(change)
            return
        self.state.gather(self._context.rank, self._context.world_size)
        self.is_stale = False
        self.meet()

    def plan_hand_over(self, stay: Sequence[int]) -> ShardChange:
        """Return what moves so that those that stay have the shards of ranks that are about to leave.

        Args:
            stay: The ranks that stay.
        """
        ranks = self._context.world_size
        shares = iter(self.standard(len(stay)))
        needed = [next(shares) if rank in stay else () for rank in range(ranks)]
        return ShardChange.of(self.standard(ranks), needed, [False] * ranks, self.state.table.total)

    def collect(self) -> list[StateSlice] | None:
        """Return the state that rank 0 does not keep, on rank 0. Collective."""
        ranks = self._context.world_size
        needed: list[Shards] = [(WHOLE,) if rank == 0 else () for rank in range(ranks)]
        change = ShardChange.of(self.standard(ranks), needed, [False] * ranks, self.state.table.total)
        rank, received = self._context.rank, list[StateSlice]()
        if not change.is_empty:
            for tree in exchange_trees([self._message_to(change, rank, target) for target in range(ranks)]):
                received += self.state.unpack_state(tree["state"]) if tree is not None else []
        return received if rank == 0 else None


def is_behind(progress: ShardProgress, updates: int) -> bool:
    """Return whether a member has not made the newest update, and keeps shards: it does not join."""
    return bool(progress.shards) and progress.updates < updates

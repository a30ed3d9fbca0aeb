"""`ShardRecovery`: keep the shards of an optimizer's state complete while ranks leave and join.

An update has two parts: each rank updates its own shards, for which it needs no other rank, and then all take over the
parameters of the others. So whoever is left after a loss has the shards that it keeps as they are after the newest
update, or can update them; `ShardChange` says what moves from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import MembershipClient, wait_for
from phalanx.errors import ShardLostError
from phalanx.parallel.elastic.messages import exchange_trees
from phalanx.parallel.elastic.progress import Agreement, MemberProgress
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
        state: The shards of this rank.
        context: Tells which of how many ranks this one is.
        membership: Leads to the launcher.
    """

    def __init__(self, state: ShardedState, context: Context, membership: MembershipClient) -> None:
        self.state, self._context, self._membership = state, context, membership
        self.is_stale = False
        """Whether this rank has updated its shards, and has not got the parameters of others."""

        self._postponed: ShardChange | None = None
        """What moves once this rank has made the update that others have made."""

    def add_to(self, progress: MemberProgress) -> MemberProgress:
        """Return what others are told of this rank, with its shards; one that joins has none yet."""
        shards = () if progress.is_joining else self.state.shards
        return replace(progress, shards=tuple((shard.index, shard.count) for shard in shards), is_stale=self.is_stale)

    def standard(self, ranks: int) -> list[Shards]:
        """Return the shards of each of so many ranks."""
        return [shards_of(rank, ranks, self.state.mirror) for rank in range(ranks)]

    def _plan(self, everyone: Sequence[MemberProgress], agreement: Agreement) -> ShardChange:
        """Return what moves so that the members that go on have all shards."""
        members = [everyone[index] for index in agreement.members]
        current = [tuple(StateShard(*shard) for shard in progress.shards) for progress in members]
        stale = [each.is_stale or agreement.leaves_behind(each) for each in members]
        change = ShardChange.of(current, self.standard(len(members)), stale, self.state.table.total)
        missing = sum(map(len, change.states.missing))
        if missing:
            raise self._abandon(
                f"{missing / self.state.table.total:.0%} of the optimizer's state was on ranks that are lost"
                + (" together with their mirrors" if self.state.mirror else ", and had no mirror (mirror=1)")
                + "; training goes on from the newest checkpoint when the job is started again (--max_restarts)"
            )
        return change

    def _abandon(self, why: str) -> ShardLostError:
        """Tell the launcher to end the job, and return the error that says why."""
        self._membership.send("abandon", why=why)
        return ShardLostError(why)

    def take(self, everyone: Sequence[MemberProgress], mine: MemberProgress, agreement: Agreement) -> None:
        """Let shards move, unless this rank has to make an update first that others have made. Collective.

        Raises:
            ShardLostError: If nobody is left who has one of them; the launcher ends the job.
            PeerLostError: If a member is lost meanwhile.
        """
        change = self._plan(everyone, agreement)
        if agreement.leaves_behind(mine):
            self._postponed = change
            return
        self.send(change, is_new=mine.is_joining)
        self._membership.is_joining = False  # from here on it has what others may not have any more
        self.settle(change)

    def make(self, change: ShardChange) -> None:
        """Let shards move. Collective over the ranks of the change.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        self.send(change)
        self.settle(change)

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
        """Keep what this rank needs only, once every rank has that. Collective over the ranks of the change.

        Raises:
            PeerLostError: If a member is lost meanwhile; what this rank kept before may be needed again.
        """
        if not change.is_empty:
            self._meet()
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

    def _meet(self) -> None:
        """Wait until every rank has what it was sent: one that ends its script now must not be needed any more."""
        if self._context.world_size > 1:
            wait_for(dist.all_reduce(torch.zeros(1), async_op=True))

    def share_update(self) -> None:
        """Give all ranks the parameters that each has updated, after the update. Collective.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        self.is_stale = True
        change, self._postponed = self._postponed, None
        if change is not None:
            self.make(change)
            return
        self.state.gather(self._context.rank, self._context.world_size)
        self.is_stale = False
        self._meet()

    def hand_over(self, stay: Sequence[int]) -> None:
        """Give the shards of ranks that are about to leave to those that stay. Collective over all of them.

        Args:
            stay: The ranks that stay.

        Raises:
            PeerLostError: If a member is lost meanwhile.
        """
        ranks = self._context.world_size
        shares = iter(self.standard(len(stay)))
        needed = [next(shares) if rank in stay else () for rank in range(ranks)]
        self.make(ShardChange.of(self.standard(ranks), needed, [False] * ranks, self.state.table.total))

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

"""`MemberProgress`, `ShardProgress`, `Agreement`: what members of an epoch tell each other, and what follows.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from phalanx.errors import InternalError, PeerLostError


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """What one member has of the state of one optimizer, where ranks shard it."""

    number: int
    """Which optimizer, in the order in which the script distributed them."""

    updates: int = 0
    """How often it has updated its shards."""

    shards: tuple[tuple[int, int], ...] = ()
    """The shards that it keeps: the index of each, and of how many; none where it joins."""

    is_stale: bool = False
    """Whether it has updated its shards of the parameters, and has not got those of others."""


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """How far one member is when a membership epoch begins."""

    committed: int
    """Global batches whose gradients are complete on all members."""

    computed: tuple[int, ...] = ()
    """The replicas of the next one that are in its partial sums, in the order of their turns."""

    is_whole: bool = False
    """Whether it has the sums over all replicas of that."""

    is_between: bool = False
    """Whether it is about to begin a global batch, so that others may join."""

    is_joining: bool = False
    """Whether it has no state yet, and takes that of another."""

    calls: int = 0
    """Repeatable calls that are complete on all members."""

    is_call_complete: bool = False
    """Whether it has the result of the next one."""

    usual_s: float = 0.0
    """Seconds of a usual step, as it has timed them; 0 before the first."""

    optimizers: tuple[ShardProgress, ...] = ()
    """What it has of every optimizer whose state ranks shard."""

    def of_optimizer(self, number: int) -> ShardProgress:
        """Return what it has of an optimizer."""
        return next((each for each in self.optimizers if each.number == number), ShardProgress(number))

    @classmethod
    def from_json(cls, text: str) -> MemberProgress:
        """Read what `to_json` wrote."""
        value = json.loads(text)
        optimizers = tuple(
            ShardProgress(**{**each, "shards": tuple((index, count) for index, count in each["shards"])})
            for each in value["optimizers"]
        )
        return cls(**{**value, "computed": tuple(value["computed"]), "optimizers": optimizers})

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What follows from the progress of all members of a view, alike on each of them."""

    committed: int
    """Global batches that are committed: a member that has one fewer has the sums of the last, and updates."""

    source: int
    """Index of the member that gives its state to those that join."""

    members: tuple[int, ...]
    """Indices of those that continue now. Those that join wait until all others are about to begin a global batch."""

    is_whole: bool
    """Whether all have the sums of the open global batch, so that it is committed."""

    shares: tuple[tuple[int, ...], ...] | None
    """The replicas of each member in the open global batch; None where none is open, or it is whole."""

    def leaves_behind(self, progress: MemberProgress) -> bool:
        """Return whether a member has not made an update that others have made."""
        return not progress.is_joining and progress.committed < self.committed

    @classmethod
    def of(cls, everyone: Sequence[MemberProgress], replicas: int) -> Agreement:
        """Agree.

        Args:
            everyone: Of each member of the view, by rank.
            replicas: How many there are.

        Raises:
            PeerLostError: If all that had the state of the job are lost.
        """
        trained = [index for index, progress in enumerate(everyone) if not progress.is_joining]
        if not trained:
            raise PeerLostError(
                "all ranks that had the training state were lost. Restart the job; it resumes from its newest "
                "checkpoint."
            )
        committed = max(everyone[index].committed for index in trained)
        ahead = [index for index in trained if everyone[index].committed == committed]
        if all(everyone[index].is_between for index in ahead):
            return cls(committed, ahead[0], tuple(range(len(everyone))), False, None)
        if not any(everyone[index].computed for index in ahead):
            return cls(committed, ahead[0], tuple(trained), False, None)
        if len(ahead) == len(trained) and all(everyone[index].is_whole for index in trained):
            return cls(committed, ahead[0], tuple(trained), True, None)
        computed = [everyone[index].computed if index in ahead else () for index in trained]
        return cls(committed, ahead[0], tuple(trained), False, share_out(computed, replicas))


def share_out(computed: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of each member once those that nobody has are shared out, to members that have fewest.

    Every member makes another pass of its loop, for what the loop does to complete gradients: one that gets no further
    replica computes its last again.

    Args:
        computed: What each member has, of which no two have the same.
        count: All replicas.
    """
    missing = sorted(set(range(count)).difference(*computed))
    result = [list(own) for own in computed]
    for replica in missing:
        min(result, key=lambda own: len(set(own))).append(replica)
    shares = tuple(
        (*after, *before[-1:]) if len(after) == len(before) else tuple(after)
        for before, after in zip(computed, result, strict=True)
    )
    if not all(shares):
        raise InternalError(f"{len(missing)} replicas are to be computed by {len(shares)} members: {shares}")
    return shares

"""`apportion`: split replicas or samples over ranks so that the slowest is done soonest (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """What a rank takes for its part of a global batch. A unit is a logical replica, or a sample."""

    unit_s: float
    """Seconds of one unit: input, forward and backward pass, above 0."""

    update_s: float = 0.0
    """Seconds of an update that do not depend on its part: the optimizer."""

    most: int = 1 << 60
    """Units that its memory holds."""

    def seconds(self, units: int) -> float:
        """Return the seconds of so many units."""
        return self.update_s + units * self.unit_s


def apportion(speeds: Sequence[RankSpeed], count: int, *, least: int = 1) -> list[int] | None:
    """Return the units of each rank such that the slowest rank is done soonest; None where memory is too small.

    Exact for equal units: the seconds of the slowest rank are bisected, and what is more than `count` is taken from
    those who would be done last.

    Args:
        speeds: Of each rank.
        count: Units of a global batch.
        least: Units that each rank gets at least.
    """
    if sum(max(speed.most, least) for speed in speeds) < count or least * len(speeds) > count:
        return None

    def sizes_within(seconds: float) -> list[int]:
        fitting = (
            int(min(count, max(0.0, (seconds - speed.update_s) / speed.unit_s * (1 + 1e-12)))) for speed in speeds
        )
        return [max(least, min(speed.most, size)) for speed, size in zip(speeds, fitting, strict=True)]

    low, high = 0.0, max(speed.seconds(count) for speed in speeds)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(sizes_within(middle)) >= count else (middle, high)
    sizes = sizes_within(high)
    for _ in range(sum(sizes) - count):
        last = max(
            (rank for rank, size in enumerate(sizes) if size > least),
            key=lambda rank: (speeds[rank].seconds(sizes[rank]), rank),
        )
        sizes[last] -= 1
    return sizes


def step_s(speeds: Sequence[RankSpeed], sizes: Sequence[int]) -> float:
    """Return the seconds of the rank that is done last."""
    return max(speed.seconds(size) for speed, size in zip(speeds, sizes, strict=True))


def least_step_s(speeds: Sequence[RankSpeed], count: int) -> float:
    """Return a bound below the seconds of every split: those where units can be cut and all ranks end together."""
    rate = sum(1 / speed.unit_s for speed in speeds)
    return (count + sum(speed.update_s / speed.unit_s for speed in speeds)) / rate


def gain(speeds: Sequence[RankSpeed], before: Sequence[int], after: Sequence[int]) -> float:
    """Return the part of a step that another split saves; below 0 if it is slower."""
    return 1 - step_s(speeds, after) / step_s(speeds, before)

"""`split_rows`: how many samples of a global batch each rank reads by its part, in training and in plans (pure)."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_ROWS = 2
"""Samples that every rank reads where there are enough: batch normalisation has no variance of a single one."""


def split_rows(rows: int, parts: Sequence[int]) -> list[int]:
    """Return how many of so many samples each rank reads: by its part, and `LEAST_ROWS` where there are enough.

    Args:
        rows: Samples of a global batch, full or not.
        parts: The ranks' parts, of any sum.
    """
    total, least = sum(parts), least_rows(rows, len(parts))
    sizes = [rows * part // total for part in parts]
    # What rounding left goes to those who lost most by it, the first of equal ones first.
    order = sorted(range(len(parts)), key=lambda rank: (-(rows * parts[rank] % total), rank))
    for rank in order[: rows - sum(sizes)]:
        sizes[rank] += 1
    for rank, size in enumerate(sizes):
        for _ in range(least - size):
            largest = max(range(len(sizes)), key=lambda other: (sizes[other], -other))
            sizes[largest] -= 1
            sizes[rank] += 1
    return sizes


def least_rows(rows: int, ranks: int) -> int:
    """Return the samples of a global batch that each of so many ranks reads at least."""
    return min(LEAST_ROWS, rows // ranks)

"""Replicas go where they are computed soonest."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.replicas import assign_replicas
from phalanx.parallel.replica_balance import balance, slowest


@pytest.mark.parametrize(
    ("seconds", "count", "sizes"),
    [([1, 1], 4, [2, 2]), ([1, 3], 8, [6, 2]), ([1, 100], 8, [7, 1]), ([2, 1, 1], 5, [1, 2, 2]), ([1, 1], 2, [1, 1])],
)
def test_sizes_follow_speeds(seconds: list[float], count: int, sizes: list[int]) -> None:
    assert [len(local) for local in balance(seconds, count)] == sizes


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 6))
def test_no_other_assignment_is_done_sooner(seconds: list[float], more: int) -> None:
    count = len(seconds) + more
    assignment = balance(seconds, count)
    assert [replica for local in assignment for replica in local] == list(range(count))
    least = min(
        max(size * each for size, each in zip(sizes, seconds, strict=True))
        for sizes in product(range(1, count + 1), repeat=len(seconds))
        if sum(sizes) == count
    )
    assert slowest(seconds, assignment) == pytest.approx(least)


def test_equal_ranks_hold_equally_many() -> None:
    assert balance([1.0, 1.0, 1.0], 7) == assign_replicas(7, 3)

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.sampling import shuffle
from phalanx.data.sampling.shuffle import MAX_ROWS, mixed_seed, shuffled, shuffled_numpy
from phalanx.errors import ConfigError

seeds = st.integers(-(2**63), 2**64 - 1)


@given(n=st.integers(1, 3000), seed=seeds)
def test_every_row_stands_at_exactly_one_position(n: int, seed: int) -> None:
    assert sorted(shuffled(n, seed, 0, n)) == list(range(n))


@given(n=st.integers(1, 2000), seed=seeds)
def test_the_numpy_twin_is_a_permutation_too(n: int, seed: int) -> None:
    assert sorted(shuffled_numpy(n, seed, 0, n)) == list(range(n))


@pytest.mark.skipif(not shuffle.HAS_NATIVE, reason="the native core is not installed")
@given(data=st.data(), n=st.integers(1, MAX_ROWS), seed=seeds)
def test_native_and_numpy_agree_bit_for_bit(data: st.DataObject, n: int, seed: int) -> None:
    count = data.draw(st.integers(1, min(n, 50)))
    step = data.draw(st.integers(1, max(1, (n - 1) // max(1, count - 1))))
    start = data.draw(st.integers(0, n - 1 - (count - 1) * step))
    native = shuffled(n, seed, start, count, step)
    assert native.dtype == np.int64
    assert native.tolist() == shuffled_numpy(n, seed, start, count, step).tolist()


@given(n=st.integers(2, 500), seed=seeds, parts=st.integers(1, 7))
def test_the_cut_into_calls_does_not_change_the_order(n: int, seed: int, parts: int) -> None:
    whole = shuffled(n, seed, 0, n)
    for part in range(min(parts, n)):
        strided = shuffled(n, seed, part, len(range(part, n, parts)), parts)
        assert strided.tolist() == whole[part::parts].tolist()


def test_the_order_is_the_one_earlier_releases_gave() -> None:
    assert shuffled(10, 1, 0, 10).tolist() == [2, 6, 4, 8, 5, 7, 0, 9, 3, 1]


def test_another_seed_gives_another_order() -> None:
    assert shuffled(1000, 1, 0, 1000).tolist() != shuffled(1000, 2, 0, 1000).tolist()


@pytest.mark.parametrize("n", [2, 3, 5, 7, 12])
def test_each_row_is_equally_likely_at_each_position(n: int) -> None:
    trials = 4000
    orders = np.stack([shuffled(n, mixed_seed(1, trial), 0, n) for trial in range(trials)])
    expected = trials / n
    for position in range(n):
        seen = Counter(orders[:, position].tolist())
        chi_square = sum((seen[row] - expected) ** 2 / expected for row in range(n))
        # Mean n - 1, variance 2 (n - 1): six standard deviations, for seeds that never change.
        assert chi_square < (n - 1) + 6 * math.sqrt(2 * (n - 1))


def test_neighbours_do_not_stay_neighbours() -> None:
    order = shuffled(100_003, 5, 0, 100_003)
    distances = np.abs(np.diff(order))
    assert abs(distances.mean() / 100_003 - 1 / 3) < 0.01
    assert (distances == 1).sum() < 20


def test_without_the_native_core_the_same_rows_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shuffled(777, 3, 10, 50).tolist()
    monkeypatch.setattr(shuffle, "HAS_NATIVE", False)
    assert shuffled(777, 3, 10, 50).tolist() == before


def test_the_largest_epoch_is_reached_at_its_end() -> None:
    assert 0 <= shuffled(MAX_ROWS, 9, MAX_ROWS - 1, 1)[0] < MAX_ROWS


def test_mixed_seeds_depend_on_the_order_of_the_words() -> None:
    assert len({mixed_seed(1, 2), mixed_seed(2, 1), mixed_seed(1), mixed_seed(1, 2, 0)}) == 4


@pytest.mark.parametrize("n", [0, -1, MAX_ROWS + 1])
def test_a_size_out_of_range_is_named(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"Asked to shuffle {n} samples; a shuffle holds 1 to 2\*\*62"):
        shuffled(n, 0, 0, 1)


@pytest.mark.parametrize(("start", "count", "step"), [(5, 1, 1), (3, 3, 1), (-1, 1, 1), (0, 2, 0), (0, -1, 1)])
def test_positions_outside_the_epoch_are_named(start: int, count: int, step: int) -> None:
    asked = f"Asked for {count} positions from {start} in steps of {step}, but the epoch has positions 0 to 4"
    with pytest.raises(ConfigError, match=asked):
        shuffled(5, 0, start, count, step)


@pytest.mark.skipif(not shuffle.HAS_NATIVE, reason="the native core is not installed")
def test_the_native_core_checks_for_itself() -> None:
    from phalanx import _core

    with pytest.raises(ValueError, match=r"3 positions from 3 in steps of 1 do not lie in \[0, 5\)"):
        _core.shuffled(5, 1, 3, 3)
    with pytest.raises(ValueError, match=r"1 to 2\*\*62 elements, asked for 0"):
        _core.shuffled(0, 1, 0, 1)

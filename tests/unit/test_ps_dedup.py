from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.ps.stores.dedup import merge, unique, unique_numpy

few_ids = st.lists(st.sampled_from([0, -1, 1, 7, 2**63 - 1, -(2**63), 2**32, -(2**32)]), max_size=20)
any_ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
arrays = st.lists(st.one_of(few_ids, any_ids).map(lambda ids: np.array(ids, np.int64)), max_size=5)


@given(ids=arrays)
def test_distinct_ids_come_in_the_order_of_their_first_occurrence(ids: list[np.ndarray]) -> None:
    flat = [key for part in ids for key in part.tolist()]
    keys, places, counts = unique(ids)
    assert keys.tolist() == list(dict.fromkeys(flat))
    assert keys[places].tolist() == flat
    assert counts.tolist() == [flat.count(key) for key in keys.tolist()]
    for ours, twin in zip((keys, places, counts), unique_numpy(ids), strict=True):
        assert ours.tolist() == twin.tolist()
        assert ours.dtype == twin.dtype


def test_ids_of_any_shape_and_stride_are_taken() -> None:
    square = np.arange(16, dtype=np.int64).reshape(4, 4)
    keys, places, _ = unique([square.T, square[::2, ::2]])
    assert keys.tolist() == square.T.reshape(-1).tolist()
    assert len(places) == 20


@pytest.mark.parametrize("distinct", [1, 7, 500, 10_000])
def test_ids_of_many_arrays_are_those_of_numpy(distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    pool = np.concatenate([[0, -1, -(2**63)], rng.integers(-(2**63), 2**63 - 1, distinct)])
    ids = [rng.choice(pool, size) for size in (0, 1, 63, 64, 65, 0, 129, 5000)]
    for ours, twin in zip(unique(ids), unique_numpy(ids), strict=True):
        assert np.array_equal(ours, twin)


def test_a_million_ids_are_found_again() -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 300_000)[np.arange(1_000_000) % 300_000]
    keys, places, counts = unique([ids[:400_000], ids[400_000:]])
    assert (keys[places] == ids).all()
    assert counts.sum() == 1_000_000


@given(data=st.data(), dim=st.integers(1, 5), parts=st.integers(1, 4))
def test_sums_are_those_of_one_addition_after_the_other(data: st.DataObject, dim: int, parts: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    keys = [rng.permutation(8)[: data.draw(st.integers(0, 8))] for _ in range(parts)]
    values = [rng.normal(size=(len(part), dim)).astype(np.float32) for part in keys]
    weights = data.draw(st.lists(st.floats(0, 1, width=32), min_size=parts, max_size=parts))
    expected: dict[int, np.ndarray] = {}
    for part, rows, weight in zip(keys, values, weights, strict=True):
        for key, row in zip(part.tolist(), rows, strict=True):
            expected[key] = expected.get(key, np.zeros(dim, np.float32)) + np.float32(weight) * row
    found, sums = merge(keys, values, weights)
    assert found.tolist() == list(expected)
    assert sums.shape == (len(expected), dim)
    for row, total in zip(sums, expected.values(), strict=True):
        assert row.tolist() == total.tolist()


def test_parts_that_do_not_fit_each_other_are_an_error() -> None:
    keys, rows = [np.arange(2)], [np.zeros((3, 4), np.float32)]
    with pytest.raises(ConfigError, match=r"shapes \[\(3, 4\)\] for \[2\] ids with 1 weights.*one row per id"):
        merge(keys, rows, [1.0])
    with pytest.raises(ConfigError, match="parts of one width"):
        merge([], [], [])

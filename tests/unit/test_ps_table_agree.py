"""The native table against the reference: the same calls leave the same bits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.ps.table.arrays import Columns
from phalanx.ps.table.placement import SHARDS, shard_of, table_salt
from phalanx.ps.table.reference import RENUMBER_AT, ReferenceTable
from phalanx.ps.table.rules import (
    Constant,
    CountFilter,
    Normal,
    Probability,
    ShowClick,
    TableSpec,
    Uniform,
)
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import FTRL, SGD, Adagrad, Adam, Momentum, RMSprop, RowWiseAdagrad
from phalanx.versions import HAS_NATIVE
from ps_tables import in_file, native_table

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")

rates = st.sampled_from([0.0, 0.01, 0.5])
exact_rules = st.one_of(
    st.builds(SGD, lr=rates, weight_decay=rates),
    st.builds(Momentum, lr=rates, momentum=st.just(0.9), dampening=rates, nesterov=st.booleans(), weight_decay=rates),
    st.builds(Adagrad, lr=rates, lr_decay=rates, weight_decay=rates, initial_accumulator_value=rates),
    st.builds(RMSprop, lr=rates, weight_decay=rates),
    st.builds(FTRL, lr=st.just(0.1), beta=rates, l1=rates, l2=rates),
)
near_rules = st.one_of(
    st.builds(RowWiseAdagrad, lr=rates, initial_accumulator_value=rates),
    st.builds(Adam, lr=rates, weight_decay=rates, decoupled=st.booleans()),
)
entries = st.sampled_from(
    [None, CountFilter(1), CountFilter(3, 1), Probability(0.0), Probability(0.5), ShowClick(), ShowClick(unseen_days=1)]
)


def with_days(data: st.DataObject, spec: TableSpec) -> TableSpec:
    """Return the specification, perhaps with rows that expire."""
    if isinstance(spec.entry, ShowClick):
        return spec
    return replace(spec, unseen_days=data.draw(st.sampled_from([None, 1, 2])))


# No limit, or one that a few rows pass.
limits = st.builds(dict, max_bytes=st.sampled_from([None, None, 500, 3000]), evict=st.sampled_from(["spill", "drop"]))

exact_inits = st.sampled_from([Uniform(), Uniform(0.3), Constant(), Constant(0.25)])

# Few ids, so that calls meet; the last bits of a hash are random, so any ids do.
IDS = [0, -1, 1, 2**63 - 1, -(2**63), 2**40, -(2**40), *range(1000, 1040)]


@dataclass(frozen=True)
class Call:
    kind: str
    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    lr: float | None
    counts: NDArray[np.uint32] | None
    shows: NDArray[np.float32] | None
    clicks: NDArray[np.float32] | None


@st.composite
def calls(draw: st.DrawFn, dim: int) -> Call:
    kind = draw(st.sampled_from(["push", "push", "push", "add", "assign", "shrink", "clear", "move"]))
    keys = np.array(draw(st.lists(st.sampled_from(IDS), unique=True, max_size=12)), np.int64)
    n = len(keys)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def column(make: object) -> NDArray[np.generic] | None:
        return make if draw(st.booleans()) else None  # type: ignore[return-value]

    return Call(
        kind,
        keys,
        rng.normal(size=(n, dim)).astype(np.float32) * (rng.random((n, dim)) < 0.8),
        draw(st.sampled_from([None, None, 0.25])),
        column(rng.integers(0, 4, n).astype(np.uint32)),  # type: ignore[arg-type]
        column(rng.random(n).astype(np.float32)),  # type: ignore[arg-type]
        column(rng.random(n).astype(np.float32)),  # type: ignore[arg-type]
    )


def apply(table: RowTable, call: Call) -> tuple[RowTable, object]:
    if call.kind == "push":
        return table, table.push(call.keys, call.values, call.lr, call.counts, call.shows, call.clicks)
    if call.kind == "add":
        return table, table.add(call.keys, call.values)
    if call.kind == "assign":
        return table, table.assign(call.keys, call.values)
    if call.kind == "move":
        return moved(table), None
    return table, getattr(table, call.kind)()


def moved(table: RowTable) -> RowTable:
    other = type(table)(table.spec)  # type: ignore[call-arg]
    for shard in SHARDS_USED:
        other.restore(shard, table.export(shard))
    return other


def shards_used(name: str) -> list[int]:
    return sorted(set(shard_of(np.array(IDS, np.int64), table_salt(name)).tolist()))


SHARDS_USED = shards_used("t")


def assert_same_columns(a: Columns, b: Columns, tolerance: float) -> None:
    for field in fields(Columns):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if field.name == "rows" and tolerance:
            np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(left, right, err_msg=field.name)
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None), field.name


def assert_same_tables(a: RowTable, b: RowTable, tolerance: float) -> None:
    for name in ("rows", "tick", "pushed", "dropped", "evicted"):
        assert getattr(a, name) == getattr(b, name), name
    since = a.tick // 2
    for shard in SHARDS_USED:
        assert_same_columns(a.export(shard), b.export(shard), tolerance)
        assert_same_columns(a.export(shard, since), b.export(shard, since), tolerance)
        assert a.keys(shard).tolist() == b.keys(shard).tolist()
    keys = np.array(IDS, np.int64)
    pulled = [np.full((len(keys), a.spec.dim), np.nan, np.float32) for _ in range(2)]
    for table, out in zip((a, b), pulled, strict=True):
        table.pull(keys, out)
    np.testing.assert_allclose(*pulled, rtol=tolerance, atol=tolerance)


@settings(max_examples=60)
@given(
    data=st.data(),
    entry=entries,
    limit=limits,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    table_of=st.sampled_from([native_table, ReferenceTable]),
)
def test_a_base_and_its_deltas_are_the_table(data, entry, limit, dtype, table_of) -> None:  # type: ignore[no-untyped-def]
    spec = TableSpec("t", 2, Adagrad(0.1), entry=entry, dtype=dtype, **limit)
    table = table_of(with_days(data, spec))
    for call in data.draw(st.lists(calls(2), max_size=6)):
        table, _ = apply(table, call)
    base, follower = table.tick, moved(table)
    for call in data.draw(st.lists(calls(2), max_size=6)):
        if call.kind != "move":
            table, _ = apply(table, call)
    for shard in SHARDS_USED:
        follower.restore(shard, table.export(shard, base))
        assert_same_rows(table.export(shard), follower.export(shard))


def assert_same_rows(a: Columns, b: Columns) -> None:
    for field in fields(Columns):
        if field.name != "tick":  # restoring a shard may be a change of its own
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def play(data: st.DataObject, spec: TableSpec, tolerance: float) -> None:
    spec = with_days(data, spec)
    ours: RowTable = native_table(spec)
    oracle: RowTable = ReferenceTable(spec)
    for call in data.draw(st.lists(calls(spec.dim), max_size=12)):
        ours, got = apply(ours, call)
        oracle, expected = apply(oracle, call)
        assert got == expected, call.kind
    assert_same_tables(ours, oracle, tolerance)


@settings(max_examples=60)
@given(
    data=st.data(),
    dim=st.integers(1, 9),
    rule=exact_rules,
    entry=entries,
    init=exact_inits,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    limit=limits,
    seed=st.sampled_from([0, 1, 2**63 - 1]),
)
def test_native_and_reference_agree_bit_for_bit(data, dim, rule, entry, init, dtype, limit, seed) -> None:  # type: ignore[no-untyped-def]
    play(data, TableSpec("t", dim, rule, init, entry, dtype, seed, **limit), 0)


@settings(max_examples=25)
@given(data=st.data(), dim=st.integers(1, 9), rule=st.one_of(near_rules, exact_rules), entry=entries)
def test_native_and_reference_agree_where_the_c_library_counts(data, dim, rule, entry) -> None:  # type: ignore[no-untyped-def]
    play(data, TableSpec("t", dim, rule, Normal(), entry), 1e-6)


FILLERS = np.arange(5000, 5100)
"""So many that the index alone fills the memory, and of all lanes: no row stays in memory."""


def leave_memory(table: RowTable) -> None:
    for _ in range(2):  # the first lanes of the first time do not know yet how many there will be
        table.add(FILLERS, np.zeros((len(FILLERS), table.spec.dim), np.float32))


@settings(max_examples=40)
@given(data=st.data(), dim=st.integers(1, 9), rule=exact_rules, entry=entries, init=exact_inits)
@pytest.mark.parametrize("file_dtype", ["float32", "bfloat16", "int8"])
def test_rows_that_leave_memory_are_rounded_as_numpy_rounds_them(data, dim, rule, entry, init, file_dtype) -> None:  # type: ignore[no-untyped-def]
    spec = with_days(data, TableSpec("t", dim, rule, init, entry, max_bytes=1000, file_dtype=file_dtype))
    ours: RowTable = native_table(spec)
    oracle = ReferenceTable(spec)
    for call in data.draw(st.lists(calls(dim), max_size=8)):
        ours, got = apply(ours, call)
        oracle, expected = apply(oracle, call)  # type: ignore[assignment]
        assert got == expected, call.kind
        for table in (ours, oracle):
            leave_memory(table)
        assert ours.stored == ours.rows
        oracle._rows[:, :dim] = in_file(oracle._rows[:, :dim], file_dtype)
    assert_same_tables(ours, oracle, 0)


@pytest.mark.parametrize("ahead", [3, 2**31, 2**33])
def test_ticks_are_renumbered_alike_when_32_bits_run_out(ahead: int) -> None:
    spec = TableSpec("t", 2, SGD(0.1), entry=ShowClick(drop_below=0, unseen_days=3))
    tables: list[RowTable] = [native_table(spec), ReferenceTable(spec)]
    keys = np.array(IDS, np.int64)
    shard = SHARDS_USED[0]
    for table in tables:
        table.push(keys, np.ones((len(keys), 2), np.float32))
        table.shrink()
        empty = type(table)(spec).export(shard)  # type: ignore[call-arg]
        jump = Columns(**{**{f.name: getattr(empty, f.name) for f in fields(Columns)}, "tick": RENUMBER_AT - 3 + ahead})
        table.restore(
            shard, Columns(**{**{f.name: getattr(jump, f.name) for f in fields(Columns)}, "is_complete": False})
        )
        for _ in range(6):
            table.push(keys[:20], np.ones((20, 2), np.float32))
            table.shrink()
    assert tables[0].tick > RENUMBER_AT
    assert_same_tables(tables[0], tables[1], 0)


@pytest.mark.parametrize("evict", ["spill", "drop"])
def test_many_ids_agree_through_growth_and_eviction(evict: Literal["spill", "drop"]) -> None:
    spec = TableSpec("t", 3, Adagrad(0.1), max_bytes=300_000, evict=evict)
    tables: list[RowTable] = [native_table(spec), ReferenceTable(spec)]
    rng = np.random.default_rng(0)
    for _ in range(12):
        keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 1000))
        values = rng.normal(size=(len(keys), 3)).astype(np.float32)
        for table in tables:
            table.push(keys, values)
    assert (tables[0].evicted if evict == "drop" else tables[0].stored) > 1000
    assert (tables[0].rows, tables[0].evicted) == (tables[1].rows, tables[1].evicted)
    for shard in range(0, SHARDS, 7):
        assert_same_columns(tables[0].export(shard), tables[1].export(shard), 0)

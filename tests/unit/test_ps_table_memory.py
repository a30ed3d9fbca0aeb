"""The memory of the native table: mappings, growth in small steps, and memory that goes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import SGD
from phalanx.versions import HAS_NATIVE
from ps_tables import native_table, pulled

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed")

WIDE = TableSpec("wide", 1024, SGD(0.1), Constant(1.0))
"""Rows of 4 KiB: 512 fill a block."""

NARROW = TableSpec("narrow", 1, SGD(0.1), Constant(1.0))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def touch(table: RowTable, first: int, end: int, step: int = 4096) -> None:
    """Make the rows of a range of ids."""
    for at in range(first, end, step):
        keys = np.arange(at, min(at + step, end), dtype=np.int64)
        table.add(keys, np.zeros((len(keys), table.spec.dim), np.float32))


def test_mappings_do_not_grow_with_the_rows() -> None:
    table = native_table(WIDE)
    touch(table, 0, 16_384)
    small = mappings()
    touch(table, 16_384, 131_072)  # 448 MiB more, which are 224 blocks
    assert table.bytes > 512 * 2**20
    assert mappings() - small < 40


def test_rows_that_go_give_their_memory_back() -> None:
    table = native_table(WIDE)
    touch(table, 0, 65_536)
    before = resident_bytes()
    table.clear()
    assert before - resident_bytes() > 200 * 2**20
    assert table.bytes < 2**20
    touch(table, 0, 10)
    assert (pulled(table, np.arange(10)) == 1).all()


def test_no_push_moves_more_of_an_index_than_its_new_rows_pay_for() -> None:
    table = native_table(NARROW)
    touch(table, 0, 20_000)
    most = 0
    for first in range(20_000, 200_000, 64):
        before = table.moved  # type: ignore[attr-defined]
        touch(table, first, first + 64)
        most = max(most, table.moved - before)  # type: ignore[attr-defined]
    assert table.moved > 200_000, "it grew several times"  # type: ignore[attr-defined]
    assert most < 64 * 40, "the index of a lane holds over 12,000"


def test_an_index_that_grows_reads_as_the_reference_does() -> None:
    table, oracle = native_table(NARROW), ReferenceTable(NARROW)
    rng = np.random.default_rng(0)
    for step in range(40):
        keys = np.unique(rng.integers(0, 60_000, 1500))
        values = rng.normal(size=(len(keys), 1)).astype(np.float32)
        for each in (table, oracle):
            each.assign(keys, values)
        asked = rng.integers(0, 60_000, 500)
        asked = np.unique(asked)
        assert np.array_equal(pulled(table, asked), pulled(oracle, asked))
        shard = step * 25
        for since in (0, table.tick - 1):
            ours, expected = table.export(shard, since), oracle.export(shard, since)
            assert np.array_equal(ours.keys, expected.keys)
            assert np.array_equal(ours.rows, expected.rows)


def test_a_load_makes_room_once() -> None:
    table = native_table(NARROW)
    touch(table, 0, 100_000)
    other = native_table(NARROW)
    for shard in range(SHARDS):
        other.restore(shard, table.export(shard))
    assert other.rows == 100_000
    # Shards differ a little in size: few lanes meet one that the room made for their first does not hold.
    assert other.moved < 40_000  # type: ignore[attr-defined]


def test_a_moment_in_the_middle_of_growth_reads_all_rows() -> None:
    table = native_table(NARROW)
    touch(table, 0, 20_000)
    settled = table.moved  # type: ignore[attr-defined]
    first = 20_000
    while table.moved == settled:  # type: ignore[attr-defined]
        touch(table, first, first + 16)
        first += 16

    moment = table.moment()
    touch(table, 0, first)
    assert sum(len(moment.export(shard).keys) for shard in range(SHARDS)) == first
    moment.end()
    assert table.rows == first

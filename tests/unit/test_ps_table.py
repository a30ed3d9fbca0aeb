"""What a table promises, held by both of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigError, DataError
from phalanx.ps.stores.tables import TableSet
from phalanx.ps.table.placement import SHARDS, shard_of, table_salt
from phalanx.ps.table.rules import Constant, CountFilter, Normal, Probability, ShowClick, TableSpec, Uniform
from phalanx.ps.table.table import RowTable
from phalanx.ps.table.update_rules import SGD, Adagrad, Adam
from ps_tables import TABLES, pulled

Make = Callable[[TableSpec], RowTable]
pytestmark = pytest.mark.parametrize("table_of", TABLES)

PLAIN = TableSpec("t", 4, SGD(1.0))
KEYS = np.array([0, -1, 1, 2**63 - 1, -(2**63)], np.int64)


def ones(n: int, dim: int = 4) -> np.ndarray:
    return np.ones((n, dim), np.float32)


def shard_of_key(key: int, name: str = "t") -> int:
    return int(shard_of(np.array([key], np.int64), table_salt(name))[0])


def copy(table: RowTable, table_of: Make) -> RowTable:
    other = table_of(table.spec)
    for shard in range(SHARDS):
        if table.keys(shard).size or table.export(shard).waiting_keys.size:
            other.restore(shard, table.export(shard))
    return other


def assert_same(one: RowTable, two: RowTable, shards: Iterable[int]) -> None:
    for shard in shards:
        left, right = one.export(shard), two.export(shard)
        for field in ("keys", "ticks", "rows", "waiting_keys", "waiting_ticks", "waiting_counts", "days"):
            assert np.array_equal(getattr(left, field), getattr(right, field)), field


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_pull_makes_no_row(table_of: Make) -> None:
    table = table_of(PLAIN)
    first = pulled(table, KEYS)
    assert (table.rows, table.tick) == (0, 0)
    assert np.array_equal(pulled(table, KEYS[::-1].copy())[::-1], first)


def test_the_first_push_goes_on_from_what_a_pull_had_read(table_of: Make) -> None:
    table = table_of(PLAIN)
    before = pulled(table, KEYS)
    assert table.push(KEYS, ones(5)) == 0
    assert np.array_equal(pulled(table, KEYS), before - 1)
    assert (table.rows, table.pushed, table.tick) == (5, 5, 1)


def test_initial_values_depend_on_seed_name_and_id_alone(table_of: Make) -> None:
    first = pulled(table_of(PLAIN), KEYS)
    assert np.array_equal(pulled(table_of(PLAIN), KEYS), first)
    assert not np.isin(pulled(table_of(replace(PLAIN, seed=1)), KEYS), first).any()
    assert not np.isin(pulled(table_of(replace(PLAIN, name="u")), KEYS), first).any()
    assert len(np.unique(first)) == first.size
    assert np.array_equal(pulled(table_of(replace(PLAIN, dim=3)), KEYS), first[:, :3])


def test_initial_values_have_the_distribution_asked_for(table_of: Make) -> None:
    keys = np.arange(20_000, dtype=np.int64)
    even = pulled(table_of(replace(PLAIN, init=Uniform(0.5))), keys)
    assert -0.5 <= even.min() < -0.499
    assert 0.499 < even.max() < 0.5
    assert abs(even.mean()) < 0.005
    bell = pulled(table_of(replace(PLAIN, dim=5, init=Normal(2.0))), keys)
    assert bell.mean() == pytest.approx(0, abs=0.03)
    assert bell.std() == pytest.approx(2, rel=0.01)
    assert (np.abs(bell) < 2).mean() == pytest.approx(0.6827, abs=0.01)
    assert (pulled(table_of(replace(PLAIN, init=Constant(0.3))), keys[:3]) == np.float32(0.3)).all()


def test_values_stay_the_ones_earlier_releases_gave(table_of: Make) -> None:
    row = pulled(table_of(TableSpec("user", 3, SGD(1.0), Uniform(1.0), seed=7)), np.array([42], np.int64))
    assert row[0].tolist() == [0.5175938606262207, 0.3243826627731323, 0.4431089162826538]


# --- changing -------------------------------------------------------------------------------------------------------


def test_add_and_assign_make_missing_rows_and_keep_state(table_of: Make) -> None:
    table = table_of(replace(PLAIN, rule=Adagrad(1.0), init=Constant(0.5), entry=CountFilter(9)))
    table.add(KEYS[:2], ones(2))
    table.assign(KEYS[1:3], ones(2) * 7)
    assert pulled(table, KEYS[:4])[:, 0].tolist() == [1.5, 7, 7, 0]
    table.push(KEYS[:1], ones(1) * 3)
    table.assign(KEYS[:1], ones(1))
    table.push(KEYS[:1], ones(1) * 4)  # the accumulator still holds 9
    assert pulled(table, KEYS[:1])[0, 0] == pytest.approx(1 - 4 / 5)


def test_a_learning_rate_in_a_push_replaces_the_one_of_the_table(table_of: Make) -> None:
    table = table_of(replace(PLAIN, init=Constant(0)))
    table.push(KEYS[:1], ones(1), 0.25)
    table.push(KEYS[:1], ones(1), 0.0)
    assert pulled(table, KEYS[:1])[0, 0] == -0.25


def test_an_empty_call_is_one_change(table_of: Make) -> None:
    table = table_of(PLAIN)
    assert table.push(KEYS[:0], ones(0)) == 0
    table.add(KEYS[:0], ones(0))
    assert (table.tick, table.rows, table.pushed) == (2, 0, 0)


def test_clear_drops_rows_and_counts_but_not_the_clock(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=CountFilter(2)))
    for _ in range(2):
        table.push(KEYS, ones(5))
    table.clear()
    assert (table.rows, table.tick) == (0, 3)
    assert table.push(KEYS, ones(5)) == 5


def test_many_rows_are_found_again(table_of: Make) -> None:
    table = table_of(replace(PLAIN, dim=2, init=Constant(0)))
    keys = np.random.default_rng(0).permutation(np.arange(-10_000, 10_000, dtype=np.int64) * 2**20)
    values = np.stack([keys % 1021, keys % 7], axis=1).astype(np.float32)
    for part in np.array_split(np.arange(len(keys)), 9):
        table.assign(keys[part], values[part])
    assert table.rows == len(keys)
    assert np.array_equal(pulled(table, keys), values)
    held = np.concatenate([table.keys(shard) for shard in range(SHARDS)])
    assert sorted(held) == sorted(keys)


# --- who gets a row -------------------------------------------------------------------------------------------------


def test_the_count_filter_counts_occurrences_and_drops_gradients_until_then(table_of: Make) -> None:
    table = table_of(replace(PLAIN, init=Constant(0.5), entry=CountFilter(5)))
    keys = KEYS[:3]
    assert table.push(keys, ones(3), counts=np.array([1, 4, 5], np.uint32)) == 2
    assert pulled(table, keys)[:, 0].tolist() == [0, 0, -0.5]
    assert table.push(keys, ones(3)) == 1
    assert pulled(table, keys)[:, 0].tolist() == [0, -0.5, -1.5]
    assert (table.rows, table.dropped) == (2, 3)


def test_probability_admits_its_share_and_always_the_same_ids(table_of: Make) -> None:
    keys = np.arange(4000, dtype=np.int64)
    spec = replace(PLAIN, init=Constant(0.5), entry=Probability(0.25))
    table = table_of(spec)
    read = pulled(table, keys)[:, 0]
    dropped = table.push(keys, ones(4000))
    assert dropped == (read == 0).sum() == 4000 - table.rows
    assert table.rows == pytest.approx(1000, abs=100)
    assert np.array_equal(pulled(table_of(spec), keys)[:, 0], read)
    assert table_of(replace(spec, entry=Probability(1.0))).push(keys, ones(4000)) == 0
    assert table_of(replace(spec, entry=Probability(0.0))).push(keys, ones(4000)) == 4000


def test_shows_and_clicks_are_kept_beside_the_row(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=ShowClick()))
    table.push(KEYS[:1], ones(1))
    table.push(KEYS[:1], ones(1), counts=np.array([3], np.uint32))
    table.push(KEYS[:1], ones(1), shows=np.array([10], np.float32), clicks=np.array([2], np.float32))
    assert table.export(shard_of_key(0)).rows[0, -2:].tolist() == [14, 2]


# --- expiry ---------------------------------------------------------------------------------------------------------


def test_a_day_decays_scores_and_drops_the_low_ones(table_of: Make) -> None:
    entry = ShowClick(show_weight=0.5, click_weight=2.0, decay=0.5, drop_below=1.0)
    table = table_of(replace(PLAIN, entry=entry))
    shows, clicks = np.array([1, 4, 1], np.float32), np.array([0, 0, 1], np.float32)
    table.push(KEYS[:3], ones(3), shows=shows, clicks=clicks)
    assert table.shrink() == 1  # 0.25, 1 and 1
    assert table.rows == 2
    assert table.export(shard_of_key(-1)).rows[0, -2:].tolist() == [2, 0]
    assert table.shrink() == 2


@pytest.mark.parametrize(
    "expires_after_2_days",
    [
        {"entry": ShowClick(drop_below=0, unseen_days=2)},
        {"unseen_days": 2},
        {"entry": CountFilter(1), "unseen_days": 2},
        {"entry": CountFilter(1, waiting_days=5), "unseen_days": 2},
        {"entry": Probability(1.0), "unseen_days": 2},
    ],
    ids=["show_click", "any", "count", "count_and_waiting", "probability"],
)
def test_rows_not_trained_for_the_days_given_go(table_of: Make, expires_after_2_days: dict[str, Any]) -> None:
    table = table_of(replace(PLAIN, **expires_after_2_days))
    table.push(KEYS[:2], ones(2))
    assert table.shrink() == 0
    table.push(KEYS[:1], ones(1))
    assert table.shrink() == 0  # the second id is unseen for one day
    table = copy(table, table_of)  # days go with a snapshot
    assert table.shrink() == 1
    assert table.shrink() == 1
    assert table.rows == 0


def test_counts_of_ids_that_did_not_occur_lately_are_forgotten(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=CountFilter(3, waiting_days=2)))

    def waiting() -> list[int]:
        return [key for key in KEYS[:2].tolist() if table.export(shard_of_key(key)).waiting_keys.size]

    table.push(KEYS[:2], ones(2))
    table.push(KEYS[2:3], ones(1), counts=np.array([3], np.uint32))
    assert table.shrink() == 0
    table.push(KEYS[:1], ones(1))
    assert table.shrink() == 0
    table = copy(table, table_of)
    assert waiting() == KEYS[:2].tolist()
    assert table.shrink() == 0, "counts are no rows"
    assert waiting() == KEYS[:1].tolist()
    assert table.push(KEYS[:2], ones(2)) == 1, "one count continued, the other began anew"
    for _ in range(4):
        table.shrink()
    assert waiting() == []
    assert table.rows == 2, "rows stay without unseen_days"


def test_show_and_click_expire_by_their_own_days(table_of: Make) -> None:
    with pytest.raises(ValueError, match=r"own unseen_days: give entry=ShowClick\(unseen_days=3\)"):
        table_of(TableSpec("t", 4, SGD(1.0), entry=ShowClick(), unseen_days=3))


def test_shrink_of_a_table_without_show_and_click_drops_nothing(table_of: Make) -> None:
    table = table_of(PLAIN)
    table.push(KEYS, ones(5))
    assert table.shrink() == 0
    assert (table.rows, table.tick) == (5, 2)


def test_a_budget_is_kept_by_dropping_what_was_not_trained_lately(table_of: Make) -> None:
    table = table_of(replace(PLAIN, max_bytes=48 * 20_000, evict="drop"))
    hot = np.arange(1000, dtype=np.int64)
    for step in range(60):
        cold = np.arange(1000, dtype=np.int64) + 1_000_000 + 1000 * step
        table.push(np.concatenate([hot, cold]), ones(2000))
        assert table.rows <= 20_000
    assert table.rows > 16_000
    assert table.evicted == 61_000 - table.rows
    held = np.concatenate([table.keys(shard) for shard in range(SHARDS)])
    assert np.isin(hot, held).all()
    assert np.isin(cold, held).all()


def test_waiting_ids_count_against_the_budget(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=CountFilter(2), max_bytes=3200, evict="drop"))
    table.push(np.arange(1000, dtype=np.int64), ones(1000))
    waiting = sum(len(table.export(shard).waiting_keys) for shard in range(SHARDS))
    assert 50 < waiting <= 100
    assert table.evicted == 0


# --- export and restore ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [None, CountFilter(3), ShowClick()], ids=["any", "count", "show_click"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_table_goes_on_as_the_first_would(table_of: Make, entry: object, dtype: str) -> None:
    spec = TableSpec("t", 4, Adam(0.1), entry=entry, dtype=dtype)  # type: ignore[arg-type]
    table = table_of(spec)
    for part in (KEYS, KEYS[:3], KEYS[:2]):
        table.push(part, ones(len(part)))
    other = copy(table, table_of)
    assert (other.rows, other.tick) == (table.rows, table.tick)
    for either in (table, other):
        either.push(KEYS, ones(5) * 2)
    for key in KEYS.tolist():
        first, second = table.export(shard_of_key(key)), other.export(shard_of_key(key))
        assert np.array_equal(first.rows, second.rows)
        assert np.array_equal(first.waiting_counts, second.waiting_counts)


def test_a_delta_over_its_base_is_the_table(table_of: Make) -> None:
    table = table_of(PLAIN)
    table.push(KEYS, ones(5))
    base, other = table.tick, copy(table, table_of)
    table.push(KEYS[:1], ones(1))
    changed = [shard for shard in range(SHARDS) if len(table.export(shard, base).keys)]
    assert changed == [shard_of_key(0)]
    assert not table.export(changed[0], base).is_complete
    other.restore(changed[0], table.export(changed[0], base))
    assert np.array_equal(pulled(other, KEYS), pulled(table, KEYS))
    assert other.tick == table.tick


def test_a_delta_over_a_day_names_what_went_and_how_often_the_rest_decayed(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=ShowClick(drop_below=0.5)))
    table.push(KEYS, ones(5), clicks=np.array([0, 1, 1, 1, 1], np.float32))
    base, other = table.tick, copy(table, table_of)
    assert table.shrink() == 1
    delta = table.export(shard_of_key(0), base)
    assert (delta.is_complete, delta.removed.tolist(), delta.decays) == (False, [0], 1)
    assert sum(len(table.export(shard_of_key(key), base).keys) for key in KEYS.tolist()) == 0
    for key in KEYS.tolist():
        other.restore(shard_of_key(key), table.export(shard_of_key(key), base))
    assert other.rows == 4
    assert_same(other, table, [shard_of_key(key) for key in KEYS.tolist()])


def test_an_id_that_went_and_came_again_is_in_a_delta_as_a_row(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=ShowClick(drop_below=0.5)))
    table.push(KEYS[:1], ones(1))
    base = table.tick
    assert table.shrink() == 1
    table.push(KEYS[:1], ones(1))
    delta = table.export(shard_of_key(0), base)
    assert (delta.keys.tolist(), delta.removed.tolist()) == ([0], [])


def test_a_shard_that_lost_more_than_it_remembers_is_exported_whole(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=ShowClick(drop_below=0.5)))
    keys = np.arange(400_000, dtype=np.int64)
    keys = keys[shard_of(keys, table_salt("t")) == 3]
    table.push(keys, ones(len(keys)), clicks=(np.arange(len(keys)) < 100).astype(np.float32))
    base = table.tick
    assert table.shrink() == len(keys) - 100 > 200
    assert table.export(3, base).is_complete
    after = table.tick
    table.push(keys[:1], ones(1))
    assert not table.export(3, after).is_complete, "what is known from then on is enough"


def test_days_that_are_forgotten_make_a_delta_whole(table_of: Make) -> None:
    table = table_of(replace(PLAIN, entry=ShowClick(drop_below=0, unseen_days=3)))
    table.push(KEYS, ones(5))
    base = table.tick
    for day in range(4):
        assert table.export(shard_of_key(0), base).is_complete == (day == 3)
        table.push(KEYS, ones(5))
        table.shrink()


def test_a_delta_of_a_table_at_its_budget_holds_what_came_and_what_went(table_of: Make) -> None:
    table = table_of(replace(PLAIN, max_bytes=48 * 5000, evict="drop"))
    table.push(np.arange(5000, dtype=np.int64), ones(5000))
    base, other = table.tick, copy(table, table_of)
    table.push(np.arange(5000, 5100, dtype=np.int64), ones(100))
    deltas = [table.export(shard, base) for shard in range(SHARDS)]
    assert sum(len(delta.keys) for delta in deltas) == 100
    assert sum(len(delta.removed) for delta in deltas) == table.evicted == 5100 - table.rows
    assert not any(delta.is_complete for delta in deltas)
    for shard, delta in enumerate(deltas):
        other.restore(shard, delta)
    assert_same(other, table, range(SHARDS))


def test_restoring_over_other_rows_replaces_them(table_of: Make) -> None:
    table, other = table_of(PLAIN), table_of(PLAIN)
    table.push(KEYS[:1], ones(1))
    for _ in range(3):
        other.push(KEYS, ones(5))
    shard, before = shard_of_key(0), other.tick
    other.restore(shard, table.export(shard))
    assert np.array_equal(pulled(other, KEYS[:1]), pulled(table, KEYS[:1]))
    assert other.tick == before + 1
    assert other.export(shard, before).is_complete, "rows came back whose ticks are older"


def test_an_export_is_ordered_by_hash_whatever_the_order_of_arrival(table_of: Make) -> None:
    keys = np.arange(5000, dtype=np.int64)
    first, second = table_of(PLAIN), table_of(PLAIN)
    first.push(keys, ones(5000))
    second.push(keys[::-1].copy(), ones(5000))
    for shard in range(0, SHARDS, 50):
        assert np.array_equal(first.export(shard).keys, second.export(shard).keys)
        assert np.array_equal(first.export(shard).keys, first.keys(shard))


def test_a_moment_reads_what_the_table_held_when_it_began(table_of: Make) -> None:
    table = table_of(PLAIN)
    table.push(KEYS[:3], ones(3))
    base = table.tick
    table.push(KEYS[1:4], ones(3))
    full, delta = ([table.export(shard, since) for shard in range(SHARDS)] for since in (0, base))
    moments = table.moment(), table.moment(base)
    table.push(KEYS, ones(5))
    table.assign(KEYS, ones(5))
    for moment, expected in zip(moments, (full, delta), strict=True):
        for shard in range(SHARDS):
            was = moment.export(shard)
            for field in fields(was):
                np.testing.assert_array_equal(getattr(was, field.name), getattr(expected[shard], field.name))
        moment.end()
    assert table.rows == 5


# --- errors ---------------------------------------------------------------------------------------------------------


def test_keys_that_are_no_ids_are_an_error(table_of: Make) -> None:
    tables = TableSet()
    tables.add(table_of(PLAIN))
    with pytest.raises(ConfigError, match=r"table 't' for keys of type int32.*Give int64"):
        tables.pull("t", KEYS.astype(np.int32))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="table 't' for keys with gaps in memory"):
        tables.pull("t", np.arange(10)[::2])


def test_a_shard_that_no_table_has_is_an_error(table_of: Make) -> None:
    table = table_of(PLAIN)
    with pytest.raises(ConfigError, match="shard 1024; a table has shards 0 to 1023"):
        table.export(1024)
    assert table.tick == 0


def test_a_budget_below_one_row_is_an_error(table_of: Make) -> None:
    with pytest.raises(ConfigError, match="at most 47 bytes, but one row takes 48"):
        table_of(replace(PLAIN, max_bytes=47))


def test_numbers_that_no_machine_counts_to_are_errors(table_of: Make) -> None:
    with pytest.raises(ValueError, match="less than 9223372036854775808"):
        table_of(replace(PLAIN, max_bytes=2**70))
    with pytest.raises(ValueError, match="less than 2147483648"):
        table_of(replace(PLAIN, entry=ShowClick(unseen_days=2**70)))


def test_columns_of_another_table_are_refused(table_of: Make) -> None:
    table = table_of(PLAIN)
    table.push(KEYS, ones(5))
    shard = shard_of_key(0)
    columns = table.export(shard)
    with pytest.raises(DataError, match=rf"shard {shard} of table 't'.*a row has 8 columns"):
        table_of(replace(PLAIN, rule=Adagrad(1.0))).restore(shard, columns)
    with pytest.raises(DataError, match="id 0 belongs to another shard"):
        table.restore((shard + 1) % SHARDS, columns)
    broken = replace(columns, waiting_keys=columns.keys, waiting_ticks=columns.ticks)
    with pytest.raises(DataError, match="1 waiting keys, 0 counts"):
        table.restore(shard, broken)
    with pytest.raises(DataError, match="waiting count of 4294967295"):
        table.restore(shard, replace(broken, waiting_counts=np.array([2**32 - 1], np.uint32)))

"""Tables in this process behind the calls of a store."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import Constant, CountFilter, TableSpec
from phalanx.ps.table.update_rules import SGD

SPEC = TableSpec(name="ids", dim=2, rule=SGD(lr=0.5), init=Constant(1.0))
KEYS = np.array([7, -1], np.int64)
ONES = np.ones((2, 2), np.float32)


@pytest.fixture
def store():
    store = LocalStore()
    store.declare([SPEC])
    return store


def rows(store, keys=KEYS, table="ids"):
    return store.pull([PullSpec(table, keys)]).rows()[0]


def test_a_pull_makes_no_row(store):
    np.testing.assert_array_equal(rows(store), ONES)
    assert store.report()["ids"].rows == 0


def test_gradients_deltas_and_values_do_what_their_names_say(store):
    store.push([TableUpdate("ids", KEYS, ONES)])
    np.testing.assert_array_equal(rows(store), 0.5 * ONES)
    store.push([TableUpdate("ids", KEYS, ONES, lr=0.25)])
    np.testing.assert_array_equal(rows(store), 0.25 * ONES)
    store.push([TableUpdate("ids", KEYS, ONES, kind="delta")])
    np.testing.assert_array_equal(rows(store), 1.25 * ONES)
    store.push([TableUpdate("ids", KEYS, 3 * ONES, kind="assign")])
    np.testing.assert_array_equal(rows(store), 3 * ONES)


def test_a_report_counts(store):
    store.declare([dataclasses.replace(SPEC, name="filtered", entry=CountFilter(2))])
    store.push([TableUpdate("ids", KEYS, ONES), TableUpdate("filtered", KEYS, ONES)])
    report = store.report()
    assert (report["ids"].rows, report["ids"].pushed, report["ids"].dropped) == (2, 2, 0)
    assert (report["filtered"].rows, report["filtered"].dropped) == (0, 2)


def test_a_push_of_two_changes_of_one_table_changes_nothing(store):
    store.declare([dataclasses.replace(SPEC, name="other")])
    with pytest.raises(ConfigError, match=r"A push has two changes of table 'ids'. Give it one, with each id once"):
        store.push([TableUpdate(name, KEYS, ONES) for name in ("other", "ids", "ids")])
    assert {report.pushed for report in store.report().values()} == {0}


def test_the_same_declaration_twice_keeps_the_rows_and_another_is_an_error(store):
    store.push([TableUpdate("ids", KEYS, ONES)])
    store.declare([SPEC])
    assert store.report()["ids"].rows == 2
    with pytest.raises(ConfigError, match=r"table 'ids' was made with dim=2 and is now asked with dim=3"):
        store.declare([dataclasses.replace(SPEC, dim=3)])


def test_a_table_that_is_not_there_is_named_with_the_nearest(store):
    with pytest.raises(ConfigError, match=r"no table 'idz'.*Did you mean 'ids'\?"):
        rows(store, table="idz")


def test_one_worker_leases_every_file_once(store):
    assert store.lease(0, ["a", "b"]) == ("a", 0, 2)
    store.report_progress(0, "a", 5)
    assert store.lease(0, ["a", "b"]) == ("b", 0, 1)
    store.report_progress(0, "b", 3, end=False)
    with pytest.raises(ConfigError, match="does not hold"):
        store.report_progress(0, "a", 6)


def test_what_was_saved_is_loaded_into_tables_that_are_there_and_that_come(store, tmp_path):
    more = dataclasses.replace(SPEC, name="more")
    store.declare([more])
    store.push([TableUpdate("ids", KEYS, ONES), TableUpdate("more", KEYS, 2 * ONES)])
    store.save(tmp_path / "one", {"epoch": 3})
    store.push([TableUpdate("ids", np.array([1, 7]), ONES)])
    assert store.load(tmp_path / "one")["epoch"] == 3
    np.testing.assert_array_equal(rows(store), 0.5 * ONES)
    assert store.report()["ids"].rows == 2

    later = LocalStore()
    later.load(tmp_path / "one", ["more"])
    later.declare([SPEC, more])
    np.testing.assert_array_equal(rows(later), ONES)
    np.testing.assert_array_equal(rows(later, table="more"), 0 * ONES)


def test_a_delta_is_made_on_the_snapshot_that_was_loaded(store, tmp_path):
    store.push([TableUpdate("ids", KEYS, ONES)])
    store.save(tmp_path / "full", {})
    again = LocalStore()
    again.load(tmp_path / "full")
    again.declare([SPEC])
    again.push([TableUpdate("ids", KEYS[:1], ONES[:1])])
    again.save(tmp_path / "delta", {}, mode="delta")
    last = LocalStore()
    last.load(tmp_path / "delta")
    last.declare([SPEC])
    np.testing.assert_array_equal(rows(last), rows(again))

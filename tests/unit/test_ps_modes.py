"""Every mode against its simulator, on tables in this process."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch

import ps_simulator as sim
from phalanx.errors import BackendError, ConfigError
from phalanx.ps.client.consistency import AsyncMode, ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.client.update_sums import sum_updates
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import CountFilter
from phalanx.ps.table.update_rules import FTRL, Adagrad

SCHEDULE = [0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]


class CountingStore(LocalStore):
    """Tables in this process that remember what was asked of them."""

    def __init__(self):
        super().__init__()
        self.pulls, self.pushes, self.left = [], [], 0

    def pull(self, wants, *, step=0):
        self.pulls.append([len(want.keys) for want in wants])
        return super().pull(wants, step=step)

    def push(self, changes, *, step=0, weight=1.0, then=()):
        self.pushes.append((step, [change.kind for change in changes]))
        return super().push(changes, step=step, weight=weight, then=then)

    def leave(self):
        self.left += 1


def made(make, workers=1):
    store = CountingStore()
    modes = [make(store) for _ in range(workers)]
    for mode in modes:
        mode.declare([sim.SPEC])
    return store, modes


def test_async_applies_each_push_as_it_comes():
    store, modes = made(ConsistencyMode, workers=2)
    sim.run(modes, SCHEDULE)
    expected = sim.simulate(sim.Async(2), SCHEDULE)
    np.testing.assert_allclose(sim.table_of(store), sim.rows_of(expected), atol=1e-6)
    assert [mode.pushes for mode in modes] == expected.pushes


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_half_async_sends_the_sum_of_its_steps(steps):
    store, modes = made(lambda store: HalfAsyncMode(store, steps=steps), workers=2)
    sim.run(modes, SCHEDULE)
    expected = sim.simulate(sim.HalfAsync(2, steps), SCHEDULE)
    np.testing.assert_allclose(sim.table_of(store), sim.rows_of(expected), atol=1e-6)
    assert [mode.pushes for mode in modes] == expected.pushes


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_geo_sends_how_far_its_copy_moved(steps):
    store, modes = made(lambda store: GeoMode(store, steps=steps, workers=2), workers=2)
    sim.run(modes, SCHEDULE)
    expected = sim.simulate(sim.Geo(2, steps), SCHEDULE)
    np.testing.assert_allclose(sim.table_of(store), sim.rows_of(expected), atol=1e-6)
    assert [mode.pushes for mode in modes] == expected.pushes


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_geo_pushes_once_per_window_and_once_for_the_rest(steps):
    store, (mode,) = made(lambda store: GeoMode(store, steps=steps, workers=1))
    sim.run([mode], [0] * 7)
    assert mode.step == 7
    assert [step for step, _ in store.pushes] == list(range(math.ceil(7 / steps)))
    assert {kind for _, kinds in store.pushes for kind in kinds} == {"delta"}


def test_geo_reads_a_row_once_per_window():
    store, (mode,) = made(lambda store: GeoMode(store, steps=2, workers=1))
    keys = np.array([3, 4], np.int64)
    for _ in range(4):
        mode.pull([PullSpec("ids", keys)])
        mode.push([TableUpdate("ids", keys, np.ones((2, sim.DIM), np.float32))])
    assert store.pulls == [[2], [2]]


IDENTITIES = [
    ConsistencyMode,
    AsyncMode,
    lambda store: HalfAsyncMode(store, steps=1),
    lambda store: GeoMode(store, steps=1, workers=1),
]


@pytest.mark.parametrize("make", IDENTITIES)
def test_alone_and_with_one_step_every_mode_is_plain_torch(make):
    store, modes = made(make)
    sim.run(modes, [0] * 12)

    weight = torch.full((len(sim.EVERY_KEY), sim.DIM), sim.START, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=sim.LR)
    place = {int(key): row for row, key in enumerate(sim.EVERY_KEY)}
    for step in range(12):
        keys = sim.keys_of(0, step)
        targets = [-float(sim.gradient(0, step, key, 0.0)) for key in keys]
        rows = weight[[place[int(key)] for key in keys]]
        (0.5 * (rows - torch.tensor(targets)[:, None]) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(sim.table_of(store), weight.detach().numpy(), atol=1e-6)


def test_the_learning_rate_of_a_push_acts_in_every_mode():
    for make in IDENTITIES:
        store, (mode,) = made(make)
        keys = np.array([1], np.int64)
        mode.push([TableUpdate("ids", keys, np.ones((1, sim.DIM), np.float32), lr=0.25)])
        mode.finish()
        (rows,) = store.pull([PullSpec("ids", keys)]).rows()
        np.testing.assert_allclose(rows, sim.START - 0.25, atol=1e-6)


@pytest.mark.parametrize("make", IDENTITIES)
def test_finish_leaves_once_and_an_empty_step_counts(make):
    store, (mode,) = made(make)
    mode.push([])
    mode.finish()
    mode.finish()
    assert (mode.step, len(store.pushes), store.left) == (1, 1, 1)


@pytest.mark.parametrize("make", IDENTITIES)
def test_first_values_are_in_place_at_once_and_are_no_step(make):
    store, (mode,) = made(make)
    keys, values = np.array([8], np.int64), np.full((1, sim.DIM), 2.0, np.float32)
    mode.assign([TableUpdate("ids", keys, values, kind="assign")])
    np.testing.assert_array_equal(store.pull([PullSpec("ids", keys)]).rows()[0], values)
    np.testing.assert_array_equal(mode.pull([PullSpec("ids", keys)]).rows()[0], values)
    assert (mode.step, mode.pushes) == (0, 1)


@pytest.mark.parametrize(
    "make", [*IDENTITIES, lambda s: HalfAsyncMode(s, steps=9), lambda s: GeoMode(s, steps=9, workers=1)]
)
def test_after_a_load_rows_are_those_of_the_snapshot_and_nothing_of_before_is_sent(make, tmp_path):
    store, (mode,) = made(make)
    sim.take_step(mode, 0)
    mode.flush()
    store.save(tmp_path, {"step": 1})
    saved = sim.table_of(store)
    sim.take_step(mode, 0)
    assert mode.load(tmp_path)["step"] == 1
    np.testing.assert_array_equal(mode.pull([PullSpec("ids", sim.EVERY_KEY)]).rows()[0], saved)
    mode.finish()
    np.testing.assert_array_equal(sim.table_of(store), saved)


def test_a_sum_of_steps_adds_counts_shows_and_clicks():
    ones = np.ones((2, 1), np.float32)
    first = TableUpdate("ids", np.array([5, 6]), ones, counts=np.array([2, 1], np.uint32))
    second = TableUpdate(
        "ids", np.array([6, 7]), 2 * ones, lr=0.5, counts=np.array([3, 4], np.uint32), clicks=np.array([1, 0], "f4")
    )
    other = TableUpdate("more", np.array([1]), ones[:1])
    total, alone = sum_updates([first, other, second])
    by_key = dict(
        zip(
            total.keys.tolist(),
            zip(
                total.values[:, 0].tolist(),
                total.counts.tolist(),
                total.shows.tolist(),
                total.clicks.tolist(),
                strict=True,
            ),
            strict=True,
        )
    )
    assert by_key == {5: (1, 2, 2, 0), 6: (3, 4, 4, 1), 7: (2, 4, 4, 0)}
    assert total.lr == 0.5
    assert alone is other


def test_geo_wants_sgd_unless_another_rule_is_asked_for(caplog, phalanx_propagates):
    spec = dataclasses.replace(sim.SPEC, rule=Adagrad(lr=0.1))
    with pytest.raises(
        ValueError, match=r"table 'ids' uses 'adagrad'.*Use SGD, or allow it: a_sync_configs = .*local_optimizer"
    ):
        GeoMode(LocalStore(), steps=2, workers=2).declare([spec])
    with caplog.at_level(logging.WARNING):
        GeoMode(LocalStore(), steps=2, workers=2, local_optimizer=True).declare([spec])
    assert "trains with 'adagrad' on each worker" in caplog.text


@pytest.mark.parametrize(
    "make",
    [lambda store: GeoMode(store, steps=2, workers=1), lambda store: HalfAsyncMode(store, steps=2)],
    ids=["geo", "half"],
)
def test_steps_that_were_refused_are_sent_with_the_next(make, monkeypatch):
    store = CountingStore()
    mode = make(store)
    mode.declare([sim.SPEC])
    sim.take_step(mode, 0)

    def refuse(*_args, **_about):
        raise BackendError("the disk of a server is full")

    with monkeypatch.context() as full:
        full.setattr(store, "push", refuse)
        with pytest.raises(BackendError, match="is full"):
            sim.take_step(mode, 0)
    sim.take_step(mode, 0)
    assert [step for step, _ in store.pushes] == [0]
    assert mode.step == 3


def test_geo_refuses_what_a_replica_cannot_do():
    for part, message in (
        ({"entry": CountFilter(2)}, "entry policy 'count'.*Use async"),
        ({"rule": FTRL(lr=0.1)}, "FTRL.*Use SGD"),
    ):
        with pytest.raises(ConfigError, match=message):
            GeoMode(LocalStore(), steps=2, workers=2, local_optimizer=True).declare(
                [dataclasses.replace(sim.SPEC, **part)]
            )


def test_geo_with_a_local_optimizer_keeps_its_state_over_windows():
    spec = dataclasses.replace(sim.SPEC, rule=Adagrad(lr=0.1))
    one, two = LocalStore(), LocalStore()
    geo, plain = GeoMode(one, steps=3, workers=1, local_optimizer=True), ConsistencyMode(two)
    for mode in (geo, plain):
        mode.declare([spec])
        sim.run([mode], [0] * 10)
    np.testing.assert_allclose(sim.table_of(one), sim.table_of(two), atol=1e-6)

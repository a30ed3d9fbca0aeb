"""Rows of later batches are asked ahead where the mode allows it, and nowhere else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import ps_simulator as sim
from phalanx.comm import context
from phalanx.comm.context import BatchShare
from phalanx.errors import ConfigError
from phalanx.ps import SGD, Constant, EmbeddingBag, SparseEmbedding
from phalanx.ps.client.consistency import AsyncMode, ConsistencyMode, HalfAsyncMode
from phalanx.ps.client.geo import GeoMode
from phalanx.ps.client.prefetch import prefetch
from phalanx.ps.client.table_client import current
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.update import TableUpdate

KEYS = np.array([4, 9], np.int64)
OTHERS = np.array([1, 4], np.int64)


class Recording(LocalStore):
    """Tables in this process that remember the order of what was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def pull(self, wants, *, step=0):
        self.asked.append(("pull", [want.keys.tolist() for want in wants]))
        return super().pull(wants, step=step)

    def push(self, changes, *, step=0, weight=1.0, then=()):
        self.asked.append(("push", step))
        return super().push(changes, step=step, weight=weight, then=then)


def made(make):
    mode = make(Recording())
    mode.declare([sim.SPEC])
    return mode


def test_a_pull_takes_what_was_asked_ahead_and_reads_no_newer_row():
    mode = made(AsyncMode)
    mode.prefetch([PullSpec("ids", KEYS)])
    mode.push([TableUpdate("ids", KEYS, np.ones((2, sim.DIM), np.float32))])
    np.testing.assert_array_equal(mode.pull([PullSpec("ids", KEYS.copy())]).rows()[0], sim.START)
    np.testing.assert_allclose(mode.pull([PullSpec("ids", KEYS)]).rows()[0], sim.START - sim.LR)
    assert mode.store.asked == [("pull", [[4, 9]]), ("push", 0), ("pull", [[4, 9]])]


def test_a_pull_asks_for_what_was_not_asked_ahead():
    mode = made(AsyncMode)
    mode.declare([dataclasses.replace(sim.SPEC, name="more")])
    mode.prefetch([PullSpec("ids", KEYS), PullSpec("not there yet", KEYS)])
    for table in ("ids", "more"):
        mode.push([TableUpdate(table, KEYS, np.ones((2, sim.DIM), np.float32))])
    first, second = mode.pull([PullSpec("more", OTHERS), PullSpec("ids", KEYS)]).rows()
    assert [keys for what, keys in mode.store.asked if what == "pull"] == [[[4, 9]], [[1, 4]]]
    np.testing.assert_allclose(first[:, 0], [sim.START, sim.START - sim.LR])
    np.testing.assert_array_equal(second, sim.START)


@pytest.mark.parametrize(
    "make", [ConsistencyMode, lambda s: HalfAsyncMode(s, steps=2), lambda s: GeoMode(s, steps=2, workers=1)]
)
def test_modes_that_promise_newer_rows_ask_nothing_ahead(make):
    mode = made(make)
    mode.prefetch([PullSpec("ids", KEYS)])
    assert mode.store.asked == []


def train(batches, opened=None):
    """Train an embedding over some batches of ids and return rows and the order of what was asked."""
    embedding = SparseEmbedding(2, optimizer=SGD(lr=0.5), init=Constant(1.0), name="ids")
    attachment = current()
    store = Recording()
    attachment._mode = (opened or ConsistencyMode)(store)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    shares = []

    def loader():
        given = context.current().batches
        iteration = given.begin(is_training=True)
        for rows, ids in enumerate(batches):
            given.give(ids, BatchShare(rows + 1, rows + 1), iteration)
            yield ids

    for ids in prefetch(loader(), lambda ids: [(embedding, ids)], depth=2):
        shares.append(context.current().batch.rows)
        embedding(ids).sum().backward()
        optimizer.step()
    (rows,) = store.pull([PullSpec("ids", np.array([1, 2, 3], np.int64))]).rows()
    return rows, store.asked[:-1], shares


BATCHES = [torch.tensor(ids) for ids in ([1, 2], [2, 2, 3], [1], [3, 1])]


def test_batches_come_in_order_with_their_shares_and_rows_are_asked_before_the_step_ahead():
    _, asked, shares = train(BATCHES, AsyncMode)
    assert shares == [1, 2, 3, 4]
    pulls = [keys for what, (keys,) in ((w, k) for w, k in asked if w == "pull")]
    # The table is made by the first lookup; what the first batches need is asked when they come.
    assert sorted(map(tuple, pulls)) == [(1,), (1, 2), (2, 3), (3, 1)]
    assert asked.index(("pull", [[3, 1]])) < asked.index(("push", 1))


def test_rows_of_bags_are_asked_ahead():
    bag = EmbeddingBag(2, optimizer=SGD(lr=0.5), name="bags")
    client, store = current(), Recording()
    client._mode = AsyncMode(store)
    bag(torch.tensor([[0]])).sum().backward()  # makes the table
    batches = [(torch.tensor([3, 3, 4]), torch.tensor([0, 1])), (torch.tensor([5]), torch.tensor([0]))]
    for ids, offsets in prefetch(batches, lambda batch: [(bag, *batch)]):
        bag(ids, offsets)
    assert store.asked[1:] == [("pull", [[3, 4]]), ("pull", [[5]])]


def test_without_async_mode_results_are_the_same_with_and_without():
    rows, asked, _ = train(BATCHES)
    assert [what for what, _ in asked] == ["pull", "push"] * 4
    # Each occurrence of an id has a gradient of one, at a learning rate of a half.
    np.testing.assert_allclose(rows[:, 0], [1 - 0.5 * 3, 1 - 0.5 * 3, 1 - 0.5 * 2])


def test_a_depth_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="found depth=0"):
        next(prefetch([1], lambda batch: [], depth=0))

"""Batches that servers lease to workers that come and go: each is trained once, whatever a lost worker had sent."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from phalanx.data.loader.leased_requests import leased_requests
from phalanx.data.sampling.order import BatchOrder, SampleOrder
from phalanx.data.sampling.ranks import DataShard
from phalanx.errors import ConfigError
from phalanx.ps.stores.batch_leases import BatchLeases, LeasedBatch


def lease(leases: BatchLeases, worker: int, pushed: int, epoch: int = 0, total: int = 4) -> Any:
    return leases.lease(worker, 0, epoch, total, 1, pushed=pushed, push=pushed)["batches"]


def test_batches_are_dealt_in_order_and_those_that_were_not_pushed_again() -> None:
    leases = BatchLeases()
    assert [lease(leases, 0, 0), lease(leases, 1, 0), lease(leases, 0, 1)] == [[[0, 0]], [[0, 1]], [[0, 2]]]
    # Worker 0 is lost with one push applied: its first batch is done, its second not.
    assert leases.release(0, pushed=1) == [LeasedBatch(0, 0, 2)]
    assert lease(leases, 1, 1) == [[0, 2]]
    assert lease(leases, 1, 2) == [[0, 3]]
    assert lease(leases, 1, 3) == []
    assert leases.release(1, pushed=4) == []


def test_several_batches_of_one_push_are_done_together() -> None:
    leases = BatchLeases()
    for _ in range(3):
        leases.lease(0, 0, 0, 4, 1, pushed=5, push=5)
    assert leases.release(0, pushed=5) == [LeasedBatch(0, 0, number) for number in range(3)]


def test_batches_that_were_read_ahead_count_from_when_they_are_begun() -> None:
    leases = BatchLeases()
    leases.lease(0, 0, 0, 4, 2, pushed=0, push=None)
    leases.begin(0, LeasedBatch(0, 0, 0), push=0)
    assert leases.release(0, pushed=1) == [LeasedBatch(0, 0, 1)]


def test_a_batch_of_an_earlier_epoch_goes_to_whoever_asks_next() -> None:
    leases = BatchLeases()
    leases.lease(0, 0, 0, 1, 1, pushed=0, push=0)
    assert lease(leases, 1, 0, epoch=0, total=1) == []
    leases.release(0, pushed=0)
    assert leases.returned == [LeasedBatch(0, 0, 0)]
    assert lease(leases, 1, 0, epoch=1, total=1) == [[0, 0]]
    assert lease(leases, 1, 1, epoch=1, total=1) == [[1, 0]]


def test_a_worker_that_comes_late_gets_nothing_of_epochs_that_are_over() -> None:
    leases = BatchLeases()
    for epoch in range(4):
        assert lease(leases, 0, epoch, epoch=epoch, total=1) == [[epoch, 0]]
    assert [lease(leases, 1, 0, epoch=epoch, total=1) for epoch in range(4)] == [[]] * 4
    assert lease(leases, 1, 0, epoch=4, total=1) == [[4, 0]]


def test_loaders_of_a_script_are_dealt_apart() -> None:
    leases = BatchLeases()
    assert lease(leases, 0, 0, total=1) == [[0, 0]]
    assert leases.lease(0, 1, 0, 2, 1, pushed=0, push=0) == {"batches": [[0, 0]], "left": 1}
    leases.release(0, pushed=0)
    assert lease(leases, 1, 0, total=1) == [[0, 0]]
    assert lease(leases, 1, 0, total=1) == []
    assert leases.returned == [LeasedBatch(1, 0, 0)]


def test_workers_must_cut_epochs_alike() -> None:
    leases = BatchLeases()
    lease(leases, 0, 0)
    leases.check(0, 0, 4, 1)
    with pytest.raises(ConfigError, match=r"cuts epoch 0 into 5 batches, and another one into 4"):
        leases.check(0, 0, 5, 1)
    for wrong in ((None, 4, 1), (0, "4", 1), (0, 4, 0), (-1, 4, 1), (0, 4, True)):
        with pytest.raises(ConfigError, match="Run the same version"):
            leases.check(0, *wrong)


def test_every_batch_is_applied_once_whoever_is_lost_when() -> None:
    for seed in range(50):
        draw, leases, applied = random.Random(seed), BatchLeases(), []
        pushed, at_hand = [0, 0, 0], [[], [], []]
        epochs = [0, 0, 0]
        while min(epochs) < 3:
            worker = draw.randrange(3)
            if draw.random() < 0.1:  # lost, with its last push applied or not
                leases.release(worker, pushed[worker])
                leases = restored(leases)
                at_hand[worker] = []
                epochs[worker] = 0
            elif at_hand[worker] and draw.random() < 0.5:
                applied += at_hand[worker]
                at_hand[worker] = []
                pushed[worker] += 1
            elif len(at_hand[worker]) < 2 and epochs[worker] < 3:
                batches = lease(leases, worker, pushed[worker], epochs[worker], total=7)
                at_hand[worker] += batches
                epochs[worker] += not batches
            elif not at_hand[worker]:
                continue
        for batches in at_hand:
            applied += batches
        applied += [[batch.epoch, batch.number] for batch in leases.returned]
        assert sorted(applied) == [[epoch, number] for epoch in range(3) for number in range(7)]


def restored(leases: BatchLeases) -> BatchLeases:
    same = BatchLeases()
    same.restore(leases.to_json())
    return same


@pytest.mark.parametrize("kind", ["rows", "sampler", "batches"])
def test_leased_batches_are_those_that_fixed_workers_read(kind: str) -> None:
    order: SampleOrder | BatchOrder
    if kind == "batches":
        order = BatchOrder(batch_sampler=[[0, 1], [2], [3, 4], [5, 6, 7]], seed=lambda: 0)
    else:
        sampler = list(range(9, -1, -1)) if kind == "sampler" else None
        order = SampleOrder(rows=10, global_batch=lambda _: 4, seed=lambda: 3, shuffle=sampler is None, sampler=sampler)
    size = (lambda count: count) if kind == "batches" else (lambda _: 4)
    requests = list(leased_requests(order, size, partial(lease, BatchLeases(), 0, 0), 1, 2))
    fixed = [list(order.requests(1, DataShard(index, 2, is_checked=False))) for index in range(2)]
    in_turn = [request for step in zip(*fixed, strict=True) for request in step]
    assert [list(r.indices) for r in requests] == [list(r.indices) for r in in_turn]
    assert [(r.share, r.position, r.seed) for r in requests] == [(r.share, r.position, r.seed) for r in in_turn]
    assert [r.lease for r in requests] == [(1, number) for number in range(len(requests))]

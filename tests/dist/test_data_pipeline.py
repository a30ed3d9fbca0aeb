"""Pipelines and generators on real ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import phalanx as px
from phalanx.data import GeneratorDataset, Pipeline, ShardedLoader
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS = 101
WORKERS: dict[str, Any] = {"num_workers": 2}
"""Ranks of tests would start their workers from a fork server that has yet to import torch."""


def three_draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return {"x": index, "y": index * index}


def drawn(x: Any) -> Any:
    return torch.tensor([float(x), *three_draws()], dtype=torch.float64)


def _pipelines() -> list[Any]:
    """One pass; and four, the same order from data with a length, with the place said by hand, and a generator."""
    rank, world_size = px.current().rank, px.current().world_size
    data = Pipeline(Squares(), num_shards=world_size, shard_id=rank)
    stream = GeneratorDataset(lambda: ((i, i * i) for i in range(ROWS)), ("x", "y"), capacity=8)
    return [
        Pipeline(Squares()).map(drawn, "x").shuffle(10).batch(4),
        *(
            pipeline.map(drawn, "x").shuffle(10).repeat(2).batch(4, drop_remainder=True).repeat(2)
            for pipeline in (Pipeline(Squares()), data, stream)
        ),
    ]


def _begun_and_saved(steps: int) -> list[Any]:
    px.init()
    found = []
    for pipeline in _pipelines():
        loader = ShardedLoader(pipeline)
        seen = [_report_bad_records(loader, batch) for batch in islice(loader, steps)]
        found.append((seen, loader.state_dict()))
    return found


def _resumed(states: list[dict[str, Any]]) -> list[Any]:
    px.init()
    found = []
    for pipeline, state in zip(_pipelines(), states, strict=True):
        loader = ShardedLoader(pipeline)
        loader.load_state_dict(state)
        found.append([_report_bad_records(loader, batch) for batch in loader])
    return found


def _report_bad_records(loader: ShardedLoader, batch: list[Any]) -> list[Any]:
    share = px.current().batch
    assert share is not None
    assert share == loader.share
    return [(*draws.tolist(), y) for draws, y in zip(batch[0][: share.rows], batch[1].tolist(), strict=False)]


def test_two_ranks_go_on_as_three_and_every_row_is_seen_once_a_pass() -> None:
    two = run_ranks(_begun_and_saved, 2, 10)
    states = [state for _, state in two[0]]
    assert states == [state for _, state in two[1]]
    assert {state["position"] for state in states} == {80}
    three = run_ranks(_resumed, 3, states)
    one_pass, *four = [_rows_of(two, three, kind) for kind in range(4)]
    assert sorted(int(row[0]) for row in one_pass) == list(range(ROWS))
    assert four[0] == four[1] == four[2]
    # Four passes, joined in pairs: each pair leaves out its last batch, both of those three ranks cut.
    left_out = (2 * ROWS - 80) % 12 + 2 * ROWS % 12
    counts = Counter(int(row[0]) for row in four[0])
    assert max(counts.values()) == 4
    assert sum(4 - counts[row] for row in range(ROWS)) == left_out
    draws = [number for row in four[0] for number in row[1:4]]
    assert len(set(draws)) == len(draws)


def _rows_of(two: list[Any], three: list[Any], kind: int) -> list[Any]:
    rows = [row for rank in two for batch in rank[kind][0] for row in batch]
    rows += [row for rank in three for batch in rank[kind] for row in batch]
    assert all(row[-1] == row[0] ** 2 for row in rows)
    return sorted(rows)


def _misfed() -> None:
    px.init()

    def reader() -> Iterator[Any]:
        yield from ({"image": i, "label": i} for i in range(5))
        yield {"image": 5}

    loader = ShardedLoader(GeneratorDataset(reader, ("image", "label")), batch_size=2)
    next(iter(loader))
    list(loader)


def _trains_on_a_shard_of_another() -> None:
    px.init()
    px.distribute(torch.nn.Linear(1, 1), data=Pipeline(Squares(), num_shards=1, shard_id=0).batch(2))


def _shuffles_by_rank() -> None:
    px.init()
    px.distribute(torch.nn.Linear(1, 1), data=Pipeline(Squares()).shuffle(10, seed=px.current().rank).batch(2))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (_misfed, "DataError", "Sample 5 of the generator reader has no 'label': asked for image, label, found image."),
        (_trains_on_a_shard_of_another, "ConfigError", "Asked to train on shard 0 of 1, but rank"),
        (_shuffles_by_rank, "ConfigError", "shuffle(10, seed=1)"),
    ],
)
def test_a_missing_feed_a_wrong_shard_and_another_order_are_errors_on_every_rank(
    function: Any, kind: str, message: str
) -> None:
    for outcome in run_ranks(function, 2, expect_failure=True):
        assert outcome.error_type == kind
        assert message in outcome.message


class Own(IterableDataset[Any]):
    """Rows of this rank and worker, and three random numbers: what each draws first."""

    def __init__(self, by_worker: bool) -> None:
        self.rank, self.by_worker = px.current().rank, by_worker

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info and self.by_worker else 0
        for row in range(3):
            yield [100 * self.rank + 10 * worker + row, *(three_draws() if self.by_worker else ())]


def _draws_of_workers() -> list[float]:
    px.init()
    loader = ShardedLoader(Own(True), batch_size=1, stream="own", **WORKERS)
    return [float(column) for _ in range(2) for batch in loader for column in batch[1:]]


def _workers_that_read_the_same() -> None:
    px.init()
    list(ShardedLoader(Own(False), batch_size=1, stream="own", **WORKERS))


def test_every_epoch_rank_and_worker_draws_numbers_of_its_own() -> None:
    ranks = run_ranks(_draws_of_workers, 2)
    draws = ranks[0] + ranks[1]
    assert len(draws) == len(set(draws)) == 2 * 2 * 2 * 3 * 3
    assert run_ranks(_draws_of_workers, 2) == ranks


def test_workers_that_read_the_same_rows_are_told() -> None:
    for outcome in run_ranks(_workers_that_read_the_same, 2, expect_failure=True):
        assert outcome.error_type == "DataError"
        assert "workers 0 and 1 of rank 0 began with the same batch" in outcome.message

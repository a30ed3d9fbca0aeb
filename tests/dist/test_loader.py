from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import phalanx
from phalanx.data import ShardedLoader
from ranks import run_ranks

pytestmark = pytest.mark.dist


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    def __getitem__(self, index: int) -> Any:
        return [np.random.rand(), torch.rand(()).item()]


class SplitByWorker(IterableDataset[int]):
    """Splits itself over the workers of its process, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, 23, step))


class OwnPart(IterableDataset[int]):
    """Yields this rank's rows only; rank 1 has fewer."""

    def __init__(self, ends: list[int]) -> None:
        self.end = ends[phalanx.current().rank]
        self.rank = phalanx.current().rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.rank, 100 * self.rank + self.end))


class RankDependent(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([phalanx.current().rank, 0, 1])

    def __len__(self) -> int:
        return 3


def _workers(count: int) -> dict[str, Any]:
    """Return the options of that many workers."""
    return {"num_workers": count}


def _report_bad_records(loader: ShardedLoader) -> list[tuple[list[int], int]]:
    seen = []
    for batch in loader:
        share = phalanx.current().batch
        assert share is not None
        seen.append((batch.tolist()[: share.rows], share.global_rows))
    return seen


def _rows_with_a_loader_made_before_init(num_workers: int, persistent: bool) -> list[Any]:
    loader = ShardedLoader(Numbers(), global_batch=8, persistent_workers=persistent, **_workers(num_workers))
    phalanx.init()
    return [_report_bad_records(loader) for _ in range(2)]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (1, True)])
def test_ranks_share_the_batches_of_one_process(num_workers: int, persistent: bool) -> None:
    alone = ShardedLoader(Numbers(), global_batch=8)
    ranks = run_ranks(_rows_with_a_loader_made_before_init, 2, num_workers, persistent)
    for epoch in range(2):
        expected = [batch.tolist() for batch in alone]
        together = [a[0] + b[0] for a, b in zip(ranks[0][epoch], ranks[1][epoch], strict=True)]
        assert together == expected


def _stream_rows(num_workers: int) -> list[Any]:
    phalanx.init()
    return _report_bad_records(ShardedLoader(SplitByWorker(), global_batch=6, **_workers(num_workers)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_read_once_by_all_ranks_and_workers_together(num_workers: int) -> None:
    ranks = run_ranks(_stream_rows, 3, num_workers)
    together = [[row for part in step for row in part[0]] for step in zip(*ranks, strict=True)]
    assert together == [list(range(start, min(start + 6, 23))) for start in range(0, 23, 6)]


def _own_rows(ends: list[int]) -> list[Any]:
    phalanx.init()
    return _report_bad_records(ShardedLoader(OwnPart(ends), batch_size=4, stream="own"))


def test_streams_of_unequal_length_end_together() -> None:
    long, short = run_ranks(_own_rows, 2, [10, 3])
    assert long == [([0, 1, 2, 3], 7), ([4, 5, 6, 7], 4), ([8, 9], 2)]
    assert short == [([100, 101, 102], 7), ([], 4), ([], 2)]


def test_a_rank_without_any_row_is_an_error_on_every_rank() -> None:
    for outcome in run_ranks(_own_rows, 2, [5, 0], expect_failure=True):
        assert outcome.error_type == "DataError"
        assert "the stream of rank 1 is empty" in outcome.message


def _differing_streams() -> None:
    rank = phalanx.init().rank
    list(ShardedLoader(lambda: range(5 - rank), batch_size=2))


def test_streams_that_differ_are_an_error_on_every_rank() -> None:
    for outcome in run_ranks(_differing_streams, 2, expect_failure=True):
        assert outcome.error_type == "DataError"
        assert "The ranks read different streams: at batch 1 they found [1, 0] samples" in outcome.message


def _drawing_streams() -> tuple[list[str], int]:
    phalanx.init()
    numbers, said = random.SystemRandom().sample(range(10**9), 8), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.data").addHandler(handler)
    list(ShardedLoader(lambda: range(8), batch_size=2))
    list(ShardedLoader(lambda: iter([object()] * 8), batch_size=2, collate_fn=len))
    before = len(said)
    list(ShardedLoader(lambda: numbers, batch_size=2))
    return said, before


def test_ranks_that_draw_rows_of_their_own_are_told_once() -> None:
    (said, before), (other, _) = run_ranks(_drawing_streams, 2)
    assert before == 0
    assert len(said) == 1
    assert "read different samples from a stream that they share" in said[0]
    assert other == []


def _duplicated_streams() -> None:
    phalanx.init()
    list(ShardedLoader(lambda: iter(range(8)), batch_size=2, stream="own"))


def test_ranks_that_read_the_same_rows_are_told() -> None:
    for outcome in run_ranks(_duplicated_streams, 2, expect_failure=True):
        assert outcome.error_type == "DataError"
        assert "ranks 0 and 1 began with the same batch" in outcome.message


def _differing_samplers() -> None:
    phalanx.init()
    list(ShardedLoader(DataLoader(Numbers(), sampler=RankDependent())))


def test_samplers_that_differ_are_an_error_on_every_rank() -> None:
    for outcome in run_ranks(_differing_samplers, 2, expect_failure=True):
        assert outcome.error_type == "ConfigError"
        assert "RankDependent lists different samples on different ranks" in outcome.message


def _orders_of_seeded_ranks() -> dict[str, Any]:
    rank = phalanx.init().rank
    torch.manual_seed(100 + rank)
    generator = torch.Generator().manual_seed(7 + rank)
    weighted = WeightedRandomSampler([1.0] * 37, 37, generator=generator)
    loaders = {
        "torch": ShardedLoader(Numbers(), global_batch=8),
        "generator": ShardedLoader(DataLoader(Numbers(), batch_size=8, shuffle=True, generator=generator)),
        "sampler": ShardedLoader(DataLoader(Numbers(), batch_size=8, sampler=weighted)),
        "distributed": phalanx.distribute(torch.nn.Linear(1, 1), data=Numbers(), global_batch=8)[2],
    }
    if rank == 0:
        next(iter(loaders["torch"]))  # rank 0 alone looks at a batch
        loaders["torch"].set_epoch(0)
    seen = {name: _report_bad_records(loader) for name, loader in loaders.items()}
    if rank == 1:
        # Of rows that are not trained on one rank may read alone; rank 0 has nothing to say.
        seen["alone"] = len(list(ShardedLoader(Numbers(), global_batch=8, training=False, shuffle=True)))
    return {**seen, "seeds": [loader.seed for loader in loaders.values()]}


def test_the_order_is_that_of_rank_0s_seed_and_data_of_one_rank_waits_for_nobody() -> None:
    ranks = run_ranks(_orders_of_seeded_ranks, 2)
    assert ranks[0]["seeds"] == ranks[1]["seeds"] == [100, 7, 7, 100]
    torch.manual_seed(100)
    alone = ShardedLoader(Numbers(), global_batch=8)
    expected = [batch.tolist() for batch in alone]
    for name in ("torch", "distributed"):
        assert [a[0] + b[0] for a, b in zip(ranks[0][name], ranks[1][name], strict=True)] == expected
    together = [row for a, b in zip(ranks[0]["generator"], ranks[1]["generator"], strict=True) for row in a[0] + b[0]]
    assert sorted(together) == list(range(37))
    assert ranks[1]["alone"] == 5


def _random_rows(num_workers: int) -> list[float]:
    phalanx.init()
    loader = ShardedLoader(Draws(), global_batch=8, **_workers(num_workers))
    return [x for _ in range(2) for batch in loader for column in batch for x in column.tolist()]


def test_no_two_batches_draw_the_same_random_numbers_whatever_loads_them() -> None:
    in_process, in_workers = run_ranks(_random_rows, 2, 0), run_ranks(_random_rows, 2, 2)
    assert in_process == in_workers
    everything = in_process[0] + in_process[1]
    # The 37 rows of the epoch leave 5 in its last batch, 3 and 2 a rank: nothing is padded.
    assert len(set(everything)) == len(everything) == 2 * 2 * 37

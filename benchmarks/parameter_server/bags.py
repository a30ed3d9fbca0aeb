"""The work of the case `torchrec`: the sizes of DLRM on Criteo's data, with bags of ids.

NumPy alone, so that it runs in the peer's environment. Rows of the tables and mean ids of a bag are those of MLPerf's
DLRM-DCNv2, tables cut at 1 M rows; the network is that of DLRM's script for the Kaggle data
(https://github.com/facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.parameter_server.work import BATCH, BATCHES, DENSE, DIM, SLOTS

MOST_ROWS = 1_000_000
ROWS = tuple(
    min(rows, MOST_ROWS)
    for rows in (
        *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
        *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
    )
)
"""Rows of each slot's table."""

MEAN_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Mean ids of a bag of each slot."""

BOTTOM = (DENSE, 512, 256, 64, DIM)
"""Widths of the network over the dense values."""

TOP = (DIM + (SLOTS + 1) * SLOTS // 2, 512, 256, 1)
"""Widths of the network over the products of all pairs of rows."""

EXPONENT = 1.05
"""Of the Zipf distribution of ids, where `BENCH_IDS` is zipf and not even."""


@dataclass(frozen=True, slots=True)
class BagBatch:
    """One batch of a worker."""

    ids: tuple[NDArray[np.int64], ...]
    """Per slot the ids of all bags, one bag after the other."""

    lengths: tuple[NDArray[np.int64], ...]
    """Per slot the ids of each bag, shape (512,)."""

    dense: NDArray[np.float32]
    """Shape (512, 13)."""

    click: NDArray[np.float32]
    """Shape (512, 1)."""


def bag_batches(worker: int) -> list[BagBatch]:
    """Return the batches that a worker trains in `BENCH_STEPS` steps.

    Lengths of bags are geometric, ids even or Zipf, as `BENCH_IDS` says.
    """
    draw, count = np.random.default_rng(worker), min(BATCHES, int(os.environ["BENCH_STEPS"]))
    lengths = [tuple(draw.geometric(1 / mean, BATCH) for mean in MEAN_IDS) for _ in range(count)]
    slots = [_ids(draw, slot, [int(batch[slot].sum()) for batch in lengths]) for slot in range(SLOTS)]
    return [
        BagBatch(
            tuple(slot[number] for slot in slots),
            lengths[number],
            draw.random((BATCH, DENSE), np.float32),
            draw.integers(0, 2, (BATCH, 1)).astype(np.float32),
        )
        for number in range(count)
    ]


def _ids(draw: np.random.Generator, slot: int, counts: list[int]) -> list[NDArray[np.int64]]:
    """Return so many ids of a slot for each batch."""
    rows = ROWS[slot]
    if os.environ["BENCH_IDS"] == "even":
        return [draw.integers(0, rows, count) for count in counts]
    shares = np.cumsum(np.arange(1, rows + 1) ** -EXPONENT)
    id_of_rank = np.random.default_rng(slot).permutation(rows)  # the same of all workers
    return [id_of_rank[np.searchsorted(shares, draw.random(count) * shares[-1])] for count in counts]

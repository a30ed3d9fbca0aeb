"""Fill a table, then let worker 0 save it some times while worker 1 trains; leaves bytes, times and the steps."""

import json
import os
import time
from pathlib import Path

import torch

from benchmarks.parameter_server.model import WideDeep, tensors, train_step
from benchmarks.parameter_server.work import BATCHES, DIM, LEARNING_RATE, meet
from phalanx import fleet, ps

FILL_IDS = 200_000
"""Ids of one step while the table is filled."""

SAVES = 3
"""One after the other, so that there are enough steps for a 99th percentile."""


def fill(embedding: ps.SparseEmbedding, optimizer: torch.optim.Optimizer, ids: range) -> None:
    """Give each id a row: one gradient of zero."""
    for start in range(ids.start, ids.stop, FILL_IDS):
        rows = embedding(torch.arange(start, min(start + FILL_IDS, ids.stop)))
        (rows.sum() * 0.0).backward()
        optimizer.step()


def main() -> None:
    """Serve, save or train."""
    torch.manual_seed(0)
    folder, rows, steps = (
        Path(os.environ["BENCH_FOLDER"]),
        int(os.environ["BENCH_ROWS"]),
        int(os.environ["BENCH_STEPS"]),
    )
    fleet.init(is_collective=False, strategy=fleet.DistributedStrategy(a_sync=True))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    model = WideDeep(ps.SparseEmbedding(DIM, optimizer=ps.Adagrad(LEARNING_RATE)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    fleet.init_worker()
    worker, half = fleet.worker_index(), rows // 2
    fill(model.embedding, optimizer, range(half) if worker == 0 else range(half, rows))
    meet("filled", worker)

    if worker == 0:
        meet("calm", worker)
        seconds, size = 0.0, 0
        for number in range(SAVES):
            snapshot = folder / f"snapshot-{number}"
            started = time.time()
            fleet.save_persistables(snapshot)
            seconds += time.time() - started
            size += sum(file.stat().st_size for file in snapshot.iterdir())
        (folder / "save-0.json").write_text(json.dumps({"seconds": seconds, "bytes": size, "saves": SAVES}))
    else:
        data = tensors(worker, rows)

        def timed(number: int) -> float:
            started = time.perf_counter()
            train_step(model, optimizer, data[number % BATCHES])
            return time.perf_counter() - started

        calm = [timed(number) for number in range(2 * steps)][steps:]
        meet("calm", worker)
        during = []
        while not (folder / "save-0.json").exists():
            during.append(timed(len(during)))
        (folder / "steps-1.json").write_text(json.dumps({"calm": calm, "during": during}))
    fleet.stop_worker()


if __name__ == "__main__":
    main()

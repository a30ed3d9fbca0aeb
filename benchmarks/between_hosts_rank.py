"""A server, or a worker in mode `sync` whose steps wait for rows: 26 slots, 512 examples, one dense layer.

`BENCH_FOLDER`, `BENCH_STEPS` and `BENCH_WIRE_DTYPE` say where results go, how many steps, and as what rows travel. A
worker leaves its steps a second, first ones left out, and a hash of what was trained.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.parameter_server.work import DENSE, DIM, LEARNING_RATE, SLOTS, batches
from phalanx import fleet, ps

KEYS = 200_000
WARM_STEPS = 5


class Wide(nn.Module):
    """Logits of clicks, shape (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = ps.SparseEmbedding(DIM, init=ps.Uniform(0.01))
        self.out = nn.Linear(SLOTS * DIM + DENSE, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return the logits of ids (n, slots) and dense values (n, 13)."""
        logits: Tensor = self.out(torch.cat([self.embedding(ids).flatten(1), dense], 1))
        return logits


def main() -> None:
    """Serve, or train."""
    torch.manual_seed(0)
    configs = {"wire_dtype": os.environ["BENCH_WIRE_DTYPE"]}
    fleet.init(is_collective=False, strategy=fleet.DistributedStrategy(a_sync=False, a_sync_configs=configs))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    model = Wide()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    model = fleet.distributed_model(model)
    fleet.init_worker()
    steps_per_s = train(model, optimizer, int(os.environ["BENCH_STEPS"]))
    fleet.barrier_worker()
    result = {"steps_per_s": steps_per_s, "weights": hash_of(model)}
    Path(os.environ["BENCH_FOLDER"], f"trained-{fleet.worker_index()}.json").write_text(json.dumps(result))
    fleet.stop_worker()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train some steps that are not timed and then `steps`; returns how many of those a second."""
    data = [tuple(map(torch.from_numpy, batch)) for batch in batches(fleet.worker_index(), KEYS)]
    started = 0.0
    for number in range(WARM_STEPS + steps):
        if number == WARM_STEPS:
            started = time.perf_counter()
        ids, dense, click = data[number % len(data)]
        nn.functional.binary_cross_entropy_with_logits(model(ids, dense), click).backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps / (time.perf_counter() - started)


def hash_of(model: nn.Module) -> str:
    """Return a hash of logits that every row of the first batches and the dense weights are in."""
    with torch.no_grad():
        rows = [model(*map(torch.from_numpy, batch[:2])) for batch in batches(0, KEYS)[:4]]
    return hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()

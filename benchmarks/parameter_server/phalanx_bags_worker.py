"""DLRM with bags on our servers, in the mode `BENCH_MODE`."""

import os

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parameter_server.bags import BagBatch, bag_batches
from benchmarks.parameter_server.dlrm import Dlrm
from benchmarks.parameter_server.model import train_step
from benchmarks.parameter_server.modes import strategy_of
from benchmarks.parameter_server.work import DIM, LEARNING_RATE, SLOTS, time_steps
from phalanx import fleet, ps

Bags = list[tuple[Tensor, Tensor]]


class Tables(nn.Module):
    """A table per slot; all bags of a batch come with one request."""

    def __init__(self) -> None:
        super().__init__()
        settings = {"mode": "sum", "include_last_offset": True, "init": ps.Uniform(0.01)}
        self.bags = nn.ModuleList(ps.EmbeddingBag(DIM, **settings) for _ in range(SLOTS))

    def forward(self, features: Bags) -> Tensor:
        """Return the pooled rows, shape (n, 26 * dim), of ids and offsets of each slot."""
        return torch.cat(ps.lookup([(bag, *of_slot) for bag, of_slot in zip(self.bags, features, strict=True)]), 1)


def tensors(batch: BagBatch) -> tuple[Bags, Tensor, Tensor]:
    """Return a batch as the model takes it."""
    offsets = [torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])) for lengths in batch.lengths]
    bags = list(zip(map(torch.from_numpy, batch.ids), offsets, strict=True))
    return bags, torch.from_numpy(batch.dense), torch.from_numpy(batch.click)


def main() -> None:
    """Serve, or train the timed steps."""
    torch.manual_seed(0)
    fleet.init(is_collective=False, strategy=strategy_of(os.environ["BENCH_MODE"]))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    model = Dlrm(Tables())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    fleet.init_worker()
    data = [tensors(batch) for batch in bag_batches(fleet.worker_index())]
    time_steps(fleet.worker_index(), lambda number: train_step(model, optimizer, data[number]))
    fleet.stop_worker()


if __name__ == "__main__":
    main()

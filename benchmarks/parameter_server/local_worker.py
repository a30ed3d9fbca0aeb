"""Wide & deep in a process of its own that speaks to nobody: the bound that no communication sets."""

import os

import torch
from torch import nn

from benchmarks.parameter_server.model import WideDeep, tensors, train_step
from benchmarks.parameter_server.work import DIM, KEYS, LEARNING_RATE, time_steps


def main() -> None:
    """Train the timed steps."""
    worker = int(os.environ["BENCH_WORKER"])
    torch.manual_seed(0)
    model = WideDeep(nn.Embedding(KEYS, DIM, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = tensors(worker)
    time_steps(worker, lambda number: train_step(model, optimizer, data[number]))


if __name__ == "__main__":
    main()

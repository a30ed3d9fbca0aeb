"""Wide & deep on our servers, with dense parameters on the servers too (async) or averaged by the workers (hybrid)."""

import os

import torch

from benchmarks.parameter_server.model import WideDeep, tensors, train_step
from benchmarks.parameter_server.modes import strategy_of
from benchmarks.parameter_server.work import DIM, LEARNING_RATE, time_steps
from phalanx import fleet, ps


def main() -> None:
    """Serve, or train the timed steps."""
    torch.manual_seed(0)
    fleet.init(is_collective=False, strategy=strategy_of(os.environ["BENCH_MODE"]))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    model = WideDeep(ps.SparseEmbedding(DIM, init=ps.Uniform(0.01)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    fleet.init_worker()
    data = tensors(fleet.worker_index())
    time_steps(fleet.worker_index(), lambda number: train_step(model, optimizer, data[number]))
    fleet.stop_worker()


if __name__ == "__main__":
    main()

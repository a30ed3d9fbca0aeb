"""DLRM with bags on two CPU ranks of TorchRec: tables sharded by its planner, the network averaged by DDP."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.parameter_server.bags import MEAN_IDS, ROWS, BagBatch, bag_batches
from benchmarks.parameter_server.dlrm import Dlrm
from benchmarks.parameter_server.model import train_step
from benchmarks.parameter_server.work import BATCH, DIM, LEARNING_RATE, SLOTS, meet, time_steps

CPU = torch.device("cpu")
NAMES = [f"slot{number}" for number in range(SLOTS)]


class Tables(nn.Module):
    """A table per slot."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"table_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
            for name, rows in zip(NAMES, ROWS, strict=True)
        ]
        self.collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the pooled rows, shape (n, 26 * dim)."""
        return self.collection(features).values()


def sharded(model: Dlrm, workers: int) -> DistributedModelParallel:
    """Let the planner shard the tables; it is told the ids of a bag, and takes the kernel that updates in backward."""
    constraints = {
        f"table_{name}": ParameterConstraints(compute_kernels=["fused"], pooling_factors=[float(mean)])
        for name, mean in zip(NAMES, MEAN_IDS, strict=True)
    }
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=workers, local_world_size=workers, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def tensors(batch: BagBatch) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    """Return a batch as the model takes it."""
    ids, lengths = (torch.from_numpy(np.concatenate(parts)) for parts in (batch.ids, batch.lengths))
    features = KeyedJaggedTensor(keys=NAMES, values=ids, lengths=lengths)
    return features, torch.from_numpy(batch.dense), torch.from_numpy(batch.click)


def main() -> None:
    """Train the timed steps."""
    worker, workers = int(os.environ["BENCH_WORKER"]), int(os.environ["BENCH_WORKERS"])
    store = Path(os.environ["BENCH_FOLDER"]) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=workers)
    torch.manual_seed(0)
    model = Dlrm(Tables())
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": LEARNING_RATE})
    model = sharded(model, workers)
    dense = [param for name, param in model.named_parameters() if ".collection." not in f".{name}"]
    optimizer = torch.optim.SGD(dense, lr=LEARNING_RATE)
    data = [tensors(batch) for batch in bag_batches(worker)]
    time_steps(worker, lambda number: train_step(model, optimizer, data[number]))
    meet("trained", worker)
    os._exit(0)  # not through the end of gloo's threads, which now and then aborts the process whose peer has gone


if __name__ == "__main__":
    main()

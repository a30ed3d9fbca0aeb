"""What `distribute` takes, in one process."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import phalanx as px


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(2)


def test_a_stream_without_a_length_is_distributed_with_model_and_optimizer() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = px.distribute(model, optimizer, Endless(), global_batch=3)
    assert loader is not None
    assert next(iter(loader)).shape == (3, 2)

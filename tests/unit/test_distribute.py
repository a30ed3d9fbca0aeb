"""What `distribute` takes, in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import phalanx as px
from phalanx.errors import ConfigError


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


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"amp": True, "amp_configs": {"dtype": "float16"}},
    ],
)
def test_an_optimizer_of_two_models_is_refused_where_it_could_not_follow_both(settings: dict[str, Any]) -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    px.distribute(encoder, optimizer, strategy=px.DistributedStrategy(**settings))
    with pytest.raises(ConfigError, match="one optimizer trains two distributed models, which gradient_merge and flo"):
        px.distribute(decoder)

"""What `distribute` takes, in one process."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx as px
from phalanx.comm.context import Readers
from phalanx.data import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.distribute import announce


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


@pytest.mark.parametrize(
    ("global_batch", "said"),
    [
        (6, "global batch 6 = 2 per rank x 3; 4 steps"),
        (7, "global batch 7 = 2 or 3 per rank, on 3; 3 steps"),
        (2, "global batch 2 = 1 each on 2 of 3 ranks, which leaves 1 without a row in every step; 10 steps"),
    ],
)
def test_what_each_rank_reads_is_said_as_it_is(
    global_batch: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(px.init(), "mesh_readers", Readers(0, 3))
    caplog.set_level(logging.INFO, "phalanx")
    announce(None, ShardedLoader((torch.ones(20, 2),), global_batch=global_batch, shard=(0, 3)))
    assert said in caplog.text


def test_batches_of_a_batch_sampler_are_not_called_rows(caplog: pytest.LogCaptureFixture) -> None:
    batches: Any = [[0, 1], [2], [3, 4, 5]]
    px.init()
    caplog.set_level(logging.INFO, "phalanx")
    announce(None, ShardedLoader(DataLoader(TensorDataset(torch.ones(6, 2)), batch_sampler=batches)))
    assert "global batch = a batch of the batch sampler per rank x 1; 3 steps" in caplog.text

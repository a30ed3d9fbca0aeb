"""What `distribute` takes, in one process."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx as px
from phalanx.comm.context import DataParallelRank
from phalanx.data import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.distribute import announce
from phalanx.parallel.session import is_any_named, session
from ranks import graphs_without_kernels


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
    monkeypatch.setattr(px.init(), "mesh_readers", DataParallelRank(0, 3))
    caplog.set_level(logging.INFO, "phalanx")
    announce(None, ShardedLoader((torch.ones(20, 2),), global_batch=global_batch, shard=(0, 3)))
    assert said in caplog.text


def test_batches_of_a_batch_sampler_are_not_called_rows(caplog: pytest.LogCaptureFixture) -> None:
    batches: Any = [[0, 1], [2], [3, 4, 5]]
    px.init()
    caplog.set_level(logging.INFO, "phalanx")
    announce(None, ShardedLoader(DataLoader(TensorDataset(torch.ones(6, 2)), batch_sampler=batches)))
    assert "global batch = a batch of the batch sampler per rank x 1; 3 steps" in caplog.text


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).square().mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("settings", [{"amp": True}, {"graph": True}, {}], ids=["amp", "graph", "neither"])
@pytest.mark.parametrize("method", [Coder.forward, Coder.loss, Coder.__call__], ids=["forward", "loss", "call"])
def test_a_setting_that_acts_in_forward_passes_says_when_a_model_trains_without_one(
    settings: dict[str, Any],
    method: Callable[[Coder, torch.Tensor], torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    phalanx_propagates: None,
) -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    px.distribute(model, optimizer, strategy=px.DistributedStrategy(**settings))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with graphs_without_kernels():
        for _ in range(3):
            method(model, torch.ones(1, 2)).mean().backward()
            optimizer.step()
    expected = 1 if settings and method is not Coder.__call__ else 0
    assert caplog.text.count(f"{''.join(settings)} has no effect: the gradients of this Coder came without") == expected


def test_old_words_are_named_once(caplog: pytest.LogCaptureFixture, phalanx_propagates: None) -> None:
    model = px.distributed.DataParallel(nn.Linear(2, 1))
    for _ in range(3):
        model.scale_loss(model(torch.ones(1, 2)).sum()).backward()
        model.apply_collective_grads()
    assert caplog.text.count("scale_loss and apply_collective_grads are not needed") == 1


class Walked(nn.Linear):
    """Counts how often someone goes through its modules."""

    walks = 0

    def named_modules(self, *args: Any, **named: Any) -> Iterator[Any]:
        self.walks += 1
        return super().named_modules(*args, **named)


def test_whether_parameters_are_of_distributed_models_takes_one_walk_through_each() -> None:
    model, others = Walked(2, 1), nn.Linear(2, 1)
    px.distribute(model)
    model.walks = 0
    assert not is_any_named([*others.parameters()] * 8)
    assert model.walks == 1
    model.weight = nn.Parameter(torch.ones(1, 2))
    assert is_any_named([others.weight, model.weight])


def test_a_mirror_is_of_shards() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"strategy\.sharding is off"):
        px.distribute(model, mirror=1)
    plan = px.Plan(mesh=(), params=())
    with pytest.raises(ConfigError, match="give mirror or a plan, not both: a plan says its updates itself"):
        px.distribute(model, plan=plan, mirror=1)
    px.distribute(model, strategy=px.DistributedStrategy(sharding=True), mirror=1)
    strategy = session.strategy
    assert strategy is not None
    assert strategy.sharding_configs == {"mirror": 1}

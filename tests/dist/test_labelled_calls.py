"""Calls of the same verb and length that are for different things are never taken for each other."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx as px
from phalanx.comm.labels import current_label, label_calls
from phalanx.errors import ConfigError
from ranks import run_ranks

pytestmark = pytest.mark.dist

F64 = torch.float64


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.b(x if skips else torch.tanh(self.a(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=F64) for _ in range(3))
        self.head = nn.Linear(4, 1, dtype=F64)

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = x + torch.tanh(layer(x))
        return self.head(x)


class Branching(nn.Module):
    """A branch that some ranks use, above a normalisation that is collective in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4, dtype=F64), nn.BatchNorm1d(4, dtype=F64)
        self.branch, self.head = nn.Linear(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor, branches: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        if branches.any():
            x = torch.where(branches.view(-1, 1), self.branch(x), x)
        return self.head(x)


def rows(rank: int) -> Tensor:
    return torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(rank))


def train_a_branch_of_one_rank(rank: int) -> None:
    torch.manual_seed(0)
    whole = Branching()
    # Buckets of one parameter are issued in the middle of the backward pass of the ranks that have it.
    strategy = px.DistributedStrategy(sync_batch_norm=True, fuse_all_reduce_ops=False)
    model, _, _ = px.distribute(copy.deepcopy(whole), strategy=strategy)
    takes = torch.full((4,), rank == 0)
    model(rows(rank), takes).square().mean().backward()
    whole(torch.cat([rows(0), rows(1)]), torch.arange(8) < 4).square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-10, atol=1e-12, msg=name)


def train_two_models_at_once(rank: int) -> str:
    torch.manual_seed(0)
    first, second = Tower(), Tower()
    px.distribute(first)
    px.distribute(second)
    # The backward pass begins with the model that computed last, and its buckets are the first to be issued.
    last = (first, second)[rank]
    out = (second, first)[rank](rows(rank), True)
    with pytest.raises(ConfigError) as caught:
        (last(rows(rank), True) * out).mean().backward()
    return str(caught.value)


def skip_different_units(rank: int) -> str:
    torch.manual_seed(0)
    strategy = px.DistributedStrategy(sharding=True, sharding_configs={"stage": 3})
    model = Layers()
    px.distribute(model, torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)
    model(rows(rank), 1).mean().backward()  # all ranks skip the same
    with pytest.raises(ConfigError) as caught:
        model(rows(rank), 1 + rank).mean().backward()
    return str(caught.value)


def train_whole_models() -> str:
    rank = px.init().rank
    train_a_branch_of_one_rank(rank)
    return train_two_models_at_once(rank)


def train_units() -> str:
    return skip_different_units(px.init().rank)


def test_buckets_of_ranks_that_share_memory_are_compared_by_name_and_kept_from_calls_of_layers() -> None:
    for message in run_ranks(train_whole_models, 2):
        assert re.search(r"for the gradients of [ab]\.\w+ of model 2, Tower", message)
        assert re.search(r"for the gradients of [ab]\.\w+ of model 3, Tower", message)
        assert "belong in one module" in message


def test_buckets_on_other_backends_are_compared_before_the_update() -> None:
    for message in run_ranks(train_whole_models, 2, env={"PHALANX_BACKEND": "gloo"}):
        assert "Tower with gradients of another model" in message
        assert "belong in one module" in message


def test_units_of_ranks_that_share_memory_are_compared_by_name_before_weights_are_used() -> None:
    for message in run_ranks(train_units, 2):
        assert "made all_gather of 20 float64 for the weights of layers.1" in message
        assert "made all_gather of 20 float64 for the weights of layers.2" in message
        assert "draw it from a generator of one seed" in message


def test_units_on_other_backends_are_compared_before_the_update() -> None:
    for message in run_ranks(train_units, 2, env={"PHALANX_BACKEND": "gloo"}):
        assert "Ranks used different units of a sharded model in one step" in message
        assert "'layers.2' made 3 calls on rank 0, 0 calls on rank 1" in message


def label_by_hand() -> str:
    rank = px.init().rank
    with label_calls("the same"), label_calls("the outer"):
        dist.all_reduce(torch.ones(3))
        assert current_label() == "the outer"
    assert current_label() == ""
    with label_calls("a mask" if rank else ""), pytest.raises(ConfigError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_call_with_a_label_is_none_without() -> None:
    for message in run_ranks(label_by_hand, 2):
        assert "made all_reduce sum of 3 float32 for a mask" in message
        assert "made all_reduce sum of 3 float32, and" in message or "made all_reduce sum of 3 float32. All" in message

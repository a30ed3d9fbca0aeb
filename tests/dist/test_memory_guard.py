"""One of two ranks runs out of memory in every way there is: the weights are those of enough memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import TensorDataset

import phalanx as px
from memory_traps import MODELS, Trap, limit_memory
from ranks import run_ranks

pytestmark = pytest.mark.dist

ZERO_1 = {"sharding": True, "sharding_configs": {"stage": 1}}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "images": ("images", {}, ("forward", "backward")),
    "text, bfloat16, clipped": (
        "text",
        {"amp": True, "clip": True, "clip_configs": {"norm": 0.5}},
        ("forward", "backward"),
    ),
    "rows, replicas": ("rows", {"logical_replicas": 4}, ("forward", "backward")),
    "images, replicas, accumulated": (
        "images",
        {"logical_replicas": 4, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        ("forward", "backward"),
    ),
    "text, small buckets": ("text", {"fuse_all_reduce_ops": False}, ("forward", "backward")),
    "text, zero 1": ("text", ZERO_1, ("forward",)),
    "rows, zero 2, replicas": (
        "rows",
        {"sharding": True, "sharding_configs": {"stage": 2}, "logical_replicas": 4},
        ("forward",),
    ),
}


def train(kind: str, settings: dict[str, Any], phase: str, how: str, number: int = 4) -> dict[str, torch.Tensor]:
    gc.freeze()
    limit_memory()
    torch.manual_seed(0)
    net, x, y = MODELS[kind]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    strategy = px.DistributedStrategy(**settings)
    rank = px.init().rank
    if how == "model":
        model = px.Model(net, F.cross_entropy, optimizer, strategy=strategy)
        Trap.set(phase if rank == 1 else "", number)
        model.train(1, TensorDataset(x, y), global_batch=24)
    else:
        _, _, loader = px.distribute(net, optimizer, TensorDataset(x, y), global_batch=24, strategy=strategy)
        step = px.train_step(net, F.cross_entropy, optimizer) if how == "train_step" else None
        for at, (a, b) in enumerate(loader):
            Trap.set(phase if rank == 1 and at in (1, 2) else "", number)
            if step is not None:
                step(a, b)
                continue
            optimizer.zero_grad()
            F.cross_entropy(net(a), b).backward()
            optimizer.step()
    assert not Trap.phase
    return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))


def same(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(first[0][name], second[0][name]) for name in first[0])


@pytest.mark.parametrize("case", CASES)
def test_a_loop_goes_on_with_the_same_bits(case: str) -> None:
    kind, settings, phases = CASES[case]
    whole = run_ranks(train, 2, kind, settings, "", "loop")
    for phase in phases:
        assert same(whole, run_ranks(train, 2, kind, settings, phase, "loop")), phase


@pytest.mark.parametrize("how", ["train_step", "model"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_and_a_model_go_on_with_the_same_bits(how: str, phase: str) -> None:
    whole = run_ranks(train, 2, "images", {}, "", how)
    assert same(whole, run_ranks(train, 2, "images", {}, phase, how))


@pytest.mark.parametrize("number", [1, 2])
def test_zero_repeats_a_backward_pass_until_the_first_unit_is_done(number: int) -> None:
    whole = run_ranks(train, 2, "text", ZERO_1, "", "loop")
    assert same(whole, run_ranks(train, 2, "text", ZERO_1, "backward", "loop", number))


def test_zero_later_in_backward_says_what_to_set() -> None:
    outcomes = run_ranks(train, 2, "text", ZERO_1, "backward", "loop", expect_failure=True)
    assert "can't allocate memory" in outcomes[1].message
    assert "strategy.recompute = True" in outcomes[1].output


class Gathering(torch.nn.Module):
    """Compares its rows with those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.trap = torch.nn.Linear(8, 8), Trap()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        everyone = px.comm.all_gather(self.layer(x))
        return self.trap(self.layer(x)) @ everyone.T


def gather(phase: str, number: int) -> str:
    limit_memory()
    net = Gathering()
    px.distribute(net)
    Trap.set(phase if px.init().rank == 1 else "", number)
    try:
        net(torch.ones(4, 8)).sum().backward()
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return ""


@pytest.mark.parametrize(("phase", "number"), [("forward", 1), ("backward", 1)])
def test_a_pass_that_exchanges_something_itself_is_not_repeated_alone(phase: str, number: int) -> None:
    outcomes = run_ranks(gather, 2, phase, number, expect_failure=True)
    assert "calls collectives itself" in outcomes[1].value

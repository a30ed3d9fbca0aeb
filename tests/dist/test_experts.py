"""Experts dealt to ranks train as one process does, whatever the router chooses."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from expert_models import mixture
from phalanx.errors import ConfigError
from ranks import run_ranks
from tensor_models import Case, difference, features, trained, trained_alone, whole

pytestmark = pytest.mark.dist

STYLES = {"*.experts": "expert"}
NINE = (features, 9)
"""Rows that no number of ranks here divides: ranks weigh differently."""

CASES = {
    "two experts of a token": Case(mixture, STYLES, {}, NINE),
    "all tokens to one expert": Case(partial(mixture, k=1, favourites=(0,)), STYLES, {}, NINE),
    "all tokens to one rank": Case(partial(mixture, favourites=(2, 3)), STYLES, {}, NINE),
    "every expert of every token": Case(partial(mixture, k=4), STYLES, {}, NINE),
    "fewer rows than ranks": Case(mixture, STYLES, {}, (features, 3)),
    "recomputed": Case(
        mixture, STYLES, {}, NINE, strategy={"recompute": True, "recompute_configs": {"checkpoints": ["1", "3"]}}
    ),
}
PAIRS = {
    f"{name}, of two": replace(case, options={"size": 2})
    for name, case in CASES.items()
} | {
    "by the strategy": Case(
        mixture, STYLES, {}, NINE, strategy={"expert_parallel": True, "expert_parallel_configs": {"degree": 2}}
    ),
}  # fmt: skip


def trained_all(names: list[str]) -> dict[str, Any]:
    return {name: trained((CASES | PAIRS)[name]) for name in names}


def trained_narrow(names: list[str]) -> dict[str, Any]:
    return {name: trained(replace(CASES[name], dtype=torch.float32)) for name in names}


def check(ranks: list[dict[str, Any]], most: float = 1e-12, dtype: torch.dtype = torch.float64) -> None:
    for name in ranks[0]:
        expected = trained_alone(replace((CASES | PAIRS)[name], dtype=dtype))
        for result in ranks:
            assert difference(result[name], expected) <= most, name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_some_experts_each_train_as_one_process(ranks):
    results = run_ranks(trained_all, ranks, list(CASES))
    check(results)
    assert results[0]["two experts of a token"]["sizes"]["1.experts.up"] == [4 // ranks, 5, 6]


def test_ranks_with_some_experts_each_train_as_one_process_in_float32():
    check(run_ranks(trained_narrow, 2, list(CASES)), 1e-5, torch.float32)


def test_two_copies_of_experts_that_are_dealt_to_two_ranks_train_as_one_process():
    results = run_ranks(trained_all, 4, list(PAIRS))
    check(results)
    assert results[0]["by the strategy"]["sizes"]["3.experts.down"] == [2, 6, 5]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = px.shard(mixture(), STYLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return px.distribute(model, optimizer, (torch.ones(8, 6), torch.arange(8) % 5), global_batch=8)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {name: whole(model, name, param) for name, param in model.named_parameters()}
    moments = {name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()}
    return state | {f"{name}/exp_avg": whole(model, name, moment) for name, moment in moments.items()}


def train_and_save(folder: Path) -> dict[str, Tensor]:
    px.init()
    model, optimizer, loader = build(0)
    for inputs, target in loader:
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    px.save(folder, model, optimizer)
    return whole_state(model, optimizer)


def load(folder: Path) -> dict[str, Tensor]:
    px.init()
    model, optimizer, _ = build(1)
    px.load(folder, model, optimizer)
    return whole_state(model, optimizer)


def test_a_checkpoint_of_experts_on_four_ranks_loads_on_two_and_on_one(tmp_path):
    saved = run_ranks(train_and_save, 4, tmp_path)[0]
    for ranks in (2, 1):
        for loaded in run_ranks(load, ranks, tmp_path):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def call_wrongly(calls: list[str]) -> list[str]:
    px.init()
    model, _, _ = build(0)
    experts, tokens = model[1].experts, torch.ones(3, 6)
    chosen, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    arguments = {
        "three dims": (tokens[None], chosen, weights),
        "no weights": (tokens, chosen),
        "unknown expert": (tokens, chosen + 4, weights),
    }
    messages = []
    for call in calls:
        with pytest.raises(ConfigError) as error:
            experts(*arguments[call])
        messages.append(str(error.value))
    return messages


def test_calls_that_do_not_say_which_experts_are_errors():
    for messages in run_ranks(call_wrongly, 2, ["three dims", "no weights", "unknown expert"]):
        assert "'1.experts' holds experts and was called with shapes [(1, 3, 6), (3, 2), (3, 2)]" in messages[0]
        assert "Call it with tokens (rows, width)" in messages[1]
        assert "'1.experts' has 4 experts, and its router chose number 4. Give it" in messages[2]


class Wide(nn.Module):
    """Experts of one matrix each, which autocast computes in bfloat16, and which give back what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return torch.bmm(tokens[:, None], self.weight[chosen[:, 0]])[:, 0] * weights.bfloat16()


def gradients_of_sums_and_under_autocast() -> tuple[dict[str, Tensor], Tensor]:
    px.init()
    torch.manual_seed(0)
    model = px.shard(mixture().double(), STYLES, size=2)
    data = torch.randn(8, 6).double(), torch.arange(8) % 5
    strategy = px.DistributedStrategy(gradient_scale_configs={"scale_strategy": "sum"})
    _, _, loader = px.distribute(model, None, data, global_batch=8, shuffle=False, strategy=strategy)
    for inputs, target in loader:
        F.cross_entropy(model(inputs), target).backward()
    gradients = {name: whole(model, name, param.grad) for name, param in model.named_parameters()}
    px.distribute(wide := px.shard(nn.ModuleDict({"experts": Wide()}), {"experts": "expert"}, size=2))
    with torch.autocast("cpu", torch.bfloat16):
        output = wide["experts"](torch.ones(2, 6), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    output.sum().backward()
    return gradients, wide["experts"].weight.grad


def test_gradients_are_summed_where_asked_and_a_rank_without_tokens_need_not_know_their_dtype():
    torch.manual_seed(0)
    plain = mixture().double()
    inputs = torch.randn(8, 6).double()
    F.cross_entropy(plain(inputs), torch.arange(8) % 5).backward()
    results = run_ranks(gradients_of_sums_and_under_autocast, 4)
    for gradients, _ in results:
        for name, param in plain.named_parameters():
            torch.testing.assert_close(gradients[name], 4 * param.grad, rtol=1e-12, atol=1e-13)
    assert [bool(gradient.any()) for _, gradient in results] == [True, False, True, False]


def train_mixtrals() -> list[dict[str, float]]:
    return [
        train_mixtral("eager", torch.float64),
        train_mixtral("batched_mm", torch.float64),
        train_mixtral("grouped_mm", torch.float32),  # torch has no other
    ]


def train_mixtral(implementation: str, dtype: torch.dtype) -> dict[str, float]:
    """Train the experts of transformers' Mixtral on two ranks and by one process, from the same parameters."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    px.init()
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).to(dtype)
    for param in block.parameters():
        nn.init.normal_(param)
    plain = copy.deepcopy(block)
    inputs = torch.randn(4, 3, 8, dtype=dtype)
    plain(inputs).square().mean().backward()
    px.distribute(px.shard(block, {"experts": "expert"}))
    rank, ranks = px.current().rank, px.current().world_size
    block(inputs.chunk(ranks)[rank]).square().mean().backward()
    return {
        name: (param.grad - part_of(grad := plain.get_parameter(name).grad, param, rank)).norm().item()
        / grad.norm().item()
        for name, param in block.named_parameters()
    }


def part_of(whole_grad: Tensor, param: Tensor, rank: int) -> Tensor:
    rows = len(param)
    return whole_grad if len(whole_grad) == rows else whole_grad[rank * rows : (rank + 1) * rows]


def test_the_mixture_of_transformers_trains_as_one_process():
    pytest.importorskip("transformers.models.mixtral")
    for by_implementation in run_ranks(train_mixtrals, 2):
        for gaps, most in zip(by_implementation, (1e-12, 1e-12, 1e-5), strict=True):
            assert set(gaps) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
            assert max(gaps.values()) < most

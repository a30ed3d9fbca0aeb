"""Modules of which each rank computes a part of the sequence, against one process."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from benchmarks.tracked import saved_bytes
from phalanx.errors import ConfigError
from phalanx.parallel.session import applied_to, session
from ranks import run_ranks
from tensor_models import whole

pytestmark = pytest.mark.dist

WORDS, WIDTH, HEADS, TOKENS, BATCH, STEPS = 11, 12, 4, 8, 4, 3
"""With 4 ranks each has 2 tokens, one of each half of the sequence."""


class Block(nn.Module):
    """Attention and an MLP; `mask` is that of whole sequences, `scale` one number a feature that every token meets."""

    def __init__(
        self, causal: bool = True, dropout: float = 0.0, groups: int = HEADS, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.causal, self.groups, self.interleaved = causal, groups, interleaved
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, WIDTH + 2 * WIDTH * groups // HEADS), nn.Linear(WIDTH, WIDTH)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)]
        self.mlp, self.dropout = nn.Sequential(*layers), dropout

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | float = 1.0) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.groups, self.groups], 1)
        if self.interleaved:  # features of queries do not lie one after the other
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, -1, 3)).transpose(1, 2).unbind(-1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=self.groups < HEADS)
        x = x + scale * self.o(y.transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Transformer(nn.Module):
    """Positions, mask, head and loss are those of whole sequences, as anyone would write them."""

    def __init__(self, masked: bool = False, **settings: Any) -> None:
        super().__init__()
        self.masked = masked
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * TOKENS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(**settings) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.ones(2 * [ids.shape[1]], dtype=torch.bool).triu(-2) if self.masked else None
        for block in self.blocks:
            x = block(x, mask, scale=self.scale)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    model: dict[str, Any] = field(default_factory=dict)
    parts: str = "blocks"
    cut: dict[str, str] = field(default_factory=dict)
    """Layers that are cut by features, along another axis."""

    strategy: dict[str, Any] = field(default_factory=dict)
    attention: str = "all_gather"
    tokens: int = TOKENS


def recomputed(*names: str, **configs: Any) -> dict[str, Any]:
    return {"recompute": True, "recompute_configs": {"checkpoints": list(names), **configs}}


CASES = {
    "causal": Case(),
    "to all": Case({"causal": False}),
    "masked": Case({"causal": False, "masked": True}),
    "each block": Case(parts="blocks.*"),
    "one block": Case(parts="blocks.1"),
    "dropout": Case({"dropout": 0.3}),
    "recompute": Case(strategy=recomputed("blocks.*")),
    "recompute within": Case({"dropout": 0.3}, strategy=recomputed("*.mlp")),
    "selective": Case({"dropout": 0.3}, strategy=recomputed("blocks.*", selective=True)),
    "graph": Case(strategy={"graph": True}),
    "grouped heads": Case({"groups": 2}),
    "interleaved": Case({"interleaved": True}),
}
RING = ("causal", "to all", "masked", "dropout", "recompute", "selective", "graph", "grouped heads", "interleaved")
RING_CASES = {f"{name}, ring": replace(CASES[name], attention="ring") for name in RING}
ODD = 9
"""Tokens that 3 ranks cannot halve: each has consecutive ones."""
BOTH = {
    "features too": Case(
        {"dropout": 0.3},
        cut={"blocks.*.mlp.0": "column", "blocks.*.mlp.3": "row"},
        strategy={"hybrid_configs": {"mp_degree": 2, "sep_degree": 2}},
    )
}


def made(case: Case) -> tuple[Transformer, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = Transformer(**case.model).double()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (BATCH * STEPS, case.tokens + 1), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, [ids[:, :-1].contiguous(), ids[:, 1:].contiguous()]


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    tokens: int,
    together: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor.detach().clone(),
) -> dict[str, Any]:
    """Train; return losses, the gradients of every step, the parameters after them and what evaluation gives."""
    losses, gradients = [], {}
    probe = torch.arange(2 * tokens).view(2, tokens) % WORDS
    with torch.inference_mode():  # what it leaves must not disturb training
        model.eval()(probe)
    torch.manual_seed(2)
    model.train()
    for step, (ids, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        losses.append(px.global_mean(loss).item())
        gradients |= {f"{step}.{name}": together(name, param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(probe)
    parameters = {name: together(name, param) for name, param in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters, "output": {"": output}}


def alone(case: Case) -> dict[str, Any]:
    model, optimizer, data = made(case)
    return steps(model, optimizer, zip(*(part.split(BATCH) for part in data), strict=True), case.tokens)


def train_all(cases: dict[str, Case], degree: int) -> dict[str, dict[str, Any]]:
    px.init()
    # The operators as they are: what is compared is not the compiler.
    torch.compile = partial(torch.compile, backend="aot_eager")
    # torch's own, where its compiler continues behind what it cannot compile.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin")
    found = {}
    for name, case in cases.items():
        model, optimizer, data = made(case)
        px.shard(model, {case.parts: "context"})
        if case.cut:
            px.shard(model, case.cut)
        context = {"degree": degree, "attention": case.attention}
        configs = {"context_parallel": True, "context_parallel_configs": context}
        model, optimizer, loader = px.distribute(
            model,
            optimizer,
            torch.utils.data.TensorDataset(*data),
            global_batch=BATCH,
            shuffle=False,
            strategy=px.DistributedStrategy(**configs, **case.strategy),
        )
        assert applied_to(model).plan.axis_size("context") == degree
        explained = " ".join(str(px.explain(model)).split())
        assert f"each rank along context={degree} computes 1/{degree} of the tokens" in explained
        assert ("go around the ranks" in explained) == (case.attention == "ring")
        found[name] = steps(model, optimizer, loader, case.tokens, partial(whole, model))
        del model, optimizer, loader
        forget()
    return found


def forget() -> None:
    """Let the next model of this process have another strategy."""
    session.reset()
    gc.collect()


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    worst = max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))
    for kind in ("gradients", "parameters", "output"):
        assert list(found[kind]) == list(expected[kind])
        for name, tensor in expected[kind].items():
            worst = max(worst, ((found[kind][name] - tensor).norm() / tensor.norm().clamp_min(1e-3)).item())
    return worst


FEW = {
    name: case
    for name, case in (CASES | RING_CASES).items()
    if name.removesuffix(", ring") in ("causal", "masked", "recompute")
}
THREE = {
    f"{attention}, {tokens} tokens": Case({"groups": 2, "causal": causal}, attention=attention, tokens=tokens)
    for attention in ("all_gather", "ring")
    for causal, tokens in ((True, ODD), (True, 12), (False, 6))
}


@pytest.mark.parametrize(
    ("ranks", "degree", "cases"), [(2, 2, CASES), (2, 2, RING_CASES), (3, 3, THREE), (4, 2, FEW | BOTH), (4, 4, FEW)]
)
def test_ranks_that_compute_parts_of_sequences_train_as_one_process(
    ranks: int, degree: int, cases: dict[str, Case]
) -> None:
    found = run_ranks(train_all, ranks, cases, degree, timeout_s=100)
    for name, case in cases.items():
        expected = alone(case)
        for rank, of in enumerate(found):
            assert difference(of[name], expected) < 1e-12, (name, rank)


LAYERS, ROWS, LONG = 2, 2, 64


def kept(dropout: float, attention: str) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps on this rank, and in one process."""
    context = px.init()
    model, inputs = nn.Sequential(*(Block(dropout=dropout) for _ in range(LAYERS))), torch.randn(ROWS, LONG, WIDTH)
    in_one = saved_bytes(model, inputs)
    px.shard(model, {"": "context"})
    settings = {"degree": context.world_size, "attention": attention}
    px.distribute(model, strategy=px.DistributedStrategy(context_parallel=True, context_parallel_configs=settings))
    return saved_bytes(model, inputs), in_one


@pytest.mark.parametrize(("ranks", "dropout"), [(2, 0.0), (2, 0.3), (4, 0.0)])
def test_a_rank_keeps_its_part_of_the_activations_and_all_keys_and_values(ranks: int, dropout: float) -> None:
    item = ROWS * LONG * WIDTH * 4
    chunk = LONG // ranks // 2
    for rank, (mine, in_one) in enumerate(run_ranks(kept, ranks, dropout, "all_gather")):
        gathered, first, joined = LAYERS * 2 * item, item // ranks, LAYERS * item // ranks  # of two chunks each
        masks = chunk * chunk * ((rank + 1 if rank else 0) + 2 * ranks - rank) * 4
        assert mine == pytest.approx(in_one / ranks + gathered + first + joined + masks, abs=64)


@pytest.mark.parametrize(("ranks", "dropout"), [(2, 0.3), (4, 0.0)])
def test_a_rank_of_a_ring_keeps_its_part_of_all_that_one_process_keeps(ranks: int, dropout: float) -> None:
    item = ROWS * LONG * WIDTH * 4
    for mine, in_one in run_ranks(kept, ranks, dropout, "ring"):
        assert mine == pytest.approx(in_one / ranks + item // ranks, abs=64)


class Wrong(nn.Module):
    """A block that cannot compute a part of the sequence, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Tensor) -> Any:
        y = self.inner(x)
        if self.how == "by hand":
            return (y @ y.transpose(1, 2)).softmax(-1) @ y
        if self.how == "positions":
            y = y + torch.arange(x.shape[1]).unsqueeze(1)
        if self.how == "table":
            y = y + torch.zeros(9, WIDTH)[: x.shape[1]]
        if self.how == "other keys":
            return F.scaled_dot_product_attention(y, y[:, 1:], y[:, 1:], is_causal=True)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool() if self.how == "mask" else None
        y = F.scaled_dot_product_attention(y, y, y, mask, dropout_p=0.1 if self.how == "drops" else 0.0)
        return (y, x) if self.how == "two" else y.sum(1) if self.how == "pooled" else y


class Around(nn.Module):
    """A model that runs its blocks in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Wrong(how) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        if self.how == "parts":
            return self.blocks[1].inner(self.blocks[0].inner(x))
        if self.how == "alike":
            return self.blocks[0](x, torch.ones(x.shape[1], x.shape[1]))
        return self.blocks[1 if self.how == "skips" else 0](x)


WRONG = {
    "mask": r"gives attention a mask of shape \(4, 4\). It takes \(..., 8 queries, 8 keys\): make it for whole",
    "by hand": "called no torch.nn.functional.scaled_dot_product_attention, and other ways to mix tokens",
    "other keys": "asks for causal attention of 4 queries to 3 keys",
    "drops": r"drops attention scores \(dropout_p=0.1\), of which ranks would drop the same",
    "two": "must return one tensor with the 4 tokens it got along dim -2; found tuple",
    "pooled": r"must return one tensor with the 4 tokens it got along dim -2; found shape \(8, 12\)",
    "positions": r"counts its 4 tokens from 0 \(arange\), though they are of another place on each rank",
    "table": r"counts its 4 tokens from 0 \(__getitem__\)",
    "parts": "'blocks' has style 'context' and did not run, or its parts ran without it",
    "alike": r"got an input of shape \(8, 8\), and as many rows as tokens",
    "skips": "got 8 tokens, which no member before it cut",
    "odd": "got a sequence of 7, which cannot be cut evenly over 2 ranks",
    "flat": r"takes as its first input the activations, whose dim -2 is cut; found a tensor of shape \(8,\)",
}


def refused() -> dict[str, str]:
    """Return what is said of models that cannot be cut."""
    px.init()
    found = {}
    for how in WRONG:
        model = Around(how)
        px.shard(model, {"blocks" if how in ("skips", "parts") else "blocks.0": "context"}, size=2)
        px.distribute(model)
        with pytest.raises(ConfigError) as error:
            model(torch.ones({"odd": (8, 7, WIDTH), "flat": (8,)}.get(how, (8, 8, WIDTH))))
        found[how] = str(error.value)
        del model, error
        forget()
    return found


def test_what_cannot_be_cut_is_refused_on_all_ranks() -> None:
    for found in run_ranks(refused, 2):
        for how, message in WRONG.items():
            assert re.search(message, found[how]), found[how]

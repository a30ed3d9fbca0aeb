"""Cut layers with dropout, and layers that users make of the collectives, equal their one-process references."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx import fleet
from phalanx.errors import ConfigError
from ranks import run_ranks
from tensor_models import BLOCK, SEQUENCE, Transformer, features, mlp, tokens, whole, whole_loss

pytestmark = pytest.mark.dist

CHAIN = {"[02]": "column", "5": "row"}
VOCABULARY = BLOCK | {"tokens": "vocab", "head": "column"}
SHARES = (slice(0, 5), slice(5, 9))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: whole(model, name, param.grad) for name, param in model.named_parameters()}


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def of_streams(rank: int) -> dict[str, Any]:
    """Every rank has a stream of its own, until ranks that read the same rows come to share one."""
    found = {}
    for name, build, styles, options, data in (
        ("hybrid", lambda: mlp(0.5), CHAIN, {}, features(9)),
        ("chain", lambda: mlp(0.5), CHAIN, {"axis": "model"}, features(9)),
        ("block", lambda: Transformer(0.5), VOCABULARY, {"axis": "model"}, tokens(9)),
        ("sequence", lambda: Transformer(0.5), VOCABULARY | SEQUENCE, {"axis": "model"}, tokens(9)),
    ):
        model = px.shard(seeded(build), styles, **options)
        torch.manual_seed(100 + rank)
        model, _, loader = px.distribute(
            model, None, torch.utils.data.TensorDataset(*data), global_batch=9, shuffle=False
        )
        inputs, target = next(iter(loader))
        found[name] = gradients(model, whole_loss(model(inputs), target))
        # The streams are still together, or still apart.
        found[f"{name} next"] = torch.rand(1).item()
        del model, loader
        gc.collect()
    return found


class OwnLinear(nn.Module):
    """A layer as users write it from the collectives: gathers rows, computes its features, takes its own rows back."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        size, rank = fleet.worker_num(), fleet.worker_index()
        linear = nn.Linear(inputs, outputs, bias=False)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        self.weight.is_distributed = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(px.comm.all_gather(x), self.weight)
        return px.comm.all_gather(y, dim=1).chunk(fleet.worker_num())[fleet.worker_index()]


class Classifier(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 7), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def ready_made() -> nn.Module:
    return Classifier(px.ModelParallelLinear(7, fleet.worker_num(), fleet.worker_index(), 5, uneven=True))


def own_layers(rank: int) -> dict[str, Any]:
    """Layers that were made cut, in a model that Fleet's verbs distribute: one step of SGD."""
    found = {}
    for name, build, rows in (("made", ready_made, 9), ("own", lambda: Classifier(OwnLinear(7, 4)), 8)):
        model = seeded(build)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        model = fleet.distributed_model(model)
        inputs, target = (part.tensor_split(2)[rank] for part in features(rows))
        if rows == 9:  # what the loader says of uneven batches
            px.current().batch = px.comm.context.BatchShare(len(inputs), rows)
        before = {key: param.detach().clone() for key, param in model.named_parameters()}
        F.cross_entropy(model(inputs), target % 4).backward()
        optimizer.step()
        steps = {key: (before[key] - param.detach()) / 0.5 for key, param in model.named_parameters()}
        found[name] = {key: px.comm.all_gather(step) if key.startswith("head") else step for key, step in steps.items()}
        found[f"{name} shares"] = {key: param.detach().clone() for key, param in model.named_parameters()}
        px.current().batch = None
        del model, optimizer
        gc.collect()
    return found


def apart(rank: int) -> dict[str, Any]:
    """Ranks that hold layers together get other rows, and other random streams."""
    model = px.shard(seeded(mlp), CHAIN, axis="model")
    px.distribute(model)
    x, _ = features(4)
    with pytest.raises(ConfigError) as caught:
        model(x[rank : rank + 2])
    torch.manual_seed(rank)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("phalanx.parallel").addHandler(handler)
    model(x)
    logging.getLogger("phalanx.parallel").removeHandler(handler)
    with pytest.raises(ConfigError) as forgotten:
        forgetful()
    return {"rows apart": str(caught.value), "told": said, "norm apart": str(forgotten.value)}


def forgetful() -> None:
    """Train with a norm of heads that nobody named, whose gradients are those of a rank's own heads."""
    model = px.shard(seeded(lambda: Transformer(head_norm=True)), BLOCK, axis="model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    px.distribute(model, optimizer)
    inputs, target = tokens(4)
    for _ in range(2):
        whole_loss(model(inputs), target).backward()
        optimizer.step()


def everything() -> dict[str, Any]:
    rank = fleet.init(is_collective=True).rank
    return own_layers(rank) | of_streams(rank) | apart(rank)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


def same(found: dict[str, Tensor], model: nn.Module, losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()
    for name, param in model.named_parameters():
        assert ((found[name] - param.grad).norm() / param.grad.norm().clamp_min(1e-3)).item() <= 1e-12, name


def test_hybrid_layers_drop_what_the_replicas_drop(ranks: list[dict[str, Any]]):
    model, (inputs, target) = seeded(lambda: mlp(0.5)), features(9)
    losses = []
    for rank, share in enumerate(SHARES):
        torch.manual_seed(100 + rank)
        losses.append(whole_loss(model(inputs[share]), target[share]) * len(inputs[share]) / 9)
    same(ranks[0]["hybrid"], model, losses)
    assert ranks[0]["hybrid next"] != ranks[1]["hybrid next"]


@pytest.mark.parametrize("name", ["chain", "block", "sequence"])
def test_ranks_that_read_the_same_rows_drop_what_one_process_drops(ranks: list[dict[str, Any]], name: str):
    model = seeded((lambda: mlp(0.5)) if name == "chain" else lambda: Transformer(0.5))
    inputs, target = features(9) if name == "chain" else tokens(9)
    torch.manual_seed(100)
    same(ranks[0][name], model, [whole_loss(model(inputs), target)])
    assert ranks[0][f"{name} next"] == ranks[1][f"{name} next"] == torch.rand(1).item()


@pytest.mark.parametrize(("name", "rows", "classes"), [("made", 9, 5), ("own", 8, 4)])
def test_a_layer_that_holds_its_shard_takes_the_step_of_the_whole_layer(
    ranks: list[dict[str, Any]], name: str, rows: int, classes: int
):
    inputs, target = features(rows)
    model = seeded(lambda: Classifier(nn.Linear(7, classes, bias=name == "made")))
    same(ranks[0][name], model, [F.cross_entropy(model(inputs), target % 4)])
    first, second = (found[f"{name} shares"] for found in ranks)
    assert torch.equal(first["body.weight"], second["body.weight"])
    assert first["head.weight"].shape == (3 if name == "made" else 2, 7)
    assert not torch.equal(first["head.weight"][:2], second["head.weight"])


def test_ranks_that_hold_layers_together_are_told_when_they_read_other_rows(ranks: list[dict[str, Any]]):
    for found in ranks:
        assert "ranks along axis 'model' hold the model together and must read the same rows" in found["rows apart"]
        (streams,) = (line for line in found["told"] if line.startswith("ranks along"))
        assert "their random streams differ: they would drop different units" in streams
        assert "come apart. In step 2 these differ: block.head_norm.weight, block.head_norm.bias" in found["norm apart"]
        assert "Gradients of whole parameters differ where each rank uses them for a part" in found["norm apart"]

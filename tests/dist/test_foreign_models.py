"""Models nobody here wrote, through every entry point: two ranks have the gradients of one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from benchmarks.published_models import import_foreign
from foreign_models import CASES, ROWS, Rows, built
from phalanx.data import ShardedLoader
from phalanx.train.callbacks.run import Run
from ranks import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

GLOBAL_BATCH, RATE = 8, 0.05
Gradients = dict[str, Tensor]


def trained() -> dict[str, Any]:
    """Train every model by every entry point; return what each gives."""
    import_foreign()
    px.init()
    found: dict[str, Any] = {}
    for name in CASES:
        found[f"{name}, px.distribute"] = by_distribute(name)
        found[f"{name}, px.train_step"] = by_train_step(name)
        found[f"{name}, px.Model"] = by_model(name)
    found["T5, sinks"] = by_model("T5", dataset_sink_mode=True)
    found["told"] = {name: told_by(name) for name in ("BERT", "ViT")}
    return found


def planned() -> dict[str, float]:
    import_foreign()
    px.init()
    return told_by("BERT", parallel_mode="auto_parallel")


def told_by(name: str, **options: Any) -> dict[str, float]:
    """Return what a Model tells of its training and evaluation."""
    net, case, seen = built(name), CASES[name], Counted()
    model = px.Model(net, case.loss, optimizer_of(net), ["acc1", "loss"], **options)
    model.train(1, Rows(case.columns()), [seen], **loader_options(name))
    evaluated = model.eval(ShardedLoader(Rows(case.columns()), batch_size=5, training=False, collate_fn=case.collate))
    return {"mean loss": sum(seen.losses), **evaluated}


def loader_options(name: str) -> dict[str, Any]:
    return {"global_batch": GLOBAL_BATCH, "shuffle": False, "collate_fn": CASES[name].collate}


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), RATE)


def gradients(net: nn.Module) -> Gradients:
    return {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}


def by_distribute(name: str) -> Gradients:
    net, case = built(name), CASES[name]
    net, optimizer, loader = px.distribute(net, optimizer_of(net), Rows(case.columns()), **loader_options(name))
    assert optimizer is not None
    assert loader is not None
    for batch in loader:
        optimizer.zero_grad()
        loss = net(**batch).loss if case.loss is None else case.loss(net(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
    return gradients(net)


def by_train_step(name: str) -> Gradients:
    net, case = built(name), CASES[name]
    net, optimizer, loader = px.distribute(net, optimizer_of(net), Rows(case.columns()), **loader_options(name))
    assert optimizer is not None
    assert loader is not None
    step = px.train_step(net, case.loss, optimizer)
    for batch in loader:
        step(batch)
    return gradients(net)


class Counted(px.Callback):
    """Counts updates, and keeps losses at the ends of steps."""

    def __init__(self) -> None:
        self.updates = 0
        self.losses: list[float] = []

    def on_update(self, run: Run) -> None:
        self.updates += 1

    def on_step_end(self, run: Run) -> None:
        self.losses.append(run.global_loss())


def by_model(name: str, **options: Any) -> Gradients:
    net, case, seen = built(name), CASES[name], Counted()
    model = px.Model(net, case.loss, optimizer_of(net))
    model.train(1, Rows(case.columns()), [seen], **options, **loader_options(name))
    assert seen.updates == ROWS // GLOBAL_BATCH
    return gradients(net)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one process gives."""
    return run_ranks(trained, 1, timeout_s=140.0)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(300)
def test_two_ranks_have_the_gradients_of_one(one: dict[str, Any]) -> None:
    for found in run_ranks(trained, 2, timeout_s=140.0):
        for label, value in found.items():
            name = label.partition(",")[0]
            if name == "told":
                assert value == {of: pytest.approx(expected, rel=1e-12) for of, expected in one["told"].items()}
            else:
                assert_equal(value, one[f"{name}, px.distribute"], label)
                assert_equal(one[label], one[f"{name}, px.distribute"], f"{label}, one process")


@pytest.mark.timeout(300)
def test_a_planned_model_on_two_ranks_tells_what_one_process_tells(one: dict[str, Any]) -> None:
    for found in run_ranks(planned, 2, timeout_s=140.0):
        assert found == pytest.approx(one["told"]["BERT"], rel=1e-12)


def assert_equal(found: Gradients, reference: Gradients, label: str) -> None:
    assert found.keys() == reference.keys()
    whole = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for name, gradient in reference.items():
        apart = (found[name] - gradient).norm()
        # Biases of keys have no gradient in mathematics, and rounding alone in memory.
        assert apart <= 1e-12 * max(gradient.norm(), 1e-4 * whole), f"{label}: {name}"

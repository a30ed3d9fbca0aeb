"""Models nobody here wrote train under the Plans that the planner chooses for them as in one process."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
from torch import Tensor

import phalanx as px
from benchmarks.published_models import PUBLISHED, VISION, build_small, import_foreign
from benchmarks.published_rank import largest_difference, sample, strategy, train_small
from phalanx.plan.value import Plan
from ranks import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

NAMES = ["Llama-3-8B", "BERT-base", *(["Swin-T"] if VISION.is_dir() else [])]

CUT = {
    "Llama-3-8B": ("*.[qkv]_proj=column", "*.o_proj=row", "*.gate_proj=column", "*.up_proj=column", "*.down_proj=row"),
    "BERT-base": (
        *(f"*.self.{name}=column" for name in ("query", "key", "value")),
        "*.attention.output.dense=row",
        "*.intermediate.dense=column",
        "*.[01].output.dense=row",
    ),
    "Swin-T": ("*.mlp.0=column",),
}
"""Layers whose outputs ranks have a part of, and with them heads of attention; small models are faster whole."""


Trained = dict[str, dict[str, Tensor]]
"""Parameters by name, of each model."""

Plans = dict[str, Plan]
"""By the model, and what the Plan says of itself."""


def plan_and_train_alone() -> tuple[Trained, dict[int, Plans]]:
    """Train every model in one process, and plan it for 2 and for 4 ranks."""
    import_foreign()
    px.init()
    plans: dict[int, Plans] = {ranks: {} for ranks in (2, 4)}
    for (ranks, planned), name in itertools.product(plans.items(), NAMES):
        for limits in ((), ("tp=2", *CUT[name])):
            net, loss = build_small(name), PUBLISHED[name].loss
            options = {"optimizer": "momentum", "strategy": strategy(), "limits": limits, "top_k": 1}
            answer = px.auto_parallel(net, sample(name), loss, cluster=f"cpux{ranks}", **options)
            assert answer.gap <= 1
            assert not limits or "from cut" in " ".join(map(str, answer.search.best.sharded_layers.values()))
            planned[f"{name}: {answer.search.best.config}{', cut' if limits else ''}"] = answer.plan
    return {name: train_small(name) for name in NAMES}, plans


def train_planned(plans: Plans) -> Trained:
    import_foreign()
    px.init()
    return {label: train_small(label.partition(":")[0], plan) for label, plan in plans.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[Trained, dict[int, Plans]]:
    return run_ranks(plan_and_train_alone, 1, timeout_s=140)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_planned_models_train_like_one_process(alone: tuple[Trained, dict[int, Plans]], ranks: int) -> None:
    expected, plans = alone
    assert len(plans[ranks]) == 2 * len(NAMES)
    for trained in run_ranks(train_planned, ranks, plans[ranks], timeout_s=140):
        apart = {label: largest_difference(it, expected[label.partition(":")[0]]) for label, it in trained.items()}
        assert {label: difference for label, difference in apart.items() if not difference < 1e-11} == {}

"""Models nobody here wrote train under the Plans that the planner chooses for them as in one process."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import pytest

import phalanx as px
from benchmarks.published_models import VISION, import_foreign
from benchmarks.published_rank import Trained, largest_difference, limits_of, plan_small, train_small
from phalanx.plan.value import Plan
from ranks import run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

WAYS = {
    "Llama-3-8B": ("chosen", "cut"),
    "BERT-base": ("chosen", "cut"),
    "GPT-2": ("cut",),
    "T5-base": ("cut",),
    "Mixtral-8x7B": ("chosen", "cut"),
    **({"Swin-T": ("chosen", "cut"), "ResNet-50": ("cut", "stages")} if VISION.is_dir() else {}),
}
"""Models, and which Plans of each train in a way that no other does: heads with a cache of keys and values or a mask of
samples, linear layers of another class in parts, relative positions, experts, shifted windows, and convolutions with
batch normalisation in parts and in stages. `benchmarks.bench_models --apply` has all of them."""


class Planned(NamedTuple):
    """A Plan of a model."""

    model: str
    way: str
    plan: Plan


def plan_and_train_alone() -> tuple[dict[str, Trained], dict[int, list[Planned]]]:
    """Train every model in one process, and plan it for 2 and for 4 ranks."""
    import_foreign()
    px.init()
    plans: dict[int, list[Planned]] = {ranks: [] for ranks in (2, 4)}
    for ranks, several in plans.items():
        for name, ways in WAYS.items():
            for way in ways:
                answer = plan_small(name, ranks, limits_of(name, ranks)[way])
                assert answer.gap <= 1
                assert way != "cut" or answer.search.best.sharded_layers
                several.append(Planned(name, way, answer.plan))
    return {name: train_small(name) for name in WAYS}, plans


def train_planned(several: list[Planned]) -> list[Trained]:
    import_foreign()
    px.init()
    return [train_small(one.model, one.plan) for one in several]


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Trained], dict[int, list[Planned]]]:
    return run_ranks(plan_and_train_alone, 1, timeout_s=140)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_planned_models_train_like_one_process(
    alone: tuple[dict[str, Trained], dict[int, list[Planned]]], ranks: int
) -> None:
    expected, plans = alone
    for trained in run_ranks(train_planned, ranks, plans[ranks], timeout_s=140):
        differences = {
            f"{one.model}: {one.way}": largest_difference(result, expected[one.model])
            for one, result in zip(plans[ranks], trained, strict=True)
        }
        # Decoders of transformers compute their loss in float32.
        wrong = {label for label, (loss, params) in differences.items() if not (loss < 1e-6 and params < 1e-11)}
        assert {label: differences[label] for label in wrong} == {}

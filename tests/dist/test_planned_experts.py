"""Plans of the planner that deal experts to ranks train like one process, and send what was priced."""

from __future__ import annotations

from functools import partial

import pytest

import phalanx as px
from dist.test_auto_parallel import MODELS, ROWS, of_plans, of_traffic
from expert_models import mixture
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.report.traffic import Transfer, count_traffic
from phalanx.plan.value import Plan
from ranks import run_ranks
from tensor_models import features, whole_loss

pytestmark = pytest.mark.dist

OWN = {"mixture": (mixture, features), "every expert": (partial(mixture, k=4), features)}
"""The second sends every token to every expert, so that all ranks send as much."""


def answer(name: str, ranks: int, *limits: str) -> PlanResult:
    build, make = OWN[name]
    return px.auto_parallel(
        build().double(), make(ROWS), whole_loss, cluster=f"cpux{ranks}", optimizer="momentum", limits=limits, top_k=1
    )


def of_experts(named: dict[str, dict[str, Plan]]) -> dict[str, float]:
    MODELS.update(OWN)
    return of_plans(named)


@pytest.mark.parametrize(
    ("ranks", "limits"),
    [
        (2, [("ep=2",), ("ep=2", "recompute=full"), ("ep=2", "recompute=selective")]),
        (4, [("ep=4",), ("ep=2", "tp=1"), ("ep=2", "tp=2")]),
    ],
)
def test_plans_that_deal_experts_train_like_one_process(ranks: int, limits: list[tuple[str, ...]]) -> None:
    plans = {" ".join(words): answer("mixture", ranks, *words).plan for words in limits}
    assert all(plan.axis_size("expert") == int(words[3]) for words, plan in plans.items())
    for differences in run_ranks(of_experts, ranks, {"mixture": plans}, timeout_s=120):
        assert {words: value for words, value in differences.items() if not value < 1e-12} == {}


def of_tokens(plans: list[tuple[str, Plan]]) -> list[dict[Transfer, int]]:
    MODELS.update(OWN)
    return [dict(sent) for sent in of_traffic(plans)]


@pytest.mark.parametrize(("ranks", "limits"), [(2, ("ep=2",)), (4, ("ep=2", "tp=1"))])
def test_tokens_travel_as_often_and_as_many_as_was_priced(ranks: int, limits: tuple[str, ...]) -> None:
    planned = answer("every expert", ranks, *limits)
    priced = count_traffic(planned.search.best, planned.work)
    expected = {one: times for one, times in priced.items() if one[0] == "all_to_all"}
    assert sum(expected.values()) == 2 * 6, "of two mixtures, tokens and weights there, results back, and gradients"
    for (sent,) in run_ranks(of_tokens, ranks, [("every expert", planned.plan)]):
        assert {one: times for one, times in sent.items() if one[0] == "all_to_all"} == expected

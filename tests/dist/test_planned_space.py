"""What the planner searches beyond layers cut by features: tokens apart between layers, and operators in parts.

Plans that use them train like one process, and send what was priced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from dist.test_auto_parallel import MODELS, ROWS, TALK_BYTES, bytes_by_kind, of_plans, of_traffic
from phalanx.auto.capture import capture
from phalanx.auto.planned import Planned
from phalanx.auto.traffic import traffic
from phalanx.plan.value import Plan
from ranks import run_ranks
from tensor_models import whole_loss

pytestmark = pytest.mark.dist

TOKENS = ("tp=2", "pp=1", "recompute=none", "blocks.0.norm1=sequence", "blocks.0.o=row", "blocks.0.mlp.3=row")
PARTS = ("tp=2", "pp=1", "features.*=parts")


def found(name: str, ranks: int, *limits: str) -> Planned:
    build, make = MODELS[name]
    torch.manual_seed(0)
    net = build()
    net.double()
    return px.auto_parallel(
        net, make(ROWS), whole_loss, cluster=f"cpux{ranks}", optimizer="momentum", limits=limits, top_k=1
    )


def seen(build: Callable[[], nn.Module], make: Callable[[int], Any]) -> nn.Module:
    """Return a model of which this process captured a step: Plans that place operators are of one."""
    net = build()
    net.double()
    capture(net, make(ROWS), whole_loss)
    return net


def all_of(named: dict[str, dict[str, Plan]], several: list[tuple[str, Plan]]) -> tuple[dict[str, float], list[Any]]:
    for name, (build, make) in MODELS.items():
        MODELS[name] = partial(seen, build, make), make
    return of_plans(named), of_traffic(several)


@pytest.mark.parametrize(("ranks", "zeros"), [(2, ("zero=0",)), (4, ("zero=0", "zero=2"))])
def test_tokens_apart_and_operators_in_parts_train_like_one_process(ranks: int, zeros: tuple[str, ...]) -> None:
    answers = [
        (name, limits[-1], found(name, ranks, *limits))
        for name, wanted in (("transformer", TOKENS), ("hybrid", PARTS))
        for limits in ((*wanted, zero) for zero in zeros)
    ]
    ways = {name: {str(way) for way in one.searched.best.ways.values()} for name, _, one in answers}
    assert {"on its tokens", "column from tokens to cut", "row from cut to tokens", "vocab to tokens"} <= ways[
        "transformer"
    ]
    assert "parts" in ways["hybrid"]
    named: dict[str, dict[str, Plan]] = {}
    for name, zero, one in answers:
        named.setdefault(name, {})[zero] = one.plan
    equal = [(name, one) for name, zero, one in answers if zero == "zero=0"]
    both = run_ranks(all_of, ranks, named, [(name, one.plan) for name, one in equal], timeout_s=120)
    for apart, executed in both:
        assert {words: value for words, value in apart.items() if not value < 1e-10} == {}
        for (name, one), sent in zip(equal, executed, strict=True):
            priced = traffic(one.searched.best, one.layers, one.speed)
            loud = Counter({size: times for size, times in sent.items() if size[1] >= TALK_BYTES})
            assert loud.total() > 0, name
            assert bytes_by_kind(sent) == pytest.approx(bytes_by_kind(priced), rel=0.03, abs=2 * TALK_BYTES), name

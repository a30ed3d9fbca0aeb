"""What ranks exchange in a step is what the planner priced, for every kind of Plan that it returns.

Networks, sharding, what is computed again, stages, tokens apart and operators in parts; together where they go so.
"""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from dist.test_auto_parallel import EXAMPLES, ROWS, bytes_by_kind, listened
from dist.test_planned_space import Ordered, seen
from phalanx.auto.planner.report.traffic import Transfer, count_traffic
from phalanx.parallel.session import session
from phalanx.plan.mesh import Position
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Plan
from ranks import run_ranks
from tensor_models import WIDTH, Case, made, tokens, whole_loss

pytestmark = pytest.mark.dist


class Even(Ordered):
    """Scores that ranks can hold equal parts of: others are sent with padding, which is not priced."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


NETWORKS: dict[str, tuple[Any, Any]] = {**EXAMPLES, "ordered": (Even, tokens)}

SIZES = {name: sum(one.nbytes for one in build().double().parameters()) for name, (build, _) in NETWORKS.items()}
"""Bytes of all parameters."""

TALK_BYTES = 300
"""In a step, ranks tell each other no more than so many bytes of each about what they are about to do."""

APART = ("blocks.0.norm1=sequence", "blocks.0.o=row", "blocks.0.mlp.3=row", "recompute=none")

LIMITS: dict[int, list[tuple[str, tuple[str, ...]]]] = {
    2: [
        ("lenet", ()),
        ("lenet", ("zero=1",)),
        ("lenet", ("tp=2", "0=parts")),
        ("hybrid", ("zero=2",)),
        ("hybrid", ("pp=2", "micro=4")),
        ("ordered", ("zero=1", "recompute=selective")),
        ("ordered", ("zero=3", "recompute=full")),
        ("ordered", ("pp=2", "vpp=2", "micro=2", "recompute=none")),
    ],
    4: [
        ("lenet", ("tp=2", "dp=2", "pp=1", "0=parts")),
        ("hybrid", ("tp=2", "dp=2", "zero=3", "classifier.0=column", "classifier.2=row")),
        ("hybrid", ("tp=2", "pp=2", "micro=2", "features.0=parts")),
        ("hybrid", ("dp=2", "pp=2", "micro=2", "zero=1")),
        ("ordered", ("tp=2", "dp=2", "zero=1", *APART)),
        ("ordered", ("tp=2", "dp=2", "zero=2", *APART)),
        ("ordered", ("tp=2", "pp=2", "micro=2", *APART)),
        ("ordered", ("tp=4", "pp=1", "blocks.0.q=column", "blocks.0.o=row", "recompute=none")),
    ],
}
"""What is asked of the planner, by number of ranks. Losses are whole: a layer that is followed by one is too."""


def second_steps(several: list[tuple[str, Plan]]) -> list[Counter[Transfer]]:
    """Return the collectives of this rank's second step under each Plan."""
    px.init()
    sent = listened()
    return [_second_step(sent, name, plan) for name, plan in several]


def _second_step(sent: Counter[Transfer], name: str, plan: Plan) -> Counter[Transfer]:
    build, make = NETWORKS[name]
    model, optimizer, data = made(Case(build=partial(seen, build, make), styles={}, options={}, batch=(make, ROWS)))
    model, optimizer, loader = px.distribute(
        model, optimizer, TensorDataset(*data), global_batch=ROWS, shuffle=False, plan=plan
    )
    step, batches = px.train_step(model, whole_loss, optimizer), iter(loader)
    step(*next(batches))
    sent.clear()
    step(*next(batches))
    found = Counter(sent)
    del model, optimizer, loader, step, batches
    session.reset()
    gc.collect()
    return found


def alone(sent: Counter[Transfer], priced: Counter[Transfer], most: float) -> dict[Transfer, float]:
    """Return those that are priced as collectives of their own: of parts of buckets and units bytes are compared."""
    return {one: sent[one] for one, times in priced.items() if times == round(times) and one[1] < most}


@pytest.mark.parametrize("ranks", LIMITS)
def test_what_ranks_exchange_is_what_was_priced(ranks: int) -> None:
    several, priced = [], []
    for name, limits in LIMITS[ranks]:
        build, make = NETWORKS[name]
        torch.manual_seed(0)
        answer = px.auto_parallel(
            build().double(), make(ROWS), whole_loss, cluster=f"cpux{ranks}", optimizer="momentum", limits=limits
        )
        for plan, one in zip(answer.top_k, answer.search.top_k, strict=True):
            several.append((name, plan))
            stages = range(one.config.stages)
            priced.append((one.config, [count_traffic(one, answer.work, stage) for stage in stages]))
    for rank, executed in enumerate(run_ranks(second_steps, ranks, several, timeout_s=150)):
        for (name, plan), (at, stages), sent in zip(several, priced, executed, strict=True):
            mine = stages[Position(plan.mesh, rank).coordinates.get(STAGE_AXIS, 0)]
            found, expected = bytes_by_kind(sent), bytes_by_kind(mine)
            if at.stages > 1 and at.model > 1:
                # An activation that is cut over ranks is sent in parts, and priced as if it were whole.
                assert found.pop("send") <= expected.pop("send") + TALK_BYTES * ranks, f"{name} {at}"
                mine = Counter({one: times for one, times in mine.items() if one[0] != "send"})
            assert alone(sent, mine, 0.5 * SIZES[name]) == alone(mine, mine, 0.5 * SIZES[name]), f"{name} {at}"
            assert found == pytest.approx(expected, rel=0.03, abs=TALK_BYTES * ranks), f"{name} {at}"

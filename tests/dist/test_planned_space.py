"""What the planner searches beyond layers cut by features: tokens apart between layers, and operators in parts.

Plans that use them train like one process, and send what was priced.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx as px
from dist.test_auto_parallel import MODELS, ROWS, TALK_BYTES, bytes_by_kind, of_plans, of_traffic
from phalanx.auto.capture.step import capture
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.report.traffic import count_traffic
from phalanx.errors import PlanError
from phalanx.parallel.session import session
from phalanx.plan.value import OpRule, Plan, Shard
from ranks import run_ranks
from tensor_models import Transformer, tokens, whole_loss

pytestmark = pytest.mark.dist

TOKENS = ("tp=2", "pp=1", "recompute=none", "blocks.0.norm1=sequence", "blocks.0.o=row", "blocks.0.mlp.3=row")
STEPS = 4
PARTS = ("tp=2", "pp=1", "features.*=parts")


class Ordered(nn.Module):
    """Two blocks of a transformer with their units in the order in which they run, so that stages can be cut."""

    def __init__(self) -> None:
        super().__init__()
        first, second = Transformer(), Transformer()
        self.tokens, self.blocks, self.head = first.tokens, nn.Sequential(first.block, second.block), first.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids)))


IN_STAGES: dict[str, tuple[Any, Any]] = {"hybrid": MODELS["hybrid"], "ordered": (Ordered, tokens)}


def found(name: str, ranks: int, *limits: str) -> PlanResult:
    build, make = {**MODELS, **IN_STAGES}[name]
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


def losses_alone(name: str) -> list[float]:
    """Return the losses of steps over one batch in one process."""
    torch.manual_seed(0)
    model, batch = IN_STAGES[name][0]().double(), IN_STAGES[name][1](ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = whole_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_in_stages(name: str, plan: Plan) -> list[float]:
    """Return the same losses of this job's ranks; all but the first follow from the gradients of all parameters."""
    build, make = IN_STAGES[name]
    torch.manual_seed(0)
    model = seen(build, make)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = TensorDataset(*(torch.cat([one] * STEPS) for one in make(ROWS)))
    model, optimizer, loader = px.distribute(model, optimizer, rows, global_batch=ROWS, shuffle=False, plan=plan)
    step = px.train_step(model, whole_loss, optimizer)
    losses = [px.global_mean(step(inputs, target).loss).item() for inputs, target in loader]
    del model, optimizer, loader, step
    session.reset()
    gc.collect()
    return losses


def apart_in_stages(several: list[tuple[str, Plan]]) -> list[float]:
    """Return how far the losses of each Plan are from those of one process; none may say that it runs otherwise."""
    px.init()
    warnings: list[logging.LogRecord] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger("phalanx.parallel").addHandler(heard)
    found = [
        max(abs(a - b) for a, b in zip(losses_in_stages(name, plan), losses_alone(name), strict=True))
        for name, plan in several
    ]
    logging.getLogger("phalanx.parallel").removeHandler(heard)
    assert [one.getMessage() for one in warnings] == []
    return found


def all_in_stages(several: list[tuple[str, Plan]]) -> list[float]:
    px.init()
    name, plan = several[-1]
    above = OpRule(site="features:0:aten.relu.default", outputs=({"model": Shard(dim=0)},))
    with pytest.raises(PlanError, match=r"plan.ops of a module that holds several units of a pipeline"):
        losses_in_stages(name, plan.model_copy(update={"ops": (above,)}))
    session.reset()
    return apart_in_stages(several)


def test_gradients_of_weights_apart_train_like_one_process() -> None:
    answers = [(name, found(name, 2, "pp=2", "schedule=zero_bubble", "micro=4")) for name in ("ordered", "hybrid")]
    assert {one.plan.schedule.kind for _, one in answers} == {"zero_bubble"}
    for losses in run_ranks(apart_in_stages, 2, [(name, one.plan) for name, one in answers], timeout_s=120):
        assert max(losses) < 1e-10


def test_both_train_like_one_process_through_stages() -> None:
    apart = ("tp=2", "pp=2", "blocks.0.norm1=sequence", "blocks.0.o=row", "blocks.0.mlp.3=row")
    asked = [
        ("ordered", (*apart, "micro=2", "vpp=2", "recompute=none")),
        ("ordered", (*apart, "micro=4", "vpp=1", "recompute=full")),
        ("ordered", (*apart, "micro=4", "schedule=zero_bubble")),
        ("ordered", ("dp=2", "pp=2", "micro=2", "schedule=zero_bubble")),
        ("hybrid", ("tp=2", "pp=2", "micro=2", "features.0=parts")),
    ]
    answers = [(name, found(name, 4, *limits)) for name, limits in asked]
    ways = [{path: str(way) for path, way in one.search.best.strategies.items()} for _, one in answers]
    assert ways[0]["blocks.0.norm1"] == ways[1]["blocks.1.norm2"] == "on its tokens"
    assert ways[2]["blocks.0.norm1"] == "on its tokens"
    assert ways[4]["features.0"] == "parts"
    assert answers[0][1].search.best.config.virtual == 2
    for losses in run_ranks(all_in_stages, 4, [(name, one.plan) for name, one in answers], timeout_s=120):
        assert max(losses) < 1e-10


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
    ways = {name: {str(way) for way in one.search.best.strategies.values()} for name, _, one in answers}
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
            priced = count_traffic(one.search.best, one.work)
            loud = Counter({size: times for size, times in sent.items() if size[1] >= TALK_BYTES})
            assert loud.total() > 0, name
            assert bytes_by_kind(sent) == pytest.approx(bytes_by_kind(priced), rel=0.03, abs=4 * TALK_BYTES), name

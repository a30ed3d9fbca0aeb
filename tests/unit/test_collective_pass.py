"""Which Plans let one rank compute a pass again by itself."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.plan.rules.collective_pass import why_collective, why_not_alone
from phalanx.plan.value import AllReduce, Axis, ParamRule, Plan, ReduceScatter, Step


def plan_of(*sizes: int, update: Any = None, **step: Any) -> Plan:
    axes = tuple(Axis(name=name, size=size) for name, size in zip(("data", "model", "stage"), sizes, strict=False))
    rule = ParamRule(match="*", update=update or AllReduce())
    return Plan(mesh=axes, params=(rule,), step=Step(batch_axes=("data",), **step))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (plan_of(4), None),
        (plan_of(2, 1, 1), None),
        (plan_of(2, 2), "its ranks exchange parts of activations"),
        (plan_of(2, 1, 2), "it is split into stages"),
        (plan_of(2, sync_bn=True), "its batch norms are synchronised"),
        (plan_of(1, sync_bn=True), None),
        (plan_of(2, update=ReduceScatter(zero=3)), "ZeRO 3 gathers parameters in every pass"),
    ],
)
def test_a_pass_is_collective_where_ranks_exchange_in_it(plan: Plan, why: str | None) -> None:
    assert why_collective(plan) == why
    assert why_not_alone(plan, has_servers=False) == why


def test_with_servers_a_pass_is_no_collective_and_cannot_be_made_again() -> None:
    assert why_collective(plan_of(2)) is None
    assert why_not_alone(plan_of(2), has_servers=True) == "it trains with parameter servers"

"""What of a Plan cannot be exact with logical replicas."""

from __future__ import annotations

import pytest

from phalanx.parallel.logical_replicas import _inexact
from phalanx.plan.value import AllReduce, Axis, ParamRule, Plan, Step


def plan_of(*axes: Axis) -> Plan:
    rule = ParamRule(match="*", update=AllReduce())
    return Plan(mesh=axes, params=(rule,), step=Step(batch_axes=("data",), replicas=4))


def test_data_parallel_is_exact() -> None:
    assert _inexact(plan_of(Axis(name="data", size=2)), is_shared=True) is None


@pytest.mark.parametrize("axis", ["model", "stage"])
def test_other_axes_are_refused(axis: str) -> None:
    reason = _inexact(plan_of(Axis(name="data", size=2), Axis(name=axis, size=2)), is_shared=True)
    assert reason is not None
    assert repr(axis) in reason

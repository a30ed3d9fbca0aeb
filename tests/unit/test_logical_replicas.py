"""What of a Plan cannot be exact with logical replicas."""

from __future__ import annotations

import pytest

from phalanx.parallel.logical_replicas import _inelastic, _inexact
from phalanx.plan.value import AllReduce, Axis, ParamRule, Plan, Step


def plan_of(*axes: Axis) -> Plan:
    rule = ParamRule(match="*", update=AllReduce())
    return Plan(mesh=axes, params=(rule,), step=Step(batch_axes=("data",), replicas=4))


def test_data_parallel_is_exact() -> None:
    assert _inexact(plan_of(Axis(name="data", size=2)), is_shared=True) is None


def test_a_tensor_parallel_group_counts_as_one_rank_and_may_not_be_lost() -> None:
    plan = plan_of(Axis(name="data", size=2), Axis(name="model", size=2))
    assert _inexact(plan, is_shared=True) is None
    assert "slices of a lost rank" in (_inelastic(plan) or "")
    assert _inelastic(plan_of(Axis(name="data", size=2))) is None


@pytest.mark.parametrize("axis", ["context", "stage"])
def test_other_axes_are_refused(axis: str) -> None:
    reason = _inexact(plan_of(Axis(name="data", size=2), Axis(name=axis, size=2)), is_shared=True)
    assert reason is not None
    assert repr(axis) in reason

"""`px.simulate_plan`: simulate a training step of a model under a given Plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.layers import WHOLE
from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.auto.captured_model import batch_size_of, build_machine, parameter_dtype, precision_of, read_layers
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.planner.from_plan import read_plan
from phalanx.auto.planner.simulation import simulate_assignment
from phalanx.auto.planner.strategies import StrategyCatalog
from phalanx.auto.planner.unequal import UnequalRanks
from phalanx.auto.simulate.values import SimulatedStep
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.plan.rules.balance import check_balance
from phalanx.plan.value import Plan


def simulate_plan(
    plan: Plan,
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None = None,
    *,
    cluster: str | Cluster | None = None,
    optimizer: Optimizer | str = "adam",
    return_outputs: bool = True,
) -> SimulatedStep:
    """Return a step of a Plan, also of one edited by hand, event by event.

    Not collective, and needs no device of the cluster, as `auto_parallel`, whose other arguments these are.

    Args:
        plan: The Plan.
        model: A plain module.
        sample: One global batch.
        loss_fn: Takes the model's output and the target.
        cluster: What runs the Plan; this host when None.
        optimizer: The optimizer that trains the model, or its kind.
        return_outputs: Whether the loop keeps what the model returns, as after `out = model(x)`.

    Raises:
        ConfigError: If the model cannot be captured.
        PlanError: If the Plan is for another number of ranks, or says something that has no price.
    """
    named_cluster = read_cluster("here" if cluster is None else cluster)
    is_shared = plan.step.balance is not None and not named_cluster.is_uniform
    target = named_cluster.weakest()
    check_devices(plan, named_cluster if is_shared else target)
    captured = capture(model, sample, loss_fn)
    calls = list_module_calls(captured)
    layers, _ = read_layers(model, captured, calls, optimizer, return_outputs=return_outputs)
    dtype = next((rule.dtype for rule in plan.modules if not rule.match and rule.dtype), None)
    precision, batch = precision_of(dtype or parameter_dtype(captured)), batch_size_of(calls)
    assignment, layers = read_plan(plan, layers, batch_size=batch, per_node=target.nodes[0].devices)
    if is_shared:
        check_balance(plan)
        unequal = UnequalRanks(named_cluster, layers, precision, batch, memory=math.inf, replicas=plan.step.replicas)
        shared = unequal.candidate(replace(assignment.config, rows=1), StrategyCatalog(layers), plan.step.shares)
        if shared is not None and shared.work is not None and set(assignment.call_strategies) == {WHOLE}:
            return simulate_assignment(shared, shared.work, named_cluster.usd_per_hour)
        check_devices(plan, target)
    return simulate_assignment(assignment, LayerWork(layers, build_machine(target, precision)), target.usd_per_hour)


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise if a Plan is for another number of ranks than a cluster has devices.

    Raises:
        PlanError: Says both.
    """
    if cluster.devices != plan.world_size:
        raise PlanError(
            tr(
                "The Plan is for {ranks} ranks, and the cluster {cluster} has {devices} devices. Name another cluster.",
                ranks=plan.world_size,
                cluster=cluster,
                devices=cluster.devices,
            )
        )

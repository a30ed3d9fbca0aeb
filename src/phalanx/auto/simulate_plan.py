"""`px.simulate_plan`: simulate a training step of a model under a given Plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.auto.captured_model import batch_size_of, build_machine, parameter_dtype, precision_of, read_layers
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.planner.from_plan import read_plan
from phalanx.auto.planner.simulation import simulate_assignment
from phalanx.auto.simulate.values import SimulatedStep
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.plan.value import Plan


def simulate_plan(
    plan: Plan,
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None = None,
    *,
    cluster: str | Cluster | None = None,
    optimizer: Optimizer | str = "adam",
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

    Raises:
        ConfigError: If the model cannot be captured.
        PlanError: If the Plan is for another number of ranks, or says something that has no price.
    """
    target = read_cluster("here" if cluster is None else cluster).weakest()
    check_devices(plan, target)
    captured = capture(model, sample, loss_fn)
    calls = list_module_calls(captured)
    layers, _ = read_layers(model, captured, calls, optimizer)
    dtype = next((rule.dtype for rule in plan.modules if not rule.match and rule.dtype), None)
    machine = build_machine(target, precision_of(dtype or parameter_dtype(captured)))
    per_node = target.nodes[0].devices
    assignment, layers = read_plan(plan, layers, batch_size=batch_size_of(calls), per_node=per_node)
    return simulate_assignment(assignment, LayerWork(layers, machine), target.usd_per_hour)


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

"""`read_layers`: properties of a captured model for the planner: layers, batch size, precision, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.layers import Layers
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.capture.sequence_blocks import find_sequence_blocks
from phalanx.auto.cost.machine_model import (
    OPTIMIZER_STATES,
    MachineModel,
    build_datasheet_machine,
    build_measured_machine,
)
from phalanx.auto.planner.search_restrictions import find_partition_points_or_reason
from phalanx.auto.shape_check import find_shardable_layers
from phalanx.cluster.spec.cluster import Cluster
from phalanx.errors import ConfigError
from phalanx.i18n import tr
from phalanx.plan.sites import outermost
from phalanx.strategy import DistributedStrategy


def read_layers(
    model: nn.Module,
    captured: CapturedStep,
    calls: tuple[ModuleCall, ...],
    optimizer: Optimizer | str,
    *,
    return_outputs: bool = True,
) -> tuple[Layers, str | None]:
    """Return the layers of a captured model, as a planner places them, and why it is in no stages, if it cannot be."""
    partition_points, unstaged = find_partition_points_or_reason(model, captured, calls)
    sequence, sequence_obstacle = find_sequence_blocks(model, captured, calls)
    layers = Layers(
        captured=captured,
        calls=calls,
        shardable=find_shardable_layers(model),
        partition_points=partition_points,
        optimizer=_optimizer_kind(optimizer),
        return_outputs=return_outputs,
        blocks=outermost(path for group in captured.blocks for path in group),
        sequence=sequence,
        sequence_obstacle=sequence_obstacle,
    )
    return layers, unstaged


def build_machine(cluster: Cluster, precision: str) -> MachineModel:
    """Return the speed of a cluster: as measured where it was, else by its devices' data sheets."""
    if cluster.measured is not None:
        return build_measured_machine(cluster.measured.at(cluster.devices))
    return build_datasheet_machine(cluster, precision)


def step_precision(captured: CapturedStep, strategy: DistributedStrategy) -> str:
    """Return what products are computed in."""
    return precision_of(strategy.amp_dtype if strategy.amp else parameter_dtype(captured))


def precision_of(dtype: str) -> str:
    """Return the precision, as data sheets of devices call it, of products in a dtype."""
    return {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")


def parameter_dtype(captured: CapturedStep) -> str:
    """Return the dtype of the first parameter; float32 if there is none."""
    return next((param.dtype for param in captured.parameters), "float32")


def batch_size_of(calls: tuple[ModuleCall, ...]) -> int:
    """Return the samples of the global batch; 0 if no tensor of it is read."""
    shapes = (
        s.value.shape for call in calls for s in call.inputs if isinstance(s.source, str) and "sample" in s.source
    )
    return next((shape[0] for shape in shapes if shape), 0)


def _optimizer_kind(optimizer: Optimizer | str) -> str:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZER_STATES:
            raise ConfigError(
                tr(
                    "Asked for the optimizer {said!r}. Give {known}, or a torch optimizer.",
                    said=optimizer,
                    known=", ".join(OPTIMIZER_STATES),
                )
            )
        return optimizer
    group: Mapping[str, Any] = optimizer.param_groups[0]
    if "betas" in group:
        return "adam"
    return "momentum" if group.get("momentum") else "sgd"

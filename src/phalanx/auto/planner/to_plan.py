"""A candidate of the planner written as a Plan, by way of the strategy and the `px.shard` styles that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from phalanx.auto.capture.layers import PARTS, Layers, State, Way
from phalanx.auto.capture.operator_sites import parts_of
from phalanx.auto.cost.parallel_config import ScheduleKind
from phalanx.auto.planner.planner import Candidate
from phalanx.cluster.messages.messages import text
from phalanx.errors import PlanError
from phalanx.plan.rules.mesh import DATA_AXIS, MODEL_AXIS
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.plan.shape import ModelShape
from phalanx.plan.value import ModuleRule, OpRule, Plan, Reason, Shard
from phalanx.strategy import DistributedStrategy

_MODES: dict[ScheduleKind, Literal["1F1B", "Interleaved", "ZeroBubble"]] = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved",
    "zero_bubble": "ZeroBubble",
}

PLANNED = ("sharding", "pipeline", "tensor_parallel", "context_parallel", "recompute")
"""Techniques that the planner decides on."""


def written(candidate: Candidate, layers: Layers, base: DistributedStrategy | None = None) -> Plan:
    """Return the Plan of a candidate.

    Args:
        candidate: What the planner chose.
        layers: The model it chose for.
        base: Settings of everything that the planner does not decide; the defaults when None.

    Raises:
        PlanError: If the settings decide what the planner decides.
    """
    strategy = _strategy(candidate, layers, base or DistributedStrategy())
    plan = plan_from_strategy(strategy, ModelShape(layers.captured.parameters), candidate.arrangement.ranks)
    styled = tuple(_styled(candidate, layers))
    if styled:
        axis = MODEL_AXIS if candidate.arrangement.model > 1 else DATA_AXIS
        plan = with_cut_layers(plan, styled, axis)
    plan = _with_parts(plan, candidate, layers)
    said = Reason(
        setting=f"planner: {candidate.arrangement}",
        effect=f"predicted {candidate.seconds * 1e3:.4g} ms a step of {candidate.arrangement.rows} rows, "
        f"{candidate.peak / 2**20:.4g} MiB a rank",
    )
    return plan.model_copy(update={"because": (*plan.because, said)})


def check_base(base: DistributedStrategy) -> None:
    """Raise if settings decide what the planner decides.

    Raises:
        PlanError: Names the setting.
    """
    on = [name for name in PLANNED if getattr(base, name)] + (["hybrid_configs"] if base.hybrid_configs else [])
    if on:
        raise PlanError(text("strategy decides", name=on[0]))


def _strategy(candidate: Candidate, layers: Layers, base: DistributedStrategy) -> DistributedStrategy:
    check_base(base)
    at = candidate.arrangement
    strategy = base.model_copy(deep=True)
    degrees = {"sharding_degree" if at.zero else "dp_degree": at.data, "mp_degree": at.model, "pp_degree": at.stages}
    strategy.hybrid_configs = {name: size for name, size in degrees.items() if size > 1}  # type: ignore[assignment]
    if not at.model_inside:
        strategy.hybrid_configs["order"] = list(at.order)
    if at.zero:
        strategy.sharding = True
        strategy.sharding_configs = {"stage": at.zero}
    if at.stages > 1:
        strategy.pipeline = True
        strategy.pipeline_configs = {
            "schedule_mode": _MODES[at.schedule],
            "accumulate_steps": at.micro_batches,
            "virtual": at.virtual,
            "cuts": list(candidate.stages),
        }
    if at.recompute != "none":
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": list(layers.blocks), "selective": at.recompute == "selective"}
    return strategy


def _styled(candidate: Candidate, layers: Layers) -> Iterator[Styled]:
    kinds = {segment.path: segment.kind for segment in layers.segments if not segment.is_glue}
    names = {param.name for param in layers.captured.parameters}
    for path, way in candidate.ways.items():
        if way.style not in (None, "parts"):
            yield _layer(path, way, names)
        elif way.takes != "whole" and kinds.get(path) == "Dropout" and path in layers.may_be_cut:
            # It draws the mask of the whole and uses its part.
            yield Styled(module=path, style="sequence" if way.takes == "tokens" else "column", inputs=_DIMS[way.takes])


_DIMS: dict[State, int | None] = {"whole": None, "features": -1, "tokens": -2}


def _with_parts(plan: Plan, candidate: Candidate, layers: Layers) -> Plan:
    """Return a Plan in which modules in the way `parts` cut their inputs, and their operators leave outputs so."""
    modules, ops = list(plan.modules), list(plan.ops)
    for segment, way in zip(layers.segments, candidate.picked, strict=True):
        if way != PARTS:
            continue
        parts = parts_of(layers.captured, segment.operators, candidate.arrangement.model)
        assert parts is not None  # a way that is there can be taken
        modules.append(ModuleRule(match=segment.path, inputs={MODEL_AXIS: Shard(dim=parts.dim)}))
        for site, dims in parts.placed:
            ops.append(OpRule(site=str(site), outputs=tuple({MODEL_AXIS: Shard(dim=dim)} for dim in dims)))
    if not ops:
        return plan
    digest = layers.captured.digest()
    return plan.model_copy(update={"modules": tuple(modules), "ops": tuple(ops), "capture_digest": digest})


def _layer(path: str, way: Way, names: set[str]) -> Styled:
    assert way.style is not None
    assert way.style != "parts"
    inputs, outputs = _DIMS[way.takes], _DIMS[way.gives]
    if way.style == "sequence":
        own = tuple(sorted(name for name in names if name.rpartition(".")[0] == path))
        return Styled(module=path, style=way.style, others=own, inputs=inputs, outputs=outputs)
    bias = f"{path}.bias"
    return Styled(
        module=path,
        style=way.style,
        weight=f"{path}.weight",
        bias=bias if bias in names else None,
        inputs=inputs,
        outputs=outputs,
    )

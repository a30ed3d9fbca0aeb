"""`build_plan`: convert a planner candidate to a Plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from phalanx.auto.capture.layers import EXPERTS, PARTS, ActivationState, Layers, LayerStrategy
from phalanx.auto.capture.operator_sites import find_operator_parts
from phalanx.auto.cost.parallel_config import GroupKind, ParallelConfig
from phalanx.auto.planner.candidate import Candidate
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.plan.rules.mesh import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, MODEL_AXIS, SHARD_AXIS, STAGE_AXIS, batch_axes
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.plan.shape import ModelShape
from phalanx.plan.stages import cut_stages, units
from phalanx.plan.value import (
    AllReduce,
    Axis,
    ModuleRule,
    OpRule,
    ParamRule,
    Plan,
    Reason,
    ReduceScatter,
    Schedule,
    Shard,
)
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.techniques import TECHNIQUES, first_conflict

_AXES: dict[GroupKind, str] = {
    "dp": DATA_AXIS,
    "pp": STAGE_AXIS,
    "sharding": SHARD_AXIS,
    "ep": EXPERT_AXIS,
    "sep": CONTEXT_AXIS,
    "mp": MODEL_AXIS,
}

PLANNED_SETTINGS = ("sharding", "pipeline", "tensor_parallel", "context_parallel", "expert_parallel", "recompute")
"""Techniques that the planner decides on."""


def build_plan(candidate: Candidate, layers: Layers, base: DistributedStrategy | None = None) -> Plan:
    """Return the Plan of a candidate.

    Args:
        candidate: What the planner chose.
        layers: The model it chose for.
        base: Settings of everything that the planner does not decide; the defaults when None.

    Raises:
        PlanError: If the settings decide what the planner decides, or do not go together with it.
    """
    base = base or DistributedStrategy()
    check_base(base)
    _check_conflicts(base, candidate.config)
    shape = ModelShape(layers.captured.parameters)
    plan = _place(plan_from_strategy(base, shape, candidate.config.ranks), candidate, layers, shape)
    styled = tuple(_list_styled(candidate, layers))
    if styled:
        axis = MODEL_AXIS if candidate.config.model > 1 else DATA_AXIS
        plan = with_cut_layers(plan, styled, axis)
    if candidate.config.experts > 1:
        plan = with_cut_layers(plan, tuple(_list_dealt(candidate, layers)), EXPERT_AXIS)
    if candidate.config.context > 1:
        plan = with_cut_layers(plan, (_share_sequence(candidate.config, layers),), CONTEXT_AXIS)
    plan = _add_operator_rules(plan, candidate, layers)
    reason = Reason(
        setting=f"planner: {candidate.config}",
        effect=f"predicted {candidate.step_time_s * 1e3:.4g} ms a step of {candidate.config.batch_size} rows, "
        f"{candidate.memory_bytes / 2**20:.4g} MiB a rank",
    )
    return plan.model_copy(update={"because": (*plan.because, reason)})


def check_base(base: DistributedStrategy) -> None:
    """Raise if settings decide what the planner decides.

    Raises:
        PlanError: Names the setting.
    """
    on = [name for name in PLANNED_SETTINGS if getattr(base, name)] + (
        ["hybrid_configs"] if base.hybrid_configs else []
    )
    if on:
        raise PlanError(
            tr(
                "strategy.{name} sets what the planner is to decide. Remove it, or pass it as a limit, such as tp=2.",
                name=on[0],
            )
        )


def _check_conflicts(base: DistributedStrategy, config: ParallelConfig) -> None:
    """Raise if a technique of the base strategy does not go together with one that the planner chose."""
    planned = {
        "sharding": config.zero > 0,
        "pipeline": config.stages > 1,
        "tensor_parallel": config.model > 1,
        "expert_parallel": config.experts > 1,
        "context_parallel": config.context > 1,
        "recompute": config.recompute != "none",
    }
    conflict = first_conflict(base.techniques | {name for name, is_on in planned.items() if is_on})
    if conflict is not None:
        first, second, pair = conflict
        raise PlanError(
            tr(
                "strategy.{first} and {second}, of the Plan {config}, exclude each other: {why}. Turn the setting "
                "off, or limit the search.",
                first=first,
                second=second,
                config=config,
                why=pair.why,
            )
        )


def _place(plan: Plan, candidate: Candidate, layers: Layers, shape: ModelShape) -> Plan:
    """Return the Plan of the base strategy with the mesh, shards, stages and recomputation of a candidate."""
    config = candidate.config
    mesh = _build_mesh(config)
    world = plan.because[0].model_copy(update={"effect": f"each rank computes 1/{config.data} of every global batch"})
    return plan.model_copy(
        update={
            "mesh": mesh,
            "params": tuple(_shard(rule, config.zero) for rule in plan.params) if config.zero else plan.params,
            "modules": (*plan.modules, *_list_modules(candidate, layers, shape)),
            "schedule": Schedule(kind=config.schedule, microbatches=config.micro_batches, virtual=config.virtual),
            "step": plan.step.model_copy(update={"batch_axes": batch_axes(mesh), **_balance(candidate)}),
            "because": (world, *plan.because[1:], *_list_reasons(config), *_share_reasons(candidate)),
        }
    )


def _list_reasons(config: ParallelConfig) -> Iterator[Reason]:
    if config.zero:
        yield Reason(setting=f"zero={config.zero}", effect=TECHNIQUES["sharding"].effect)
    if config.stages > 1:
        yield Reason(setting=f"stages={config.stages}", effect=TECHNIQUES["pipeline"].effect)
    if config.recompute != "none":
        yield Reason(setting=f"recompute={config.recompute}", effect=TECHNIQUES["recompute"].effect)


def _balance(candidate: Candidate) -> dict[str, Any]:
    return {"balance": candidate.share_unit, "shares": candidate.shares} if candidate.shares else {}


def _share_reasons(candidate: Candidate) -> Iterator[Reason]:
    if candidate.shares:
        effect = f"faster ranks get more of each global batch, about {candidate.describe_shares()}"
        yield Reason(setting=f"balance={candidate.share_unit}", effect=effect)


def _build_mesh(config: ParallelConfig) -> tuple[Axis, ...]:
    axes = [Axis(name=_AXES[kind], size=size) for kind, size in config.sizes.items() if size > 1]
    return tuple(axes) or (Axis(name=DATA_AXIS, size=1),)


def _shard(rule: ParamRule, zero: Literal[1, 2, 3]) -> ParamRule:
    """Return a rule whose parameters are updated in slices, sent in the same dtype as before."""
    update = rule.update
    if not isinstance(update, AllReduce):
        return rule
    sharded = ReduceScatter(zero=zero, along=(SHARD_AXIS,), wire_dtype=update.wire_dtype, reduce=update.reduce)
    return rule.model_copy(update={"update": sharded})


def _list_modules(candidate: Candidate, layers: Layers, shape: ModelShape) -> Iterator[ModuleRule]:
    """Yield one rule for each module that is recomputed, gathered as a unit or assigned to a stage."""
    config = candidate.config
    settings: dict[str, dict[str, Any]] = {}
    if config.recompute != "none":
        for name in layers.blocks:
            settings.setdefault(name, {}).update(recompute=config.recompute)
    if config.zero:
        for name in units(shape):
            settings.setdefault(name, {}).update(unit=True)
    if config.stages > 1:
        for name, stage in cut_stages(shape, config.stages * config.virtual, candidate.stages).items():
            settings.setdefault(name, {}).update(stage=stage)
    return (ModuleRule(match=name, **values) for name, values in settings.items())


def _list_styled(candidate: Candidate, layers: Layers) -> Iterator[Styled]:
    kinds = {call.path: call.kind for call in layers.calls if not call.is_glue}
    names = {param.name for param in layers.captured.parameters}
    for path, strategy in candidate.strategies.items():
        if strategy.style not in (None, "parts", "expert"):
            yield _build_styled(path, strategy, names)
        elif strategy.input_state != "whole" and kinds.get(path) == "Dropout" and path in layers.shardable:
            # It draws the mask of the full activation and uses its part.
            yield Styled(
                module=path,
                style="sequence" if strategy.input_state == "tokens" else "column",
                inputs=_DIMS[strategy.input_state],
            )


def _list_dealt(candidate: Candidate, layers: Layers) -> Iterator[Styled]:
    for path, strategy in candidate.strategies.items():
        if strategy == EXPERTS:
            names = (param.name for param in layers.captured.parameters)
            stacked = tuple(name for name in names if name.rpartition(".")[0] == path)
            yield Styled(module=path, style="expert", experts=stacked)


def _share_sequence(config: ParallelConfig, layers: Layers) -> Styled:
    assert layers.sequence is not None
    names = tuple(param.name for param in layers.sequence.parameters)
    tokens = _DIMS["tokens"]
    return Styled(
        module=layers.sequence.path,
        style="context",
        others=names,
        inputs=tokens,
        outputs=tokens,
        attention=config.attention,
    )


_DIMS: dict[ActivationState, int | None] = {"whole": None, "features": -1, "tokens": -2}


def _add_operator_rules(plan: Plan, candidate: Candidate, layers: Layers) -> Plan:
    """Return a Plan that shards the inputs and outputs of modules with the strategy `parts`."""
    modules, ops = list(plan.modules), list(plan.ops)
    for call, strategy in zip(layers.calls, candidate.call_strategies, strict=True):
        if strategy != PARTS:
            continue
        parts = find_operator_parts(layers.captured, call.operators, candidate.config.model)
        assert parts is not None  # listed strategies can be applied
        modules.append(ModuleRule(match=call.path, inputs={MODEL_AXIS: Shard(dim=parts.dim)}))
        for site, dims in parts.placed:
            ops.append(OpRule(site=str(site), outputs=tuple({MODEL_AXIS: Shard(dim=dim)} for dim in dims)))
    if not ops:
        return plan
    digest = layers.captured.digest()
    return plan.model_copy(update={"modules": tuple(modules), "ops": tuple(ops), "capture_digest": digest})


def _build_styled(path: str, strategy: LayerStrategy, names: set[str]) -> Styled:
    assert strategy.style is not None
    assert strategy.style != "parts"
    inputs, outputs = _DIMS[strategy.input_state], _DIMS[strategy.output_state]
    if strategy.style == "sequence":
        own = tuple(sorted(name for name in names if name.rpartition(".")[0] == path))
        return Styled(module=path, style=strategy.style, others=own, inputs=inputs, outputs=outputs)
    bias = f"{path}.bias"
    return Styled(
        module=path,
        style=strategy.style,
        weight=f"{path}.weight",
        bias=bias if bias in names else None,
        inputs=inputs,
        outputs=outputs,
    )

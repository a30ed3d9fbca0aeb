"""`read_plan`: convert a Plan to an assignment; the inverse of `to_plan` (pure).

What the cost model has no price for is an error that names the field of the Plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from phalanx.auto.capture.layers import EXPERTS, PARTS, WHOLE, ActivationState, Layers, LayerStrategy
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.cost.parallel_config import ParallelConfig, Recompute
from phalanx.auto.planner.assignment import Assignment
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.plan.rules.mesh import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, MODEL_AXIS, SHARD_AXIS, STAGE_AXIS
from phalanx.plan.rules.recompute import recomputed_modules
from phalanx.plan.shape import ModelShape
from phalanx.plan.sites import regions
from phalanx.plan.stages import stage_of, units
from phalanx.plan.styles import ContextAttention
from phalanx.plan.value import (
    AllReduce,
    Average,
    Frozen,
    Layout,
    ModuleRule,
    OnRanks,
    Plan,
    Push,
    ReduceScatter,
    Shard,
    TopK,
    matches,
)

_STATES: dict[int, ActivationState] = {-1: "features", -2: "tokens"}

_AXES = (DATA_AXIS, STAGE_AXIS, SHARD_AXIS, EXPERT_AXIS, CONTEXT_AXIS, MODEL_AXIS)
"""Mesh axes that have a price, those whose ranks are furthest apart first."""

_FOLLOWING = (WHOLE, LayerStrategy(None, "features", "features"), LayerStrategy(None, "tokens", "tokens"))
"""Strategies of calls without a rule: they take activations as they arrive."""


def read_plan(plan: Plan, layers: Layers, *, batch_size: int, per_node: int) -> tuple[Assignment, Layers]:
    """Return what a Plan decides for a model, and the model with the blocks that the Plan recomputes.

    Args:
        plan: Any Plan of the model.
        layers: The model.
        batch_size: Samples of a global batch.
        per_node: Ranks of one node.

    Raises:
        PlanError: If the cost model has no price for something that the Plan says.
    """
    sizes = {axis.name: axis.size for axis in plan.mesh}
    for name in sizes.keys() - set(_AXES):
        raise _unpriced(f"mesh axis {name!r}")
    if plan.servers or plan.tables:
        raise _unpriced("servers and tables")
    if sizes.get(DATA_AXIS, 1) > 1 and sizes.get(SHARD_AXIS, 1) > 1:
        raise _unpriced(f"mesh axes {DATA_AXIS!r} and {SHARD_AXIS!r} together")
    stages = sizes.get(STAGE_AXIS, 1)
    schedule = plan.schedule
    if schedule.is_v or schedule.microbatch_rows is not None:
        raise _unpriced(f"schedule {schedule.model_dump(exclude_defaults=True)}")
    recompute, blocks = _read_recompute(plan, layers)
    update = _read_update(plan, layers)
    late = update if isinstance(update, Average | TopK) else None
    if late is not None and (stages > 1 or sizes.get(MODEL_AXIS, 1) > 1):
        raise _unpriced(f"params.update = {late.kind} together with mesh axes {STAGE_AXIS!r} and {MODEL_AXIS!r}")
    experts, zero = _read_expert_degree(plan, layers), update.zero if isinstance(update, ReduceScatter) else 0
    if experts > 1 and (stages > 1 or zero or late is not None):
        raise _unpriced(f"style 'expert' together with stages or params.update = {update.kind}")
    context, attention = _read_context(plan, layers)
    if context > 1 and (stages > 1 or experts > 1 or late is not None or sizes.get(MODEL_AXIS, 1) > 1):
        raise _unpriced("style 'context' together with other layers that are cut, stages, or late updates")
    config = ParallelConfig(
        context=context,
        attention=attention,
        data=math.prod(sizes.get(axis, 1) for axis in (DATA_AXIS, SHARD_AXIS, EXPERT_AXIS)),
        experts=experts,
        model=sizes.get(MODEL_AXIS, 1),
        zero=zero,
        recompute=recompute,
        stages=stages,
        virtual=schedule.virtual if stages > 1 else 1,
        micro_batches=schedule.microbatches if stages > 1 else 1,
        zero_bubble=schedule.kind == "zero_bubble",
        gpipe=schedule.kind == "gpipe",
        update=late,
        model_inside=_is_model_inside(plan),
        per_node=per_node,
        batch_size=batch_size,
    )
    starts = _read_stages(plan, layers) if stages > 1 else ()
    strategies = _read_strategies(plan, layers, config)
    return Assignment(config=config, call_strategies=strategies, stages=starts), replace(layers, blocks=blocks)


def _unpriced(what: str) -> PlanError:
    return PlanError(
        tr(
            "This Plan cannot be simulated: the cost model has no price for {what}. Leave it out of the Plan.",
            what=what,
        )
    )


def _read_update(plan: Plan, layers: Layers) -> AllReduce | ReduceScatter | Average | TopK:
    """Return how parameters are updated, which is the same for all of them."""
    updates: dict[object, AllReduce | ReduceScatter | Average | TopK] = {}
    for param in layers.captured.parameters:
        rule = plan.rule_for(param.name)
        update = rule.update
        if isinstance(update, Frozen) or not param.trainable:
            continue
        if isinstance(update, Push) or not isinstance(rule.place, OnRanks):
            raise _unpriced(f"params[{rule.match}].update = {update.kind}")
        if isinstance(update, Average) and update.adaptive:
            raise _unpriced(f"params[{rule.match}].update = {update.kind} that is adaptive")
        alike = "all_reduce" if isinstance(update, AllReduce) else update
        updates.setdefault(update.zero if isinstance(update, ReduceScatter) else alike, update)
    if len(updates) > 1:
        kinds = sorted(f"{u.kind} zero={u.zero}" if isinstance(u, ReduceScatter) else u.kind for u in updates.values())
        raise _unpriced(f"params.update of several kinds ({', '.join(kinds)})")
    return next(iter(updates.values()), AllReduce())


def _read_recompute(plan: Plan, layers: Layers) -> tuple[Recompute, tuple[str, ...]]:
    """Return how modules are recomputed, which is the same for all of them, and which."""
    modules = ((path, kind in ("ModuleList", "ModuleDict")) for path, kind in layers.captured.modules)
    rules = recomputed_modules(plan.modules, modules)
    kinds = {rule.recompute for rule in rules.values()}
    if len(kinds) > 1:
        raise _unpriced(f"modules.recompute of several kinds ({', '.join(sorted(kinds))})")
    return (kinds.pop(), tuple(rules)) if kinds else ("none", layers.blocks)


def _read_expert_degree(plan: Plan, layers: Layers) -> int:
    """Return how many ranks hold one copy of the experts together."""
    styled = (rule for rule in plan.modules if rule.style == "expert")
    paths = {call.path for rule in styled for call in layers.calls if matches(rule.match, call.path)}
    names = (param.name for param in layers.captured.parameters if param.name.rpartition(".")[0] in paths)
    locations = (plan.rule_for(name).place for name in names)
    layouts = (location.layout for location in locations if isinstance(location, OnRanks))
    axes = {axis for layout in layouts for axis, placed in layout.items() if isinstance(placed, Shard)}
    sizes = {axis.name: axis.size for axis in plan.mesh}
    if axes - {EXPERT_AXIS} and (axes != {DATA_AXIS} or sizes.get(EXPERT_AXIS, 1) > 1):
        raise _unpriced(f"style 'expert' along mesh axes {', '.join(sorted(axes))}")
    return math.prod(sizes[axis] for axis in axes)


def _read_context(plan: Plan, layers: Layers) -> tuple[int, ContextAttention]:
    """Return how many ranks share a sequence, and how keys and values reach them."""
    size = next((axis.size for axis in plan.mesh if axis.name == CONTEXT_AXIS), 1)
    rules = [rule for rule in plan.modules if rule.style == "context"]
    if size == 1:
        return 1, "all_gather"
    blocks = layers.sequence
    if blocks is None:
        raise _unpriced(f"mesh axis {CONTEXT_AXIS!r}: {layers.sequence_obstacle}")
    inputs = {CONTEXT_AXIS: Shard(dim=-2)}
    wrong = next((rule for rule in rules if rule.match != blocks.path or rule.inputs != inputs), None)
    if wrong is not None or len(rules) != 1:
        raise _unpriced(f"style 'context' of {wrong.match if wrong else 'several modules'!r} but {blocks.path!r}")
    if blocks.tokens % size:
        raise _unpriced(f"sequences of {blocks.tokens} over {size} ranks")
    return size, rules[0].attention


def _is_model_inside(plan: Plan) -> bool:
    order = [axis.name for axis in plan.mesh if axis.size > 1]
    if order == [name for name in _AXES if name in order]:
        return True
    if order == [name for name in (MODEL_AXIS, SHARD_AXIS, DATA_AXIS, STAGE_AXIS, EXPERT_AXIS) if name in order]:
        return False
    raise _unpriced(f"mesh axes in the order {', '.join(order)}")


def _read_stages(plan: Plan, layers: Layers) -> tuple[str, ...]:
    """Return the units that stages begin with, all of which may begin one."""
    names = units(ModelShape(layers.captured.parameters))
    stages = [stage_of(plan, name) for name in names]
    starts = [name for name, stage, before in zip(names[1:], stages[1:], stages, strict=False) if stage != before]
    possible = () if layers.partition_points is None else layers.partition_points.starts
    wrong = next((name for name in starts if name not in possible), None)
    if wrong is not None or [stage_of(plan, name) for name in starts] != list(range(1, len(starts) + 1)):
        raise _unpriced(f"modules.stage: a stage that begins with {wrong or starts}")
    return tuple(starts)


def _read_strategies(plan: Plan, layers: Layers, config: ParallelConfig) -> tuple[LayerStrategy, ...]:
    rules = [rule for rule in plan.modules if rule.style or rule.inputs]
    if config.context > 1:  # read already
        rules = [rule for rule in rules if rule.style != "context"]
    axis = MODEL_AXIS if config.model > 1 else DATA_AXIS
    in_parts = regions(plan)
    strategies: list[LayerStrategy] = []
    for call in layers.calls:
        own = None if call.is_glue else next((r for r in reversed(rules) if matches(r.match, call.path)), None)
        tried = _FOLLOWING if own is None else (_read_rule(own, call, axis, in_parts),)
        fitting = (strategy for strategy in tried if _fits(strategy, call, strategies))
        strategy = next(fitting, None)
        if strategy is None:
            states = {str(strategies[s.source].output_state) for s in call.inputs if isinstance(s.source, int)}
            raise _unpriced(f"activations that arrive {', '.join(sorted(states))} at {call.path or call.kind!r}")
        strategies.append(strategy)
    return tuple(strategies)


def _read_rule(rule: ModuleRule, call: ModuleCall, axis: str, in_parts: Iterable[str]) -> LayerStrategy:
    takes, returns = _read_state(rule, rule.inputs, axis), _read_state(rule, rule.outputs, axis)
    if rule.style is None and call.path in in_parts:
        return PARTS
    if rule.style == "expert" and call.experts is not None:
        return EXPERTS
    if rule.style in (None, "context", "expert"):
        raise _unpriced(f"modules[{rule.match}]")
    if call.kind == "Dropout":
        return LayerStrategy(None, takes, takes)
    return LayerStrategy(rule.style, takes, returns)


def _read_state(rule: ModuleRule, layout: Layout | None, axis: str) -> ActivationState:
    placed = (layout or {}).get(axis)
    if not isinstance(placed, Shard) or rule.style is None:
        return "whole"
    if placed.dim not in _STATES:
        raise _unpriced(f"modules[{rule.match}] with activations sharded along dim {placed.dim}")
    return _STATES[placed.dim]


def _fits(strategy: LayerStrategy, call: ModuleCall, before: list[LayerStrategy]) -> bool:
    """Return whether a call takes its inputs in the state in which earlier calls leave them."""
    sources = ((source, before[source.source]) for source in call.inputs if isinstance(source.source, int))
    return all(maker.output_state == strategy.input_state_of(source) for source, maker in sources)

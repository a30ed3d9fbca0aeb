"""`with_cut_layers`: rules for tensor parallel: add sharded layers to a Plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.errors import PlanError, did_you_mean
from phalanx.plan.rules.mesh import DATA_AXIS, EXPERT_AXIS, MODEL_AXIS
from phalanx.plan.styles import STYLES, ContextAttention, StyleName, weight_dim
from phalanx.plan.value import (
    Average,
    Axis,
    Frozen,
    Layout,
    ModuleRule,
    OnRanks,
    ParamRule,
    Plan,
    Push,
    Reason,
    Shard,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Styled:
    """One module, and how it is to be computed by several ranks."""

    module: str
    style: StyleName
    weight: str | None = None
    """Plain name of the weight that is cut."""

    bias: str | None = None
    others: tuple[str, ...] = ()
    """Plain names of parameters that stay whole, of a module that works on a part of an activation."""

    experts: tuple[str, ...] = ()
    """Plain names of the parameters that stack its experts along dim 0."""

    inputs: int | None = None
    """Dim along which its input is sharded; replicated when None."""

    outputs: int | None = None
    """Dim along which its output is sharded; replicated when None."""

    attention: ContextAttention = "all_gather"
    """Of style `context`: how keys and values reach other ranks."""


def with_cut_layers(plan: Plan, styled: Sequence[Styled], axis: str, size: int | None = None) -> Plan:
    """Return a Plan in which these layers are sharded along a mesh axis. Pure.

    Args:
        plan: A Plan; the ranks of a missing axis are taken from its data axis.
        styled: The modules.
        axis: Name of the axis. One along which rows are split makes layers gather rows (hybrid).
        size: Ranks along the axis, when the mesh has none of that name; all of the data axis when None.

    Raises:
        PlanError: If the mesh cannot have such an axis, hybrid layers cannot have a style, or a parameter is updated in
            a way in which slices are not.
    """
    plan = _with_axis(plan, axis, size, carries_rows=any(layer.experts for layer in styled))
    if plan.axis_size(axis) == 1:
        return plan
    is_hybrid = axis in plan.step.batch_axes
    if is_hybrid:
        _check_hybrid(styled, axis)
        styled = [
            layer for layer in styled if layer.weight is not None or layer.experts
        ]  # a dropout between layers sees a rank's own rows
    modules = tuple(
        ModuleRule(
            match=layer.module,
            style=layer.style,
            inputs=_layout(axis, None if is_hybrid else layer.inputs),
            outputs=_layout(axis, None if is_hybrid else layer.outputs),
            attention=layer.attention,
        )
        for layer in styled
        if weight_dim(layer.style) is None or not layer.others  # such a module computes what it did
    )
    params = (rule for layer in styled for rule in _param_rules(plan, layer, axis))
    names = ", ".join(f"{layer.module or 'the model'} ({layer.style})" for layer in styled[:4])
    more = f" and {len(styled) - 4} more" if len(styled) > 4 else ""
    how = "each gathers the samples of all ranks" if is_hybrid else "their ranks read the same samples"
    if any(layer.experts for layer in styled):
        how = "each rank holds some experts, and tokens travel to theirs"
    reason = Reason(
        setting=f"px.shard over {axis}={plan.axis_size(axis)}", effect=f"{names}{more} are sharded over ranks; {how}"
    )
    return plan.model_copy(
        update={
            "params": (*plan.params, *params),
            "modules": (*plan.modules, *modules),
            "because": (*plan.because, reason),
        }
    )


def _with_axis(plan: Plan, axis: str, size: int | None, *, carries_rows: bool) -> Plan:
    axis_sizes = {a.name: a.size for a in plan.mesh}
    if axis in axis_sizes:
        if size not in (None, axis_sizes[axis]):
            raise PlanError(
                f"px.shard asks for {size} ranks along {axis!r}, but the mesh has {axis}={axis_sizes[axis]}. Leave "
                "size out, or change the mesh."
            )
        return plan
    data = axis_sizes.get(DATA_AXIS, 1)
    if size is None and plan.world_size > 1 and axis not in (MODEL_AXIS, EXPERT_AXIS):
        hint = did_you_mean(axis, {*axis_sizes, MODEL_AXIS})
        raise PlanError(
            f"px.shard asks for axis {axis!r}, and the mesh has {', '.join(axis_sizes)}.{hint} A custom axis needs "
            "size=, the ranks along it."
        )
    if carries_rows and data == 1 and plan.world_size > 1 and size != 1:
        mesh = " x ".join(f"{name}={count}" for name, count in axis_sizes.items())
        raise PlanError(
            f"px.shard deals experts to the ranks of axis {DATA_AXIS!r}, and the mesh ({mesh}) leaves one. Turn "
            "sharding or the pipeline off, or give them fewer ranks."
        )
    size = size or data
    if plan.world_size == 1:
        size = 1
    if data % size:
        raise PlanError(
            f"px.shard asks for {size} ranks along {axis!r}, which do not divide the {data} ranks of axis "
            f"{DATA_AXIS!r}. Launch with a multiple of {size}, or choose another size.{did_you_mean(axis, axis_sizes)}"
        )
    sizes = [Axis(name=a.name, size=a.size // size if a.name == DATA_AXIS else a.size) for a in plan.mesh]
    rows = (*plan.step.batch_axes, axis) if carries_rows else plan.step.batch_axes
    step = plan.step.model_copy(update={"batch_axes": rows})
    return plan.model_copy(update={"mesh": (*sizes, Axis(name=axis, size=size)), "step": step})


def _check_hybrid(styled: Sequence[Styled], axis: str) -> None:
    for layer in styled:
        if not STYLES[layer.style].gathers_samples and not layer.experts:
            raise PlanError(
                f"module {layer.module!r} has style {layer.style!r}, which needs ranks that read the same samples, but "
                f'samples are split along {axis!r}. Use another axis: px.shard(..., axis="model").'
            )


def _param_rules(plan: Plan, layer: Styled, axis: str) -> Iterator[ParamRule]:
    dim, summed = weight_dim(layer.style), layer.others
    if layer.weight is not None and dim is not None:
        yield _shard_rule(plan, layer.weight, axis, dim)
    if layer.bias is not None and dim == 0:
        yield _shard_rule(plan, layer.bias, axis, dim)
    elif layer.bias is not None and layer.outputs is not None:
        summed = (layer.bias,)
    for name in layer.experts:
        yield _shard_rule(plan, name, axis, 0)
    for name in summed:
        yield _summed_rule(plan, name, axis)


def _shard_rule(plan: Plan, name: str, axis: str, dim: int) -> ParamRule:
    rule = plan.rule_for(name)
    if not isinstance(rule.place, OnRanks) or isinstance(rule.update, (Push, Average)):
        raise PlanError(
            f"parameter {name!r} is to be cut over ranks, but it lives {_where(rule)}. Leave the layer out of "
            "px.shard, or change the strategy."
        )
    layout = {**rule.place.layout, axis: Shard(dim=dim)}
    return rule.model_copy(update={"match": name, "place": OnRanks(layout=layout), "managed": "module"})


def _where(rule: ParamRule) -> str:
    return "on servers" if not isinstance(rule.place, OnRanks) else f"with update {rule.update.kind!r}"


def _summed_rule(plan: Plan, name: str, axis: str) -> ParamRule:
    """Return the rule of a whole parameter that each rank uses for a part of the sequence: terms are added."""
    rule = plan.rule_for(name)
    if isinstance(rule.update, Frozen):
        return rule.model_copy(update={"match": name})
    update = rule.update.model_copy(update={"axes": (*plan.step.batch_axes, axis)})
    return rule.model_copy(update={"match": name, "update": update})


def _layout(axis: str, dim: int | None) -> Layout | None:
    return None if dim is None else {axis: Shard(dim=dim)}

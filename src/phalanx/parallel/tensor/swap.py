"""Cut the layers that a Plan gives a style, in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm.groups import Group
from phalanx.errors import PlanError
from phalanx.parallel.describe import is_module_held
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.cut import Cut, even_sizes, hold
from phalanx.parallel.tensor.dropout import CutDropout
from phalanx.parallel.tensor.linear import ColumnLinear, RowLinear
from phalanx.parallel.tensor.rows import ModelParallelLinear, RowwiseLinear
from phalanx.parallel.tensor.vocab import VocabEmbedding
from phalanx.plan.tensor_rules import CUT_DIM
from phalanx.plan.value import Layout, ModuleRule, OnRanks, Plan, Shard, matches

_SAME_ROWS: dict[tuple[type[nn.Module], str], type[nn.Module]] = {
    (nn.Linear, "column"): ColumnLinear,
    (nn.Linear, "row"): RowLinear,
    (nn.Linear, "vocab"): ColumnLinear,
    (nn.Embedding, "vocab"): VocabEmbedding,
    (nn.Dropout, "column"): CutDropout,
    (nn.Dropout, "sequence"): CutDropout,
}
"""What a module becomes where ranks read the same rows."""

_OWN_ROWS: dict[tuple[type[nn.Module], str], type[nn.Module]] = {
    (nn.Linear, "column"): ModelParallelLinear,
    (nn.Linear, "row"): RowwiseLinear,
}
"""What it becomes where ranks read rows of their own."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """One module with a style, and what becomes of it."""

    name: str
    module: nn.Module
    rule: ModuleRule
    axis: str
    """Mesh axis along which it is cut."""

    shards: tuple[tuple[str, Shard], ...]
    """Its own parameters that are cut, and how."""


def check_styles(plan: Plan, model: nn.Module) -> None:
    """Raise unless every module can have the style that the Plan gives it. Not collective.

    Raises:
        PlanError: Names the first module or parameter that does not fit, and what would.
    """
    planned = list(_planned(plan, model))
    cut = {one.name: {own for own, _ in one.shards} for one in planned}
    for one in planned:
        _check_fit(plan, one)
    names = {id(param): name for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            rule = plan.rule_for(names[id(param)])
            is_cut = isinstance(rule.place, OnRanks) and any(isinstance(p, Shard) for p in rule.place.layout.values())
            if is_cut and rule.managed == "module" and not is_module_held(param) and own not in cut.get(name, ()):
                raise PlanError(
                    f"the Plan cuts parameter {names[id(param)]!r}, which module {name!r} ({type(module).__name__}) "
                    "uses whole. Give that module a style too, or cut neither."
                )


def cut_layers(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Give each module with a style its layer. Collective over all ranks of the job.

    Parameters are equal on all ranks before; each rank keeps its slice, in place. Where ranks read the same rows, their
    default random streams become that of the first of them, so that they drop the same of whole activations.
    """
    held: dict[int, Cut] = {}
    sharing: dict[str, Group] = {}
    for one in _planned(plan, model):
        ranks = mesh.size((one.axis,))
        if ranks == 1:
            continue
        whole = Cut(mesh.group((one.axis,)), mesh.index((one.axis,)), ())
        cuts = {name: _hold(one.module, name, shard, whole, ranks, held) for name, shard in one.shards}
        _become(plan, one, cuts.get("weight", whole))
        if one.axis not in plan.step.batch_axes:
            sharing[one.axis] = whole.group
    for group in sharing.values():
        _share_random_stream(group, mesh.device_type)


def _planned(plan: Plan, model: nn.Module) -> Iterator[_Planned]:
    """Yield the modules with a style; those that a glob reaches and that cannot have it are left out."""
    names = {id(param): name for name, param in model.named_parameters()}
    rules = [rule for rule in plan.modules if rule.style is not None]
    for name, module in model.named_modules():
        rule = next((rule for rule in reversed(rules) if matches(rule.match, name)), None)
        if rule is None or (rule.match != name and not _knows(module, rule)):
            continue
        shards = tuple(
            (own, shard)
            for own, param in module.named_parameters(recurse=False)
            if (shard := _shard_of(plan, names[id(param)])) and rule.style != "sequence"
        )
        axis = _axis_of(plan, rule, [names[id(param)] for param in module.parameters(recurse=False)])
        if axis is not None:
            yield _Planned(name, module, rule, axis, shards)
        elif rule.match == name:
            raise PlanError(_without_axis(name, module, rule))


def _knows(module: nn.Module, rule: ModuleRule) -> bool:
    return rule.style == "sequence" or (type(module), rule.style) in _SAME_ROWS


def _shard_of(plan: Plan, name: str) -> Shard | None:
    """Return how the Plan cuts a parameter that its layer holds."""
    rule = plan.rule_for(name)
    if rule.managed != "module" or not isinstance(rule.place, OnRanks):
        return None
    return next((placed for placed in rule.place.layout.values() if isinstance(placed, Shard)), None)


def _axis_of(plan: Plan, rule: ModuleRule, params: list[str]) -> str | None:
    """Return the axis along which a module's weight is cut, or else its input."""
    for name in params if rule.style != "sequence" else ():
        place = plan.rule_for(name).place
        if _shard_of(plan, name) and isinstance(place, OnRanks):
            return next(axis for axis, placed in place.layout.items() if isinstance(placed, Shard))
    return next((axis for axis, placed in (rule.inputs or {}).items() if isinstance(placed, Shard)), None)


def _without_axis(name: str, module: nn.Module, rule: ModuleRule) -> str:
    if rule.style in CUT_DIM and isinstance(module, nn.Linear | nn.Embedding):
        return (
            f"modules[{name}] has style {rule.style!r}, but no rule says along which axis its weight is cut. Add "
            f'ParamRule(match="{name}.weight", place=OnRanks(layout={{axis: Shard(dim={CUT_DIM[rule.style]})}}), '
            'managed="module").'
        )
    return (
        f"modules[{name}] has style {rule.style!r}, but does not say along which axis its input is cut. Add "
        "inputs={axis: Shard(dim=...)} to the rule."
    )


def _check_fit(plan: Plan, one: _Planned) -> None:
    style, kinds = one.rule.style, _OWN_ROWS if one.axis in plan.step.batch_axes else _SAME_ROWS
    if style != "sequence" and (type(one.module), style) not in kinds:
        known = ", ".join(sorted({kind.__name__ for kind, named in kinds if named == style})) or "nothing"
        form = f"along {one.axis!r}, where ranks read {'rows of their own' if kinds is _OWN_ROWS else 'the same rows'}"
        raise PlanError(
            f"modules[{one.name}] has style {style!r} {form}, and is a {type(one.module).__name__}. There it is for "
            f"{known} itself; subclasses may compute something else."
        )
    others = [a.name for a in plan.mesh if a.name in plan.step.batch_axes and a.size > 1 and a.name != one.axis]
    if kinds is _OWN_ROWS and others:
        raise PlanError(
            f"modules[{one.name}] gathers rows along {one.axis!r}, and rows are split along {', '.join(others)} too. "
            "Split rows along one axis, or cut the layer along an axis whose ranks read the same rows."
        )
    for own, shard in one.shards:
        param = one.module.get_parameter(own)
        wanted = CUT_DIM[style or ""] if own == "weight" else 0
        if style == "row" and own == "bias":
            raise PlanError(
                f"params[{one.name}.bias] is cut, but a row-parallel layer adds its bias whole. Replicate it."
            )
        if shard.dim % param.dim() != wanted:
            raise PlanError(
                f"params[{one.name}.{own}] is cut along dim {shard.dim}; style {style!r} needs dim {wanted}. Correct "
                "one."
            )
        if shard.sizes is not None and (
            len(shard.sizes) != plan.axis_size(one.axis) or sum(shard.sizes) != param.shape[wanted]
        ):
            raise PlanError(
                f"params[{one.name}.{own}] has sizes {shard.sizes}, which are not {plan.axis_size(one.axis)} that "
                f"add up to {param.shape[wanted]}. Correct them, or leave them out for an even cut."
            )
    _check_embedding(one)


def _check_embedding(one: _Planned) -> None:
    if isinstance(one.module, nn.Embedding) and one.rule.style == "vocab":
        unfit = [word for word in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(one.module, word)]
        if unfit:
            raise PlanError(
                f"modules[{one.name}] is an embedding with {unfit[0]}, which needs all of its rows on one rank. Leave "
                f"{unfit[0]} or the style out."
            )


def _hold(module: nn.Module, name: str, shard: Shard, whole: Cut, ranks: int, held: dict[int, Cut]) -> Cut:
    """Cut a parameter of a module, unless another module shares it and did."""
    param = module.get_parameter(name)
    if id(param) not in held:
        cut = Cut(whole.group, whole.index, shard.sizes or even_sizes(param.shape[shard.dim], ranks))
        hold(param, shard.dim, cut)
        held[id(param)] = cut
    return held[id(param)]


def _become(plan: Plan, one: _Planned, cut: Cut) -> None:
    """Give a module its new class; hooks, training mode and identity stay."""
    kinds = _OWN_ROWS if one.axis in plan.step.batch_axes else _SAME_ROWS
    kind = kinds.get((type(one.module), one.rule.style or ""))
    if kind is None:
        return
    module, inputs, outputs = one.module, _dim(one.rule.inputs, one.axis), _dim(one.rule.outputs, one.axis)
    module.__class__ = kind
    setattr(module, "cut", cut)  # noqa: B010 (torch types the attributes of a module as tensors)
    if isinstance(module, ColumnLinear | RowLinear):
        module.inputs, module.outputs = inputs, outputs
    elif isinstance(module, VocabEmbedding):
        module.outputs = outputs
    elif isinstance(module, CutDropout):
        assert inputs is not None
        module.dim = inputs


def _dim(layout: Layout | None, axis: str) -> int | None:
    placed = (layout or {}).get(axis)
    return placed.dim if isinstance(placed, Shard) else None


def _share_random_stream(group: Group, device_type: str) -> None:
    """Give all ranks of a group the random stream of the first of them."""
    state = torch.get_rng_state()
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state)
    if device_type == "cuda":
        on_card = torch.cuda.get_rng_state()
        moved = on_card.cuda()
        dist.broadcast(moved, group=group, group_src=0)
        torch.cuda.set_rng_state(moved.cpu())

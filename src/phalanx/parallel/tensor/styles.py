"""`check_styles`: the tensor-parallel layer of each (layer class, style), and whether a module supports its style."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from phalanx.errors import PlanError
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.tensor.context.shard import check_context
from phalanx.parallel.tensor.expert_modules import EXPERTS_KIND, holds_experts
from phalanx.parallel.tensor.layers.dropout import ShardedDropout
from phalanx.parallel.tensor.layers.gathered_linear import GatheredRowLinear, ModelParallelLinear
from phalanx.parallel.tensor.layers.linear import ColumnLinear, RowLinear
from phalanx.parallel.tensor.layers.vocab import VocabEmbedding
from phalanx.parallel.tensor.shard_spec import ShardSpec, even_sizes
from phalanx.plan.styles import STYLES, ParallelStyle, weight_dim
from phalanx.plan.value import AllReduce, Frozen, ModuleRule, OnRanks, Plan, Shard, matches

LayerTypes = dict[tuple[type[nn.Module], str], type[nn.Module]]

_LAYERS: LayerTypes = {
    (nn.Linear, "column"): ColumnLinear,
    (nn.Linear, "row"): RowLinear,
    (nn.Linear, "vocab"): ColumnLinear,
    (nn.Embedding, "vocab"): VocabEmbedding,
    (nn.Dropout, "column"): ShardedDropout,
    (nn.Dropout, "sequence"): ShardedDropout,
}
"""The `ShardedLayer` of each layer and style where ranks read the same samples."""

_GATHERED_LAYERS: LayerTypes = {
    (nn.Linear, "column"): ModelParallelLinear,
    (nn.Linear, "row"): GatheredRowLinear,
}
"""That where ranks read samples of their own (`ParallelStyle.gathers_samples`)."""


class ShardedLayer(Protocol):
    """A layer that computes a style; a plain layer becomes it in place, so it has no `__init__` of its own."""

    spec: ShardSpec
    """This rank's shard of the weight; of layers without one, the group alone."""

    def configure(self, path: str, inputs: int | None, outputs: int | None) -> None:
        """Take the layer's name in the model, and the dims along which inputs and outputs are sharded."""


@dataclass(frozen=True, slots=True)
class StyledModule:
    """One module with a style."""

    name: str
    module: nn.Module
    rule: ModuleRule
    axis: str
    """Mesh axis along which it is cut."""

    shards: tuple[tuple[str, Shard], ...]
    """Its own parameters that are cut, and how."""

    @property
    def style(self) -> ParallelStyle:
        """The style of its rule."""
        assert self.rule.style is not None
        return STYLES[self.rule.style]


def check_styles(plan: Plan, model: nn.Module) -> None:
    """Raise unless every module can have the style that the Plan gives it. Not collective.

    Raises:
        PlanError: Names the first module or parameter that does not fit, and what would.
    """
    planned = list(planned_modules(plan, model))
    sharded = {styled.name: {own for own, _ in styled.shards} for styled in planned}
    for styled in planned:
        _check_experts(plan, styled) if styled.style.shards_experts else _check_kind(plan, styled)
        _check_shards(plan, styled)
        _check_embedding(styled)
    _check_axes(planned)
    check_context(model, [(styled.name, styled.module) for styled in planned if styled.style.spans_attention])
    names = {id(param): name for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            rule = plan.rule_for(names[id(param)])
            is_cut = isinstance(rule.place, OnRanks) and any(isinstance(p, Shard) for p in rule.place.layout.values())
            if is_cut and rule.managed == "module" and not is_module_held(param) and own not in sharded.get(name, ()):
                raise PlanError(
                    f"the Plan cuts parameter {names[id(param)]!r}, which module {name!r} ({type(module).__name__}) "
                    "uses whole. Give that module a style too, or cut neither."
                )


def planned_modules(plan: Plan, model: nn.Module) -> Iterator[StyledModule]:
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
            if weight_dim(rule.style) is not None and (shard := _shard_of(plan, names[id(param)]))
        )
        axis = _axis_of(plan, rule, [names[id(param)] for param in module.parameters(recurse=False)])
        if axis is not None:
            yield StyledModule(name, module, rule, axis, shards)
        elif rule.match == name:
            raise PlanError(_without_axis(name, module, rule))


def _knows(module: nn.Module, rule: ModuleRule) -> bool:
    if rule.style is not None and STYLES[rule.style].shards_experts:
        return holds_experts(module)
    return weight_dim(rule.style) is None or (type(module), rule.style) in _LAYERS


def _shard_of(plan: Plan, name: str) -> Shard | None:
    """Return how the Plan cuts a parameter that its layer holds."""
    rule = plan.rule_for(name)
    if rule.managed != "module" or not isinstance(rule.place, OnRanks):
        return None
    return next((placed for placed in rule.place.layout.values() if isinstance(placed, Shard)), None)


def _axis_of(plan: Plan, rule: ModuleRule, params: list[str]) -> str | None:
    """Return the axis along which a module's weight is cut, or else its input."""
    for name in params if weight_dim(rule.style) is not None else ():
        location = plan.rule_for(name).place
        if _shard_of(plan, name) and isinstance(location, OnRanks):
            return next(axis for axis, placed in location.layout.items() if isinstance(placed, Shard))
    return next((axis for axis, placed in (rule.inputs or {}).items() if isinstance(placed, Shard)), None)


def _without_axis(name: str, module: nn.Module, rule: ModuleRule) -> str:
    dim = weight_dim(rule.style)
    if rule.style is not None and STYLES[rule.style].shards_experts:
        return (
            f"modules[{name}] has style {rule.style!r}, but no rule says along which axis its experts are dealt to "
            f'ranks. Add ParamRule(match="{name}.*", place=OnRanks(layout={{axis: Shard(dim={dim})}}), '
            'managed="module").'
        )
    if dim is not None and isinstance(module, nn.Linear | nn.Embedding):
        return (
            f"modules[{name}] has style {rule.style!r}, but no rule says along which axis its weight is cut. Add "
            f'ParamRule(match="{name}.weight", place=OnRanks(layout={{axis: Shard(dim={dim})}}), '
            'managed="module").'
        )
    return (
        f"modules[{name}] has style {rule.style!r}, but does not say along which axis its input is cut. Add "
        "inputs={axis: Shard(dim=...)} to the rule."
    )


def _check_kind(plan: Plan, styled: StyledModule) -> None:
    style, layers = styled.style, layer_types(plan, styled)
    is_gathered = layers is _GATHERED_LAYERS
    if style.weight_dim is not None and (type(styled.module), style.name) not in layers:
        supported = ", ".join(sorted({kind.__name__ for kind, name in layers if name == style.name})) or "nothing"
        form = f"along {styled.axis!r}, where ranks read {'rows of their own' if is_gathered else 'the same rows'}"
        raise PlanError(
            f"modules[{styled.name}] has style {style.name!r} {form}, and is a {type(styled.module).__name__}. There "
            f"it is for {supported} itself; subclasses may compute something else."
        )
    others = [a.name for a in plan.mesh if a.name in plan.step.batch_axes and a.size > 1 and a.name != styled.axis]
    if is_gathered and others:
        raise PlanError(
            f"modules[{styled.name}] gathers rows along {styled.axis!r}, and rows are split along {', '.join(others)} "
            "too. Split rows along one axis, or cut the layer along an axis whose ranks read the same rows."
        )


def _check_experts(plan: Plan, styled: StyledModule) -> None:
    where, ranks = f"modules[{styled.name}] has style 'expert'", plan.axis_size(styled.axis)
    if not holds_experts(styled.module):
        raise PlanError(f"{where} and is a {type(styled.module).__name__}. The style is for {EXPERTS_KIND}.")
    if styled.axis not in plan.step.batch_axes:
        raise PlanError(
            f"{where} along {styled.axis!r}, where ranks read the same rows. Experts are dealt to ranks that read rows "
            f"of their own: add {styled.axis!r} to step.batch_axes, or use another axis."
        )
    count = next(styled.module.parameters()).shape[0]
    for own, _ in styled.module.named_parameters():
        shard, update = dict(styled.shards).get(own), plan.rule_for(f"{styled.name}.{own}".lstrip(".")).update
        if shard is None:
            raise PlanError(f"{where}, and its parameter {own!r} is not cut. Cut all of its parameters along dim 0.")
        if shard.sizes is None and count % ranks:
            raise PlanError(
                f"{where} over {ranks} ranks of axis {styled.axis!r}, and {count} experts are no multiple of that. "
                f"Choose a degree that divides {count}."
            )
        if not isinstance(update, AllReduce | Frozen):
            raise PlanError(
                f"{where}, and its parameters have update {update.kind!r}, which does not know that each rank along "
                f"{styled.axis!r} holds other experts. Turn sharding, local steps or DGC off."
            )


def _check_axes(planned: list[StyledModule]) -> None:
    """Raise if a layer is cut along the axis along which the module around it has other tokens on each rank."""
    for part in planned:
        inside = {id(module) for module in part.module.modules()} if part.style.spans_attention else set()
        for styled in planned:
            if id(styled.module) in inside and styled.axis == part.axis and not styled.style.spans_attention:
                raise PlanError(
                    f"modules[{styled.name}] has style {styled.rule.style!r} along {styled.axis!r}, along which ranks "
                    f"have other tokens in modules[{part.name}] (style {part.style.name!r}). Use another axis for one "
                    "of them."
                )


def _check_shards(plan: Plan, styled: StyledModule) -> None:
    style, ranks, sizes = styled.style, plan.axis_size(styled.axis), {}
    for own, shard in styled.shards:
        param, where = styled.module.get_parameter(own), f"params[{styled.name}.{own}]"
        dim = style.weight_dim if own == "weight" else 0
        assert dim is not None
        if style.weight_dim != 0 and own == "bias":
            raise PlanError(f"{where} is cut, but a {style.name}-parallel layer adds its bias whole. Replicate it.")
        if shard.dim % param.dim() != dim:
            raise PlanError(f"{where} is cut along dim {shard.dim}; style {style.name!r} needs dim {dim}. Correct one.")
        sizes[own] = sizes_of(param, shard, ranks)
        if shard.sizes is None and param.shape[dim] < ranks:
            raise PlanError(
                f"{where} has {param.shape[dim]} slices along dim {dim} for the {ranks} ranks of axis "
                f"{styled.axis!r}. Leave {styled.name!r} out of px.shard, or cut it over fewer ranks."
            )
        if len(sizes[own]) != ranks or sum(sizes[own]) != param.shape[dim] or min(sizes[own]) < 1:
            raise PlanError(
                f"{where} has sizes {sizes[own]}, which are not {ranks} above 0 that add up to {param.shape[dim]}. "
                "Correct them, or leave them out for an even cut."
            )
    has_bias = isinstance(styled.module, nn.Linear) and styled.module.bias is not None
    if style.weight_dim == 0 and has_bias and sizes.get("bias") != sizes.get("weight"):
        raise PlanError(
            f"modules[{styled.name}] has style {style.name!r}, so its bias is cut as its weight is, found {sizes}. "
            "Give both the same layout."
        )


def _check_embedding(styled: StyledModule) -> None:
    if isinstance(styled.module, nn.Embedding) and styled.style.weight_dim is not None:
        unfit = [word for word in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(styled.module, word)]
        if unfit:
            raise PlanError(
                f"modules[{styled.name}] is an embedding with {unfit[0]}, which needs all of its rows on one rank. "
                f"Leave {unfit[0]} or the style out."
            )


def sizes_of(param: nn.Parameter, shard: Shard, ranks: int) -> tuple[int, ...]:
    """Return the sizes of a whole parameter's slices."""
    return shard.sizes or even_sizes(param.shape[shard.dim], ranks)


def layer_types(plan: Plan, styled: StyledModule) -> LayerTypes:
    """Return the sharded layers for the axis of a module."""
    return _GATHERED_LAYERS if styled.axis in plan.step.batch_axes else _LAYERS

"""`px.shard`: mark layers of a model to be tensor parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from phalanx.errors import ConfigError, PlanError, did_you_mean
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.session import applied_to, model_record
from phalanx.parallel.tensor.expert_modules import EXPERTS_KIND, holds_experts
from phalanx.parallel.tensor.layers.gathered_linear import ModelParallelLinear
from phalanx.plan.rules.mesh import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, MODEL_AXIS
from phalanx.plan.rules.tensor import Styled, with_cut_layers
from phalanx.plan.styles import STYLES, ContextAttention, StyleName, weight_dim
from phalanx.plan.value import OnRanks, Plan, Shard, matches

ModelT = TypeVar("ModelT", bound=nn.Module)

_ELEMENTWISE = (
    nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
"""Modules that compute the same of a slice as of the whole."""


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What one call of `px.shard` asks for."""

    styled: tuple[Styled, ...]
    axis: str | None
    size: int | None


def shard(
    model: ModelT,
    styles: Mapping[str, StyleName],
    *,
    axis: str | None = None,
    size: int | None = None,
    sequence_dim: int = -2,
) -> ModelT:
    """Mark layers to be cut over ranks when the model is distributed.

    Not collective; every rank says the same. Nothing changes until `distribute` or `distributed_model`, which cut the
    layers in place: class and parameters' shapes change, names, keys and Parameter objects stay.

    Args:
        model: A plain module.
        styles: From a module's name, or a glob over names, to how it is cut; a later match wins.
            `column`: an `nn.Linear` by output features; by its full name, also what works on cut features between a
            column and its row, such as a dropout or a norm of each head. `row`: an `nn.Linear` by input features.
            `vocab`: an `nn.Embedding` by rows, or the `nn.Linear` that makes logits, which stay cut
            (`vocab_cross_entropy` takes them).
            `sequence`: anything that works on each token alone (a norm, a dropout), on this rank's part of the
            sequence. `context`: blocks of a transformer, or the list of them, on this rank's part of the sequence, with
            attention (`F.scaled_dot_product_attention`) to all of it; inputs are cut, outputs put together.
            `expert`: a module whose parameters are those of all experts, stacked: (experts, ...). It is called with
            tokens (rows, width), the experts chosen for each (rows, k) and weights (rows, k).
        axis: Mesh axis whose ranks hold the slices. `data`, or another along which ranks read rows of their own: each
            layer gathers the rows of all. `model`: ranks read the same rows. When None, the mesh's `model` axis if the
            strategy made one, else `data`; `context` and `expert` for those styles.
        size: Ranks along an axis that the strategy does not make; all ranks when None.
        sequence_dim: Dim of activations along which `sequence` and `context` cut them.

    Returns:
        The same module.

    Columns followed by a row in the same parent leave their outputs cut for it; in an `nn.Sequential`, only the last
    column does, over elementwise modules. Other outputs are put together.

    Raises:
        ConfigError: If a pattern matches no module that can have the style, or the model is distributed already.
    """
    if applied_to(model) is not None:
        raise ConfigError("this model is distributed already. Call px.shard before distribute or distributed_model.")
    chosen: dict[str, StyleName] = {}
    for pattern, style in styles.items():
        chosen.update(dict.fromkeys(_match_modules(model, pattern, style), style))
    _check_alike(chosen)
    if any(STYLES[style].shards_experts for style in chosen.values()):
        layers, axis = {name: Styled(module=name, style=style) for name, style in chosen.items()}, axis or EXPERT_AXIS
    elif any(STYLES[style].spans_attention for style in chosen.values()):
        layers, axis = _context_layers(chosen, sequence_dim), axis or CONTEXT_AXIS
    else:
        shards_tokens = any(STYLES[style].shards_tokens for style in chosen.values())
        layers = _tensor_parallel_layers(model, chosen, sequence_dim if shards_tokens else None)
    first = {id(param): name for name, param in model.named_parameters()}
    styled = tuple(
        _with_parameters(model.get_submodule(name), styled_module, first) for name, styled_module in layers.items()
    )
    model_record(model).shard_requests.append(ShardRequest(styled, axis, size))
    return model


def with_shard_requests(plan: Plan, model: nn.Module, attention: ContextAttention = "all_gather") -> Plan:
    """Return a strategy's Plan with the layers that `shard` was called for, and with those that were built sharded.

    Args:
        plan: The Plan.
        model: The model.
        attention: How keys and values reach other ranks in modules with style `context`.

    Raises:
        PlanError: If it does not fit the mesh.
    """
    for request in model_record(model).shard_requests:
        has_model_axis = any(axis.name == MODEL_AXIS for axis in plan.mesh)
        axis = request.axis or (MODEL_AXIS if has_model_axis else DATA_AXIS)
        styled = [
            replace(layer, attention=attention) if STYLES[layer.style].spans_attention else layer
            for layer in request.styled
        ]
        plan = with_cut_layers(plan, styled, axis, request.size)
    sizes = {axis.name: axis.size for axis in plan.mesh}
    styles = [STYLES[rule.style] for rule in plan.modules if rule.style is not None]
    if sizes.get(CONTEXT_AXIS, 1) > 1 and not any(style.spans_attention for style in styles):
        raise PlanError(
            f"the strategy asks for {sizes[CONTEXT_AXIS]} ranks that compute parts of the same sequences "
            "(context_parallel, sep_degree), and no module of this model is to. Say which before it is distributed: "
            'px.shard(model, {"blocks": "context"}).'
        )
    if sizes.get(EXPERT_AXIS, 1) > 1 and not any(style.shards_experts for style in styles):
        raise PlanError(
            f"the strategy asks for {sizes[EXPERT_AXIS]} ranks that hold the experts together (expert_parallel, "
            "ep_degree), and no module of this model has any. Say which before it is distributed: "
            'px.shard(model, {"*.experts": "expert"}).'
        )
    has_layers = not all(style.spans_attention or style.shards_experts for style in styles)
    if sizes.get(MODEL_AXIS, 1) > 1 and not has_layers and not any(is_module_held(p) for p in model.parameters()):
        raise PlanError(
            f"the strategy asks for {sizes[MODEL_AXIS]} ranks that hold one copy of the layers together "
            "(tensor_parallel, mp_degree), and no layer of this model is sharded. Name them before it is distributed: "
            'px.shard(model, {"classifier.*": "column"}).'
        )
    return _with_presharded_layers(plan, model)


def has_shard_requests(model: nn.Module) -> bool:
    """Return whether `shard` was called for this model."""
    return bool(model_record(model).shard_requests)


def describe_shards(model: nn.Module) -> dict[str, str]:
    """Return the style and axis of each module that `shard` was called for, as text."""
    return {
        styled.module: f"{styled.style} along {request.axis or 'the model axis'}"
        for request in model_record(model).shard_requests
        for styled in request.styled
    }


def discard_shards(model: nn.Module) -> list[str]:
    """Undo the calls of `shard` for this model; return the names of the modules. Before it is distributed."""
    requests = model_record(model).shard_requests
    names = [styled.module for request in requests for styled in request.styled]
    requests.clear()
    return names


def _with_presharded_layers(plan: Plan, model: nn.Module) -> Plan:
    """Say of each `ModelParallelLinear` over all ranks how it is cut, for checkpoints and explanations."""
    if len(plan.step.batch_axes) != 1:
        return plan
    layout = OnRanks(layout={plan.step.batch_axes[0]: Shard(dim=0)})
    sharded = {
        id(p)
        for m in model.modules()
        if isinstance(m, ModelParallelLinear) and m.spec.group is None and len(m.spec.sizes) == plan.world_size
        for p in m.parameters(recurse=False)
    }
    rules = (
        plan.rule_for(name).model_copy(update={"match": name, "place": layout, "managed": "module"})
        for name, param in model.named_parameters()
        if id(param) in sharded and is_module_held(param)
    )
    return plan.model_copy(update={"params": (*plan.params, *rules)})


def _match_modules(model: nn.Module, pattern: str, style: StyleName) -> Iterator[str]:
    """Yield the names of the modules that a pattern gives a style."""
    if style not in STYLES:
        raise ConfigError(f"px.shard knows the styles {', '.join(STYLES)}, found {style!r} for {pattern!r}.")
    names = [name for name, _ in model.named_modules() if matches(pattern, name)]
    fitting = [name for name in names if _supports(model.get_submodule(name), style, is_named=name == pattern)]
    if not fitting:
        matched = sorted({type(model.get_submodule(name)).__name__ for name in names})
        problem = f"matches only {', '.join(matched)}" if names else "matches no module"
        hint = "" if names else did_you_mean(pattern, [name for name, _ in model.named_modules()])
        shown = "" if names or hint else " print(model) shows the names; * stands for anything."
        layers = " and ".join(f"nn.{layer}" for layer in STYLES[style].layers)
        kinds = f"{layers} itself; subclasses may compute something else" if layers else "modules with parameters"
        if STYLES[style].shards_experts:
            kinds = EXPERTS_KIND
        raise ConfigError(f"px.shard({pattern!r}: {style!r}) {problem}.{hint}{shown} Style {style} is for {kinds}.")
    yield from fitting


def _supports(module: nn.Module, style: StyleName, *, is_named: bool) -> bool:
    described = STYLES[style]
    if described.shards_experts:
        return holds_experts(module)
    is_between = described.fits_between and is_named and not isinstance(module, nn.Linear | nn.Embedding)
    if not described.layers or is_between:
        return type(module) is nn.Dropout or next(module.parameters(), None) is not None
    return any(type(module) is getattr(nn, layer) for layer in described.layers)


def _check_alike(chosen: Mapping[str, StyleName]) -> None:
    """Raise if a style that has an axis of its own is beside others in one call.

    Raises:
        ConfigError: Names both.
    """
    for own in chosen.values():
        other = next((name for name, style in chosen.items() if style != own), None)
        if other is not None and (STYLES[own].spans_attention or STYLES[own].shards_experts):
            raise ConfigError(
                f'px.shard got style "{own}" beside {chosen[other]!r} for {other!r}, and they are cut along axes of '
                "their own. Call it once for each."
            )


def _context_layers(chosen: Mapping[str, StyleName], dim: int) -> dict[str, Styled]:
    """Return the outermost of the modules that compute a part of the sequence each."""
    names = [
        name for name in chosen if not any(name != outer and f"{name}.".startswith(f"{outer}.") for outer in chosen)
    ]
    return {name: Styled(module=name, style=chosen[name], inputs=dim, outputs=dim) for name in names}


def _tensor_parallel_layers(
    model: nn.Module, chosen: Mapping[str, StyleName], sequence: int | None
) -> dict[str, Styled]:
    """Return how each chosen module's inputs arrive and its outputs leave."""
    plain = {
        name: _without_neighbours(name, style, model.get_submodule(name), sequence) for name, style in chosen.items()
    }
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in chosen):
        module = model.get_submodule(parent)
        children = [f"{parent}.{child}".lstrip(".") for child, _ in module.named_children()]
        is_chain = type(module) is nn.Sequential
        for row, columns, between in _column_row_pairs(model, children, chosen, is_chain):
            plain[row] = replace(plain[row], inputs=-1)
            plain |= {name: replace(plain[name], outputs=-1) for name in columns}
            plain |= {name: Styled(module=name, style=chosen[columns[0]], inputs=-1) for name in between}
    return plain


def _without_neighbours(name: str, style: StyleName, module: nn.Module, sequence: int | None) -> Styled:
    if not STYLES[style].layers:
        return Styled(module=name, style=style, inputs=sequence, outputs=sequence)
    if not isinstance(module, nn.Linear | nn.Embedding):
        return Styled(module=name, style=style, inputs=-1, outputs=-1)
    if weight_dim(style) != 0 or isinstance(module, nn.Embedding):
        return Styled(module=name, style=style, outputs=sequence)
    return Styled(module=name, style=style, inputs=sequence, outputs=-1 if STYLES[style].keeps_logits_sharded else None)


def _column_row_pairs(
    model: nn.Module, children: list[str], chosen: Mapping[str, StyleName], is_chain: bool
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each row with the columns before it whose outputs it takes cut, and the dropouts between them."""
    columns: list[str] = []
    between: list[str] = []
    for name in children:
        module, style = model.get_submodule(name), chosen.get(name)
        dim = weight_dim(style) if isinstance(module, nn.Linear) else None
        if style is not None and dim == 0 and not STYLES[style].keeps_logits_sharded:
            columns = [name] if is_chain else [*columns, name]
            between = []
        elif dim == 1:
            if columns:
                yield name, columns, between
            columns, between = [], []
        elif is_chain and type(module) is nn.Dropout:
            between.append(name)
        elif is_chain and not isinstance(module, _ELEMENTWISE):
            columns, between = [], []


def _with_parameters(module: nn.Module, styled: Styled, first: Mapping[int, str]) -> Styled:
    """Return it with the plain names of the module's parameters."""
    if STYLES[styled.style].shards_experts:
        return replace(styled, experts=tuple(first[id(param)] for param in module.parameters()))
    if weight_dim(styled.style) is None or not isinstance(module, nn.Linear | nn.Embedding):
        return replace(styled, others=tuple(dict.fromkeys(first[id(p)] for p in module.parameters())))
    own = {name: first[id(param)] for name, param in module.named_parameters(recurse=False)}
    return replace(styled, weight=own.get("weight"), bias=own.get("bias"))

"""`shard_layers`: replace the layers that a Plan gives a style by tensor-parallel layers, in place."""

from __future__ import annotations

import logging
from typing import cast

from torch import nn

from phalanx.comm.groups import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.context.shard import shard_sequence
from phalanx.parallel.tensor.experts import shard_experts
from phalanx.parallel.tensor.same_samples import SameSamplesCheck, share_random_stream
from phalanx.parallel.tensor.shard_spec import ShardSpec, hold
from phalanx.parallel.tensor.sharded_logits import ShardedLogits
from phalanx.parallel.tensor.styles import ShardedLayer, StyledModule, layer_types, planned_modules, sizes_of
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Layout, Plan, Shard

logger = logging.getLogger("phalanx.parallel")


def shard_layers(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Give each module with a style its layer. Collective over all ranks of the job.

    Parameters are equal on all ranks before; each rank keeps its slice, in place. Where ranks read the same rows, their
    default random streams become that of the first of them, so that they drop the same of whole activations.
    """
    specs: dict[int, ShardSpec] = {}
    sharing: dict[str, Group] = {}
    for styled in planned_modules(plan, model):
        ranks = mesh.size((styled.axis,))
        if ranks == 1:
            continue
        group_spec = ShardSpec(mesh.group((styled.axis,)), mesh.index((styled.axis,)), ())
        specs_by_name = {
            name: _hold(styled.module, name, shard, group_spec, ranks, specs) for name, shard in styled.shards
        }
        if styled.style.shards_experts:
            shard_experts(
                styled.name,
                styled.module,
                next(iter(specs_by_name.values())),
                is_sum=is_sum_of_ranks(plan),
            )
        _replace_class(plan, styled, specs_by_name.get("weight", group_spec))
        if styled.style.spans_attention:
            dim = _dim(styled.rule.inputs, styled.axis)
            assert dim is not None
            part = shard_sequence(styled.name, styled.module, dim, group_spec, ranks, styled.rule.attention)
            if mesh.size((STAGE_AXIS,)) == 1:  # else it may be in the stage of another rank
                model.register_forward_hook(part.look)
        if styled.style.keeps_logits_sharded and isinstance(styled.module, nn.Linear):
            _leave_logits_cut(styled, group_spec.group)
        if styled.axis not in plan.step.batch_axes:
            sharing[styled.axis] = group_spec.group
    for axis, group in sharing.items():
        share_random_stream(group, mesh.device_type)
        model.register_forward_pre_hook(SameSamplesCheck(axis, group), with_kwargs=True)


def _hold(
    module: nn.Module, name: str, shard: Shard, group_spec: ShardSpec, ranks: int, specs: dict[int, ShardSpec]
) -> ShardSpec:
    """Cut a parameter of a module, unless another module shares it and did."""
    param = module.get_parameter(name)
    if id(param) not in specs:
        spec = ShardSpec(group_spec.group, group_spec.index, sizes_of(param, shard, ranks))
        hold(param, shard.dim, spec)
        specs[id(param)] = spec
    return specs[id(param)]


def _replace_class(plan: Plan, styled: StyledModule, spec: ShardSpec) -> None:
    """Give a module its new class; hooks, training mode and identity stay."""
    layer_type = layer_types(plan, styled).get((type(styled.module), styled.style.name))
    if layer_type is not None:
        styled.module.__class__ = layer_type
        layer = cast(ShardedLayer, styled.module)
        layer.spec = spec
        layer.configure(styled.name, _dim(styled.rule.inputs, styled.axis), _dim(styled.rule.outputs, styled.axis))


def _leave_logits_cut(styled: StyledModule, group: Group) -> None:
    """Say which loss logits need, and look whether they get it."""
    styled.module.register_forward_hook(ShardedLogits(styled.name, styled.axis, group))
    logger.info(
        "logits of %r stay sharded over axis %r, their loss: px.vocab_cross_entropy(logits, target, axis=%r)",
        styled.name,
        styled.axis,
        styled.axis,
    )


def _dim(layout: Layout | None, axis: str) -> int | None:
    placed = (layout or {}).get(axis)
    return placed.dim if isinstance(placed, Shard) else None

"""Cut the layers that a Plan gives a style, in place."""

from __future__ import annotations

import logging

from torch import nn

from phalanx.comm.groups import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.context import cut_sequence
from phalanx.parallel.tensor.dropout import CutDropout
from phalanx.parallel.tensor.gathered_linear import OwnRowsLinear
from phalanx.parallel.tensor.linear import ColumnLinear, RowLinear
from phalanx.parallel.tensor.same_samples import SameRows, share_random_stream
from phalanx.parallel.tensor.shard_spec import Cut, hold
from phalanx.parallel.tensor.sharded_logits import CutLogits
from phalanx.parallel.tensor.styles import Planned, kinds_of, planned_modules, sizes_of
from phalanx.parallel.tensor.vocab import VocabEmbedding
from phalanx.plan.rules.mesh import STAGE_AXIS
from phalanx.plan.value import Layout, Plan, Shard

logger = logging.getLogger("phalanx.parallel")


def cut_layers(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Give each module with a style its layer. Collective over all ranks of the job.

    Parameters are equal on all ranks before; each rank keeps its slice, in place. Where ranks read the same rows, their
    default random streams become that of the first of them, so that they drop the same of whole activations.
    """
    held: dict[int, Cut] = {}
    sharing: dict[str, Group] = {}
    for one in planned_modules(plan, model):
        ranks = mesh.size((one.axis,))
        if ranks == 1:
            continue
        whole = Cut(mesh.group((one.axis,)), mesh.index((one.axis,)), ())
        cuts = {name: _hold(one.module, name, shard, whole, ranks, held) for name, shard in one.shards}
        _become(plan, one, cuts.get("weight", whole))
        if one.rule.style == "context":
            dim = _dim(one.rule.inputs, one.axis)
            assert dim is not None
            part = cut_sequence(one.name, one.module, dim, whole, ranks)
            if mesh.size((STAGE_AXIS,)) == 1:  # else it may be in the stage of another rank
                model.register_forward_hook(part.look)
        if one.rule.style == "vocab" and isinstance(one.module, nn.Linear):
            _leave_logits_cut(one, whole.group)
        if one.axis not in plan.step.batch_axes:
            sharing[one.axis] = whole.group
    for axis, group in sharing.items():
        share_random_stream(group, mesh.device_type)
        model.register_forward_pre_hook(SameRows(axis, group), with_kwargs=True)


def _hold(module: nn.Module, name: str, shard: Shard, whole: Cut, ranks: int, held: dict[int, Cut]) -> Cut:
    """Cut a parameter of a module, unless another module shares it and did."""
    param = module.get_parameter(name)
    if id(param) not in held:
        cut = Cut(whole.group, whole.index, sizes_of(param, shard, ranks))
        hold(param, shard.dim, cut)
        held[id(param)] = cut
    return held[id(param)]


def _become(plan: Plan, one: Planned, cut: Cut) -> None:
    """Give a module its new class; hooks, training mode and identity stay."""
    kind = kinds_of(plan, one).get((type(one.module), one.rule.style or ""))
    if kind is None:
        return
    module, inputs, outputs = one.module, _dim(one.rule.inputs, one.axis), _dim(one.rule.outputs, one.axis)
    module.__class__ = kind
    setattr(module, "cut", cut)  # noqa: B010 (torch types the attributes of a module as tensors)
    if isinstance(module, ColumnLinear | RowLinear):
        module.inputs, module.outputs, module.path = inputs, outputs, one.name
    elif isinstance(module, OwnRowsLinear):
        module.is_planned = True
    elif isinstance(module, VocabEmbedding):
        module.outputs = outputs
    elif isinstance(module, CutDropout):
        assert inputs is not None
        module.dim = inputs


def _leave_logits_cut(one: Planned, group: Group) -> None:
    """Say which loss logits need, and look whether they get it."""
    one.module.register_forward_hook(CutLogits(one.name, one.axis, group))
    logger.info(
        "logits of %r stay cut over the ranks of axis %r, their loss: px.vocab_cross_entropy(logits, target, axis=%r)",
        one.name,
        one.axis,
        one.axis,
    )


def _dim(layout: Layout | None, axis: str) -> int | None:
    placed = (layout or {}).get(axis)
    return placed.dim if isinstance(placed, Shard) else None

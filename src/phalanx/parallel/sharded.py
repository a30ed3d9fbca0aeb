"""ZeRO: ranks hold a part of the optimizer state, gradients and parameters each, on torch's `fully_shard`.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. Between steps each
rank holds its slice of everything, at every stage. Stage 3 gathers a unit's parameters for its forward pass and again
for its backward pass; stages 1 and 2 gather them once for both. Gradients are reduce-scattered as they appear.

`fully_shard` averages over the ranks alike. Uneven batches are weighted where the gradient enters the model, at its
outputs, so every parameter's gradient has the weight.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.hooks import RemovableHandle

from phalanx.comm import transfers
from phalanx.comm.context import Context
from phalanx.comm.groups import Group
from phalanx.errors import PlanError
from phalanx.parallel.data_parallel import Reducer
from phalanx.parallel.describe import held_over, is_module_held, mark_held, note_stages, stages_over
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.rebind import replaced
from phalanx.parallel.row_weights import row_weight, weighted_outputs, without_views
from phalanx.parallel.unit_calls import label_units
from phalanx.plan.value import Plan, ReduceScatter, matches

logger = logging.getLogger("phalanx.parallel")


def shard(plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter) -> None:
    """Cut the parameters of a model over ranks, in place. Collective.

    The model's Parameter objects are replaced; optimizers follow them (see `rebind`).

    Args:
        plan: Says which modules are gathered together (`unit`).
        model: On its device, equal on all ranks.
        mesh: This rank's place.
        update: How its parameters are sharded.

    Raises:
        PlanError: If a parameter has no dim to cut.
    """
    _cut(plan, [*_units(plan, model), model], model, mesh, update, reshard=update.zero == 3 and update.reshard)


class ShardedStages:
    """Parameters of this rank's stages, cut over the ranks that hold the same stages. Collective, as `shard` is.

    They are gathered once for all micro-batches of a step, whose gradients add up here and are reduced once: copies may
    have different numbers of micro-batches.

    Raises:
        PlanError: If a parameter has no dim to cut, or is in no unit.
    """

    def __init__(self, plan: Plan, model: nn.Module, mesh: Mesh, update: ReduceScatter) -> None:
        units = _units(plan, model, is_here=lambda unit: not any(param.is_meta for param in unit.parameters()))
        inner = {id(part) for unit in units for part in unit.modules() if part is not unit}
        self._units: list[Any] = [unit for unit in units if id(unit) not in inner]
        gathered = {id(param) for unit in self._units for param in unit.parameters()}
        for name, param in model.named_parameters():
            if not param.is_meta and id(param) not in gathered:
                raise PlanError(
                    f"sharding with a pipeline gathers units, and {name!r} is in none alone. Name the module that "
                    "holds it in sharding_configs units, or turn one of the two off."
                )
        _cut(plan, units, model, mesh, update, reshard=False)

    def gather(self) -> None:
        """Gather parameters for a step. Collective over the copies."""
        for unit in self._units:
            for part in unit.modules():
                if isinstance(part, FSDPModule):
                    part.set_is_last_backward(False)
                    part.set_reshard_after_backward(False)
                    part.set_requires_gradient_sync(False)
                    part.unshard()

    def reduce(self) -> None:
        """Reduce the gradients of a step, and let go of what was gathered. Collective over the copies."""
        from torch.distributed.pipelining import PipelineStage  # a model without stages does not wait for this

        for unit in reversed(self._units):
            # What torch's stages do with a module of this kind; it has no public call without a stage.
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=unit), 1)  # type: ignore[arg-type]

    def let_go(self) -> None:
        """Let go of parameters that were gathered without gradients."""
        for unit in self._units:
            _let_go(unit)


def _cut(
    plan: Plan, units: list[nn.Module], model: nn.Module, mesh: Mesh, update: ReduceScatter, *, reshard: bool
) -> None:
    """Cut the parameters of units, and tell what takes the place of what."""
    before = dict(model.named_parameters())
    for name, param in before.items():
        if not param.dim():
            raise PlanError(
                f"sharding cuts parameters along dim 0, and {name!r} has no dims. Give it shape (1,): "
                "nn.Parameter(torch.ones(1))."
            )
    is_offloaded = update.offload == "cpu" and mesh.device_type != "cpu"
    if update.offload == "cpu" and not is_offloaded:
        logger.warning("optimize_offload of sharding does not act: the model is in host memory already.")
    settings: dict[str, Any] = {
        "mesh": _device_mesh(mesh, mesh.batch_axes if update.along is None else update.along),
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=_dtype(update.wire_dtype), cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if is_offloaded else OffloadPolicy(),
    }
    for unit in units:
        # Before torch's own, which puts hooks on the outputs.
        unit.register_forward_hook(torch.compiler.disable(_leave_no_view), with_kwargs=True)
        fully_shard(unit, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(mesh.size(mesh.batch_axes)) if update.reduce == "mean" else 1.0)
    label_units(model)
    after = dict(model.named_parameters())
    replaced.note(before, after)
    for name, param in after.items():
        if is_module_held(before[name]):  # what was cut here is a layer's slice
            mark_held(param, held_over(before[name]))
        for group in stages_over([before[name]]):
            note_stages(param, group)
    _add_terms(plan, model, mesh)


def _leave_no_view(_unit: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> Any:
    return without_views(outputs, (inputs, named))


def _add_terms(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Add up the gradients of parameters of which ranks that read the same rows have a term each. Collective.

    Before slices are cut, which knows the ranks with other rows only.
    """
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for own, param in module.named_parameters(recurse=False):
            holders.setdefault(id(param), []).append((module, own))
    for name, param in model.named_parameters():
        axes = getattr(plan.rule_for(name).update, "axes", None) or ()
        along = tuple(axis for axis in axes if axis not in mesh.batch_axes and mesh.size((axis,)) > 1)
        if not along:
            continue
        terms = _Terms(mesh.group(along))
        for module, own in holders[id(param)]:
            module.register_forward_pre_hook(torch.compiler.disable(partial(terms.watch, own)))


class _Terms:
    """Adds up the gradient of one parameter over a group, once modules that hold it have it gathered."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._hooked: Tensor | None = None

    def watch(self, own: str, module: nn.Module, _inputs: Any) -> None:
        """Look at the parameter before a module's forward pass."""
        param = module._parameters[own]
        # Torch makes what it gathers into once, in the first pass, and keeps it.
        if param is not None and param.requires_grad and param is not self._hooked:
            self._hooked = param
            param.register_hook(self._add_up)

    def _add_up(self, gradient: Tensor) -> Tensor:
        return transfers.all_reduce(gradient, "sum", self._group)


def weigh_outputs(model: nn.Module, reducer: Reducer, context: Context) -> None:
    """Weight the gradients that enter a model at its outputs by this rank's rows, and wake the reducer of its buffers.

    After a forward pass without gradients parameters are let go here: torch leaves that to the backward pass, and would
    compute with what it had gathered when they have changed.

    Args:
        model: The sharded model.
        reducer: Keeps the buffers equal.
        context: Tells the weight of the current batch.
    """

    def weight() -> float:
        reducer.begin()
        return row_weight(context, context.readers)

    def leave(model: nn.Module, _inputs: Any, outputs: Any) -> Any:
        if torch.is_grad_enabled():
            return weighted_outputs(outputs, weight)
        _let_go(model)
        return outputs

    model.register_forward_hook(leave)
    gather_once: RemovableHandle = model.register_forward_pre_hook(
        lambda *_: _gather_before_inference(model, gather_once), prepend=True
    )


def _gather_before_inference(model: nn.Module, hook: RemovableHandle) -> None:
    """Let torch make the memory it gathers into, which it keeps, outside of inference mode: training writes to it."""
    if not torch.is_inference_mode_enabled():
        return
    hook.remove()
    with torch.inference_mode(mode=False), torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def _let_go(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let whole gradients accumulate on this rank inside the block."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _device_mesh(mesh: Mesh, along: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of the ranks that share a copy; with further copies, one of (copies, ranks)."""
    copies = tuple(axis for axis in mesh.batch_axes if axis not in along and mesh.size((axis,)) > 1)
    if len(copies) > 1 or len(along) > 1:
        raise PlanError(
            f"parameters are sharded along {along} with copies along {copies}: one mesh axis of each is what this "
            "version does. Join axes."
        )
    return mesh.device_mesh(*copies, *along)


def _units(plan: Plan, model: nn.Module, is_here: Callable[[nn.Module], bool] = lambda _unit: True) -> list[nn.Module]:
    """Return the modules that are gathered on their own, inner ones first.

    Not those that share a parameter with a module outside: it is gathered with what holds both.
    """
    patterns = [rule.match for rule in plan.modules if rule.unit]
    named = [(name, module) for name, module in model.named_modules() if name]
    units = [module for name, module in reversed(named) if any(matches(pattern, name) for pattern in patterns)]
    units = [unit for unit in units if is_here(unit)]
    holders = _holders(model)
    return [unit for unit in units if all(holders[param] == count for param, count in _holders(unit).items())]


def _holders(module: nn.Module) -> Counter[int]:
    """Return how many modules hold each parameter, by its identity."""
    return Counter(id(param) for part in module.modules() for param in part.parameters(recurse=False))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

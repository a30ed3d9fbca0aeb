"""ZeRO stages 1 to 3: shard optimizer state, gradients and parameters with torch's `fully_shard`.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020. Between steps each
rank holds its slice of everything, at every stage. Stage 3 gathers a unit's parameters for its forward pass and again
for its backward pass; stages 1 and 2 gather them once for both. Gradients are reduce-scattered as they appear.

`fully_shard` averages over the ranks alike. Uneven batches are weighted at the gathered parameters, before gradients
are reduced: so it matters neither which method of the model was called nor what it returned.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from phalanx.comm import transfers
from phalanx.comm.batch.loaded_batches import tensors_in
from phalanx.comm.context import Context
from phalanx.comm.groups import Group
from phalanx.errors import PlanError
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.data.running_reducers import check_no_graph
from phalanx.parallel.data.sample_weights import sample_weight_hook, without_views
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.model_shape import held_over, is_module_held, mark_held, note_stages, stages_over
from phalanx.parallel.step.param_remap import note_replaced
from phalanx.parallel.zero.unit_calls import label_units
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
    _shard_units(plan, [*_units(plan, model), model], model, mesh, update, reshard=update.zero == 3 and update.reshard)


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
        self._model = weakref.ref(model)
        gathered = {id(param) for unit in self._units for param in unit.parameters()}
        for name, param in model.named_parameters():
            if not param.is_meta and id(param) not in gathered:
                raise PlanError(
                    f"sharding with a pipeline gathers units, and {name!r} is in none alone. Name the module that "
                    "holds it in sharding_configs units, or turn one of the two off."
                )
        _shard_units(plan, units, model, mesh, update, reshard=False)

    def gather(self) -> None:
        """Gather parameters for a step. Collective over the copies."""
        model = self._model()
        gathered: Any = None if model is None else model._gathered_gradients
        for unit in self._units:
            for part in unit.modules():
                if isinstance(part, FSDPModule):
                    part.set_is_last_backward(False)
                    part.set_reshard_after_backward(False)
                    part.set_requires_gradient_sync(False)
                    part.unshard()
                    if gathered is not None:  # stages call what is in a unit, not the unit
                        gathered.look(part)

    def reduce(self) -> None:
        """Reduce the gradients of a step, and let go of what was gathered. Collective over the copies."""
        from torch.distributed.pipelining import PipelineStage  # a model without stages does not wait for this

        for unit in reversed(self._units):
            # What torch's stages do with a module of this kind; it has no public call without a stage.
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=unit), 1)  # type: ignore[arg-type]

    def reshard(self) -> None:
        """Let go of parameters that were gathered without gradients."""
        for unit in self._units:
            _reshard(unit)


def _shard_units(
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
        logger.warning("optimize_offload of sharding has no effect: the model is in host memory already.")
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
    _watch_units(model)
    divide_sums(model, mesh, update)
    label_units(model)
    after = dict(model.named_parameters())
    note_replaced(before, after)
    for name, param in after.items():
        if is_module_held(before[name]):  # what was cut here is a layer's slice
            mark_held(param, held_over(before[name]))
        for group in stages_over([before[name]]):
            note_stages(param, group)
    _add_terms(plan, model, mesh)


def divide_sums(model: nn.Module, mesh: Mesh, update: ReduceScatter) -> None:
    """Let torch divide sums of gradients by the ranks; those of logical replicas are scaled before (`weigh_rows`)."""
    factor = float(mesh.size(mesh.batch_axes)) if update.reduce == "mean" and mesh.replicas is None else 1.0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def _leave_no_view(_unit: nn.Module, inputs: Any, named: dict[str, Any], outputs: Any) -> Any:
    return without_views(outputs, (inputs, named))


def _add_terms(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Add up the gradients of parameters of which ranks that read the same rows have a term each. Collective.

    Before slices are cut, which knows the ranks with other rows only.
    """
    for name, _ in model.named_parameters():
        axes = getattr(plan.rule_for(name).update, "axes", None) or ()
        along = tuple(axis for axis in axes if axis not in mesh.batch_axes and mesh.size((axis,)) > 1)
        if along:
            hook_gathered(model, partial(_add_up, mesh.group(along)), {name})


def _add_up(group: Group, gradient: Tensor) -> Tensor:
    return transfers.all_reduce(gradient, "sum", group)


GradientHook = Callable[[Tensor], Tensor | None]
Place = tuple[str, nn.Module, str]
"""A parameter's name in the model, a module that holds it, and its name there."""


class _Gathered:
    """The parameters of a model while they are gathered, and what acts on their gradients before they are reduced."""

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, tuple[GradientHook, Collection[str] | None]] = OrderedDict()
        self._params: dict[str, Tensor] = {}
        self._places: dict[Any, Sequence[Place]] = {}

    def add(self, unit: Any, places: Sequence[Place]) -> Callable[[nn.Module, Any], None]:
        """Return what looks at the parameters of a unit before its forward pass."""
        self._places[unit] = places
        return self.look

    def look(self, unit: Any, _inputs: Any = None) -> None:
        """Look at the parameters of a unit, which are gathered now."""
        for name, module, own in self._places[unit]:
            param = module._parameters.get(own)
            # Torch makes what it gathers into once, in the first pass, and keeps it.
            if param is None or not param.requires_grad or param is self._params.get(name):
                continue
            if not isinstance(param, DTensor):  # which it is unless gathered
                self._params[name] = param
                param.register_hook(partial(self._act, name))

    def _act(self, name: str, gradient: Tensor) -> Tensor:
        for hook, names in self.hooks.values():
            if names is None or name in names:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        return gradient


def hook_gathered(model: nn.Module, hook: GradientHook, names: Collection[str] | None = None) -> RemovableHandle:
    """Call a hook with the gradient of each parameter of a sharded model, whole, before it is reduced.

    Args:
        model: The sharded model.
        hook: Returns another gradient, or None for the same.
        names: Those of the parameters; all when None.
    """
    gathered = model.__dict__.get("_gathered_gradients") or _watch_units(model)
    hooks = gathered.hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook, names
    return handle


def _names(model: nn.Module) -> dict[tuple[int, str], str]:
    """Return the name of each parameter by the module that holds it and its name there; of a shared one the first."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    return {
        (id(module), own): first[id(param)]
        for module in model.modules()
        for own, param in module._parameters.items()
        if param is not None
    }


def _watch_units(model: nn.Module) -> _Gathered:
    """Return what acts on the gradients of a sharded model, from its next forward pass on."""
    gathered, names, seen = _Gathered(), _names(model), set[tuple[int, str]]()
    model._gathered_gradients = gathered  # type: ignore[assignment]  # a ring, which goes with the model
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in reversed(units):  # inner ones first
        holders = [(module, own) for module in unit.modules() for own in module._parameters]
        places = [(module, own) for module, own in holders if (id(module), own) in names.keys() - seen]
        seen |= {(id(module), own) for module, own in places}
        look = gathered.add(unit, [(names[id(module), own], module, own) for module, own in places])
        # After torch's own, which gathers.
        unit.register_forward_pre_hook(torch.compiler.disable(look))
    return gathered


def weigh_rows(model: nn.Module, reducer: Reducer, context: Context, *, is_sum: bool) -> RemovableHandle:
    """Weight the gradients of a model by this rank's rows, and wake the reducer of its buffers.

    Args:
        model: The sharded model.
        reducer: Keeps the buffers equal.
        context: Tells the batch that gradients are of.
        is_sum: Whether gradients are summed over the ranks, not averaged.
    """
    shares = context.readers.shares if context.replicas is not None else 1
    weigh = sample_weight_hook(context, context.readers, is_sum=is_sum, gain=float(shares) if is_sum else 1.0)

    def act(gradient: Tensor) -> Tensor:
        reducer.begin()
        weighted = weigh(gradient)
        return weighted if shares == 1 else weighted * (1.0 / shares)  # as buckets do on one rank, which shards nothing

    return hook_gathered(model, act)


def watch_forward_passes(model: nn.Module) -> None:
    """Let parameters of a sharded model go after a forward pass without gradients.

    Torch leaves that to the backward pass, and would compute with what it had gathered when they have changed.
    """

    def leave(model: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            _reshard(model)
            return
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:  # torch has let go of the parameters when it would come back to a graph
                tensor.register_hook(lambda _: check_no_graph())

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


def _reshard(model: nn.Module) -> None:
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

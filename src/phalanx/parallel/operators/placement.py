"""`place_operators`: run single operators of a module sharded over a mesh axis, as a Plan's `OpRule`s say.

A *site* is an operator by the module whose own code runs it, its number among those of one call, and its name:
`blocks.0.attend:3:aten._softmax.default`. The outermost module that holds sites is a region. Inside, tensors are
torch's DTensors, at first whole on every rank or as the Plan lays out the inputs of that module. An operator with a
rule is computed so that its outputs lie as the rule says; the others, and all of the backward pass, follow by the rules
of DTensor. What leaves a region is whole again.

DTensors are values of all ranks, and moving one changes where it lies and not what it is. So rules are applied below
autograd, and a model computes the same under any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from phalanx.errors import PlanError
from phalanx.parallel.data.forward_hooks import Forward, wrap_forward
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.operators.dtensor_rules import inputs_for
from phalanx.plan.sites import Site, axis_of, regions
from phalanx.plan.value import Plan
from phalanx.plan.value import Shard as ShardOf

_UNCOUNTED = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""As captures leave them out."""


def place_operators(plan: Plan, model: nn.Module, mesh: Mesh) -> None:
    """Let the modules that hold sites compute as a Plan's rules for operators say. Collective, as meshes are made."""
    axis = axis_of(plan)
    if axis is None or mesh.size((axis,)) == 1:
        return
    on = mesh.device_mesh(axis)
    rules = {Site.read(rule.site): _placements(rule.outputs, axis) for rule in plan.ops}
    for path in regions(plan):
        cut = next((rule.inputs for rule in reversed(plan.modules) if rule.match == path and not rule.style), None)
        (taken,) = _placements((cut or {},), axis)
        place_module(model.get_submodule(path), path, on, rules, taken)


def place_module(
    module: nn.Module, path: str, on: DeviceMesh, rules: Mapping[Site, tuple[Placement, ...]], taken: Placement
) -> None:
    """Let one module compute as rules say.

    Args:
        module: The region.
        path: Its path, by which sites name it.
        on: The ranks.
        rules: How the outputs of its operators lie.
        taken: How its inputs do, before it begins.
    """
    wrap_forward(module, _run, _Region(path, on, rules, taken))


def _placements(outputs: tuple[Mapping[str, Any], ...], axis: str) -> tuple[Placement, ...]:
    placements = [layout.get(axis) for layout in outputs]
    return tuple(Shard(placement.dim) if isinstance(placement, ShardOf) else Replicate() for placement in placements)


@dataclass(frozen=True, slots=True)
class _Region:
    path: str
    mesh: DeviceMesh
    rules: Mapping[Site, tuple[Placement, ...]]
    taken: Placement
    """How its inputs are laid out before it begins."""

    cached_inputs: dict[Any, list[Placement] | None] = field(default_factory=dict)
    """How inputs must lie, by operator and how they do."""

    def __deepcopy__(self, _: dict[int, Any]) -> _Region:
        return self  # A copied module is of the same ranks, and groups cannot be copied.


def _run(forward: Forward, region: _Region, *inputs: Any, **named: Any) -> Any:
    """Run a module's forward pass with its operators placed; whole tensors go in and come out."""
    module = forward.__self__  # type: ignore[attr-defined]
    inputs, named = tree_map_only(Tensor, partial(_take_input, region), (inputs, named))
    with _parameters_as(partial(_replicate, region), module), implicit_replication(), ExitStack() as hooks:
        mode = _PlacementMode(region)
        for path, inner in module.named_modules(prefix=region.path):
            if inner is not module:
                hooks.enter_context(inner.register_forward_pre_hook(partial(mode.enter, path)))
                hooks.enter_context(inner.register_forward_hook(mode.leave, always_call=True))
        with mode:
            mode.enter(region.path)
            outputs = forward(*inputs, **named)
        mode.check_all_met()
    return tree_map(_put_together, outputs)


def _replicate(region: _Region, tensor: Tensor) -> DTensor:
    return DTensor.from_local(tensor, region.mesh, [Replicate()], run_check=False)


def _take_input(region: _Region, tensor: Tensor) -> Tensor:
    full_tensor = _replicate(region, tensor)
    if isinstance(region.taken, Shard) and region.taken.dim >= tensor.dim():
        return full_tensor
    return full_tensor.redistribute(placements=[region.taken])


def _put_together(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()


@contextmanager
def _parameters_as(change: Any, module: nn.Module) -> Iterator[None]:
    """Let a module and those inside use changed parameters inside the block; each is changed once."""
    before = [(m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
    changed = {id(param): change(param) for _, _, param in before}
    try:
        for owner, name, param in before:
            owner[name] = changed[id(param)]
        yield
    finally:
        for owner, name, param in before:
            owner[name] = param
    for path, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            if isinstance(buffer, DTensor):
                raise PlanError(
                    f"module {path!r} gives its buffer {name!r} a new tensor in its forward pass, and its operators "
                    "are placed on ranks. Take it out of the Plan's `ops`."
                )


class _PlacementMode(TorchDispatchMode):
    """Counts the operators of each module's own code, and computes those with a rule as it says."""

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._stack: list[tuple[str, list[int]]] = []
        self._left = {site for site in region.rules if site.is_inside(region.path)}

    def enter(self, path: str, *_: Any) -> None:
        """Note that a module begins."""
        self._stack.append((path, [0]))

    def leave(self, *_: Any) -> None:
        """Note that it ends."""
        self._stack.pop()

    def check_all_met(self) -> None:
        """Raise if the forward pass had not every operator that a rule is for.

        Raises:
            PlanError: Names the first that was not there.
        """
        for site in sorted(self._left, key=str):
            raise PlanError(
                f"the Plan places operator {str(site)!r}, and the forward pass that runs now has none there: it is "
                "another step than the one that was captured. Capture it again, and make a new Plan."
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("prim", "prims") or func in _UNCOUNTED:
            return func(*args, **kwargs)
        path, count = self._stack[-1]
        site = Site(path, count[0], str(func))
        placements = self._region.rules.get(site)
        if placements is None:
            result = func(*args, **kwargs)
        else:
            self._left.discard(site)
            result = self._run_placed(site, func, args, kwargs, placements)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs, result))):
            count[0] += 1
        return result

    def _run_placed(self, site: Site, func: Any, args: Any, kwargs: Any, placements: tuple[Placement, ...]) -> Any:
        with torch.no_grad():  # below autograd: where tensors lie is none of its business
            args, kwargs = self._redistribute(func, args, kwargs, placements)
            result = func(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if len(tensors) != len(placements):
                raise PlanError(
                    f"ops[{site}] has {len(placements)} outputs; the operator has {len(tensors)}. Say one of each."
                )
            places = iter(placements)
            return tree_map_only(DTensor, lambda output: _at(output, next(places)), result)

    def _redistribute(self, func: Any, args: Any, kwargs: Any, placements: tuple[Placement, ...]) -> tuple[Any, Any]:
        """Return arguments that lie so that the outputs lie as wanted, if there is such a way to lie."""
        if len(set(placements)) != 1 or isinstance(placements[0], Replicate):
            return args, kwargs
        replicate = partial(_replicate, self._region)
        arguments = tree_map_only(Tensor, lambda t: t if isinstance(t, DTensor) else replicate(t), (args, kwargs))
        lying, named = tree_map_only(DTensor, lambda tensor: tensor._spec, arguments)
        key = (func, str((lying, named)), placements)
        if key not in self._region.cached_inputs:
            self._region.cached_inputs[key] = inputs_for(func, lying, named, placements[0])
        chosen = self._region.cached_inputs[key]
        if chosen is None:
            return args, kwargs
        places = iter(chosen)
        moved: tuple[Any, Any] = tree_map_only(DTensor, lambda tensor: _at(tensor, next(places)), arguments)
        return moved


def _at(tensor: DTensor, placement: Placement) -> DTensor:
    return tensor if tensor.placements == (placement,) else tensor.redistribute(placements=[placement])

"""`rebind`: rebind an optimizer to the new Parameter objects after a technique replaced a model's parameters.

Sharding replaces a module's Parameter objects, and so do stages of a pipeline; cut layers shrink them. The optimizer
stays the same object: its groups get the new parameters, its state is cut as they are, so schedulers, hooks and loaded
state survive. Around a step, groups that hold plain and sharded tensors are split, because torch's fused loops over
many tensors take one kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from phalanx.errors import ConfigError
from phalanx.parallel.session import StepPhase, session
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.tensor.shard_spec import shard_of_state


def note_replaced(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Remember that parameters of these plain names were replaced."""
    for name, old in before.items():
        if after[name] is not old:
            session.replacements[old] = (after[name], name)
    if session.replacements:
        _watch_steps()


def successor(param: Tensor) -> nn.Parameter | None:
    """Return what replaced a parameter, or None."""
    new, _ = session.replacements.get(param, (None, ""))
    return new  # type: ignore[no-any-return]


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_unbound)


def _refuse_unbound(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in session.replacements:
                _, name = session.replacements[param]
                raise ConfigError(
                    f"this {type(optimizer).__name__} holds parameter {name!r} as it was before the model was sharded, "
                    "which nothing trains any more. Give the optimizer to distribute or fleet.distributed_optimizer "
                    "too."
                )


def rebind(optimizer: Optimizer) -> None:
    """Let an optimizer hold the parameters that stand in the place of those it was made for. Changes nothing else."""
    for param, state in optimizer.state.items():
        cut = {k: shard_of_state(param, v) for k, v in state.items() if isinstance(v, Tensor)}
        state.update({key: part for key, part in cut.items() if part is not None})
    moved = {}
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            new = successor(param)
            if new is not None:
                group["params"][index] = moved[param] = new
    for old, new in moved.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            if not new.is_meta:  # else another rank trains it
                optimizer.state[new] = {key: _like(value, old, new) for key, value in state.items()}
    if moved:
        optimizer.register_load_state_dict_post_hook(_place_state)
    if moved and any(len(_kinds(group)) > 1 for group in optimizer.param_groups):
        _split_around_steps(optimizer)


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return state of a parameter cut as the parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # a job that shards nothing does not wait for this

    if not isinstance(value, Tensor) or value.shape != old.shape or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)


def _place_state(optimizer: Optimizer) -> None:
    """Cut state that was loaded as plain tensors as the parameters are: `extra` of a checkpoint holds a rank's slices.

    Raises:
        ConfigError: If it is of slices of another size.
    """
    for param, state in optimizer.state.items():
        if hasattr(param, "device_mesh"):
            state.update({key: _place_loaded(key, value, param) for key, value in state.items()})


def _place_loaded(key: str, value: Any, param: Any) -> Any:
    """Return what was loaded for a sharded parameter, sharded."""
    from torch.distributed.tensor import DTensor

    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_plain or not value.dim() or value.shape[1:] != param.shape[1:]:  # a number of steps is no slice
        return value
    mine = param.to_local()
    if value.shape not in (mine.shape, param.shape):
        raise ConfigError(
            f"the state {key!r} that was loaded for a sharded parameter of shape {tuple(param.shape)} has shape "
            f"{tuple(value.shape)}, and this rank's slice {tuple(mine.shape)}. It was saved with other ranks: load it "
            "with as many, or let px.save and px.load have the optimizer itself."
        )
    if value.shape == param.shape:
        return _like(value, value, param)
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _kinds(group: dict[str, Any]) -> dict[object, list[Tensor]]:
    """Return the parameters of a group by what torch's fused loops can take together."""
    from torch.distributed.tensor import DTensor

    kinds: dict[object, list[Tensor]] = {}
    for param in group["params"]:
        kinds.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return kinds


def _split_around_steps(optimizer: Optimizer) -> None:
    whole: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()

    def split(optimizer: Optimizer) -> None:
        # A step that raised left them split.
        optimizer.param_groups = whole.pop(optimizer, optimizer.param_groups)
        whole[optimizer] = optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": params} for group in optimizer.param_groups for params in _kinds(group).values()
        ]

    def join(optimizer: Optimizer) -> None:
        optimizer.param_groups = whole.pop(optimizer)

    add_action(optimizer, StepPhase.SPLIT_GROUPS, split)
    add_action(optimizer, StepPhase.JOIN_GROUPS, join)

"""`trust_ratio`: layer-wise trust ratios from norms of full parameters, shared by LARS and LAMB."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.comm.groups import Group
from phalanx.errors import ConfigError, StrategyError
from phalanx.parallel.step.norms import gradient_of, local_part, whole_norms
from phalanx.plan.value import matches

NameOf = Callable[[Tensor], str | None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter in one step; tensors are what this rank holds of it."""

    param: Tensor
    value: Tensor
    gradient: Tensor
    groups: tuple[Group, ...]
    settings: dict[str, Any]
    """The optimizer's group."""

    state: dict[str, Any]
    is_excluded: bool


class Exclusion:
    """Which parameters are left without weight decay, by their names.

    Args:
        parts: A parameter is excluded if one of these, a part of a name or a glob, is in its name.
        name_of: Tells the plain name of a parameter; asked at the first step.
    """

    def __init__(self, parts: Sequence[str], name_of: NameOf) -> None:
        self._parts = parts
        self._name_of = name_of
        self._decided = WeakTensorKeyDictionary()

    def __contains__(self, param: Tensor) -> bool:
        if not self._parts:
            return False
        if param not in self._decided:
            name = self._name_of(param)
            if name is None:
                raise ConfigError(
                    f"exclude_from_weight_decay = {list(self._parts)} goes by names, and the optimizer has a parameter "
                    f"of shape {tuple(param.shape)} that no distributed model names. Distribute the model first."
                )
            self._decided[param] = any(matches(f"*{part}*", name) for part in self._parts)
        return bool(self._decided[param])


def layers_of(optimizer: Optimizer, excluded: Exclusion) -> list[Layer]:
    """Return every parameter of an optimizer that has a gradient."""
    layers = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad_and_groups = gradient_of(param)
            if grad_and_groups is None:
                continue
            gradient, groups = grad_and_groups
            if gradient.is_sparse:
                raise ConfigError(
                    f"a parameter of shape {tuple(param.shape)} has a sparse gradient, whose norm would be that of a "
                    "few rows. Build its layer with sparse=False, or give it an optimizer of its own."
                )
            state = optimizer.state[param]
            layers.append(Layer(param, local_part(param), gradient, groups, group, state, param in excluded))
    return layers


def local_state(layer: Layer, name: str) -> Tensor:
    """Return what this rank holds of a tensor of the optimizer's state; zeros, spread as the parameter, at first."""
    state = layer.state.get(name)
    if state is None:
        state = layer.state[name] = torch.zeros_like(layer.param, memory_format=torch.preserve_format)
    return local_part(state)


def norms_of(layers: Sequence[Layer], *tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the norms of several lists of tensors, each shaped and spread as the layers; one communication for all."""
    flat = [tensor for some in tensors for tensor in some]
    groups = [layer.groups for layer in layers] * len(tensors)
    return whole_norms(flat, groups).chunk(len(tensors))


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio of norms, and 1 where either is 0 (a parameter or gradient of zeros says nothing)."""
    usable = (numerator > 0) & (denominator > 0)
    return torch.where(usable, numerator / denominator, torch.ones_like(numerator))


def check_optimizer(
    setting: str, optimizer: Optimizer, kinds: tuple[type[Optimizer], ...], decay: float, *, without: Sequence[str]
) -> None:
    """Raise unless a setting can take an optimizer's place.

    Args:
        setting: `lars` or `lamb`.
        optimizer: The user's.
        kinds: The classes it stands in for.
        decay: The setting's weight decay.
        without: Options of the optimizer's groups that must be off.

    Raises:
        StrategyError: If it is of another class, has such an option on, or asks for another weight decay.
    """
    kind = type(optimizer)
    if kind not in kinds:
        names = " or ".join(f"torch.optim.{k.__name__}" for k in kinds)
        raise StrategyError(
            f"strategy.{setting} trains {names} by another rule, and found {kind.__module__}.{kind.__qualname__}. Pass "
            f"one of those, or set strategy.{setting} = False."
        )
    silent = {0, decay, inspect.signature(kind).parameters["weight_decay"].default}
    for group in optimizer.param_groups:
        on = [name for name in without if group[name]]
        if on:
            raise StrategyError(f"strategy.{setting} has no {on[0]}, and the optimizer sets {on[0]}={group[on[0]]}.")
        if group["weight_decay"] not in silent:
            raise StrategyError(
                f"the optimizer asks for weight_decay={group['weight_decay']}, and strategy.{setting}_configs for "
                f"{setting}_weight_decay={decay}. Keep one: remove the optimizer's, or make them equal."
            )

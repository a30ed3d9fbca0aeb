"""`MasterWeights`: float32 master copies of low-precision parameters (Micikevicius et al., arXiv:1710.03740).

The optimizer keeps a float32 copy of each such parameter. During a step the copy stands in the parameter's place, so
torch's own update runs in float32 and makes float32 state; afterwards the parameter is its rounded value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.errors import ConfigError
from phalanx.parallel.precision.loss_scale import take_scale
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import is_dtensor

LOW = (torch.bfloat16, torch.float16)
KEY = "master_weight"
"""Under this key of a parameter's state an optimizer's `state_dict` holds its float32 copy."""


@dataclass(slots=True)
class _MasterCopy:
    """The float32 copy of one parameter."""

    value: Tensor
    version: int
    """Writes to the parameter that the copy knows of."""


@dataclass(slots=True)
class _Stashed:
    """A low-precision parameter while its float32 copy is in its place."""

    param: Tensor
    value: Tensor
    gradient: Tensor


class MasterWeights:
    """The float32 copies of one optimizer; made by `keep_master_weights`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._masters = WeakTensorKeyDictionary()
        self._away: list[_Stashed] = []
        self._loading: dict[int, dict[str, Any]] = {}
        add_action(optimizer, StepPhase.USE_MASTER_WEIGHTS, self._put_in_place, needs_gradients=True)
        add_action(optimizer, StepPhase.ROUND_MASTER_WEIGHTS, self._put_back)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    @torch.no_grad()
    def _put_in_place(self, optimizer: Optimizer) -> None:
        for param in _low(optimizer):
            gradient = param.grad
            if gradient is None:
                continue
            master, factor = self._of(param).value, take_scale(param)
            self._away.append(_Stashed(param, param.data, gradient))
            param.grad = None
            param.data = master
            param.grad = gradient.float() / factor

    @torch.no_grad()
    def _put_back(self, _: Optimizer) -> None:
        for away in self._away:
            master = self._masters[away.param]
            away.param.grad = None
            away.param.data = away.value
            away.param.copy_(master.value)
            away.param.grad = away.gradient
            master.version = away.param._version
        self._away.clear()

    def _of(self, param: Tensor) -> _MasterCopy:
        """Return the copy of a parameter, following what else was written to the parameter since the last step."""
        master: _MasterCopy | None = self._masters.get(param)
        if master is None:
            master = self._masters[param] = _MasterCopy(param.detach().float(), param._version)
        elif master.version != param._version:
            written = master.value.to(param.dtype) != param
            master.value = torch.where(written, param.detach().float(), master.value)
            master.version = param._version
        return master

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for index, param in enumerate(_all(optimizer)):
            if param.dtype in LOW and param in self._masters:
                # A new dict: the state in there is the optimizer's own.
                state["state"][index] = {**state["state"].get(index, {}), KEY: self._of(param).value}

    def _before_load(self, _: Optimizer, state: dict[str, Any]) -> None:
        ids = [id_ for group in state["param_groups"] for id_ in group["params"]]
        self._loading = {index: state["state"].get(id_, {}) for index, id_ in enumerate(ids)}

    def _after_load(self, optimizer: Optimizer) -> None:
        # torch casts loaded state to the parameter's dtype, which would round it.
        for index, param in enumerate(_all(optimizer)):
            loaded = self._loading.get(index, {})
            if param.dtype not in LOW or not loaded:
                continue
            own = optimizer.state[param]
            own.pop(KEY, None)
            for name, value in loaded.items():
                if name == KEY:
                    self._masters[param] = _MasterCopy(value.to(param.device, torch.float32, copy=True), -1)
                elif isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == param.shape:
                    own[name] = value.to(param.device, copy=True)
            if not own:
                del optimizer.state[param]
        self._loading = {}


def keep_master_weights(optimizer: Optimizer) -> MasterWeights:
    """Update an optimizer's bfloat16 and float16 parameters through float32 copies, which `state_dict` holds.

    Weights that were loaded or written after a step win over the copies. Others' parameters are left alone.

    Args:
        optimizer: Any torch optimizer, before its first step.

    Raises:
        ConfigError: If such a parameter is a DTensor.
    """
    if any(is_dtensor(param) for param in _low(optimizer)):
        raise ConfigError(
            "pure precision was asked for parameters that are sharded over ranks, which this version does not do. "
            "Leave them float32 (amp without use_pure_bf16 and use_pure_fp16)."
        )
    return MasterWeights(optimizer)


def _all(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _low(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for param in _all(optimizer) if param.dtype in LOW)

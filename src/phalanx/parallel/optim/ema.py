"""`px.EMA`: exponential moving average of the weights, sharded as they are (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.errors import ConfigError, did_you_mean
from phalanx.parallel.session import StepPhase, model_record, session
from phalanx.parallel.step.hooks import add_action
from phalanx.parallel.step.norms import local_part

logger = logging.getLogger("phalanx.parallel")


def ema_of(model: nn.Module) -> EMA:
    """Return the average of a model's weights that `strategy.ema` keeps: `with px.ema_of(model).swapped(): ...`.

    Raises:
        ConfigError: If the strategy keeps none of this model.
    """
    average = kept_average(model)
    if average is None:
        raise ConfigError(
            f"no average of the weights of this {type(model).__name__} is kept. Set strategy.ema = True, and give the "
            "model and its optimizer to distribute; or make one with phalanx.EMA(model, optimizer=optimizer)."
        )
    return average


def kept_average(model: nn.Module) -> EMA | None:
    """Return the average that `strategy.ema` keeps of a model's weights, or None."""
    record = session.models.get(model)
    return None if record is None else record.average


def keep_average(model: nn.Module, optimizer: Optimizer, decay: float, *, warmup: bool) -> None:
    """Average a model's weights after each update of the first optimizer that trains it, for `ema_of`."""
    record = model_record(model)
    if record.average is not None:
        logger.warning("ema follows the updates of the first optimizer of a model; those of another do not move it.")
    else:
        record.average = EMA(model, decay, warmup=warmup, optimizer=optimizer)


class EMA:
    """A second set of weights that follows a model's: `shadow = decay * shadow + (1 - decay) * weights`.

    Floating-point parameters and buffers that `state_dict` holds are averaged; batch-norm statistics among them, as
    averaged weights do not fit the last ones. Nothing here communicates: every rank averages what it holds. Averages of
    bfloat16 and float16 weights are float32.

    Args:
        model: The model. Distribute it first.
        decay: Between 0 and 1; the nearer to 1 the longer the memory.
        warmup: Whether the decay rises to its value, as min(decay, (1 + updates) / (10 + updates)).
        optimizer: Update after each of its updates; without it, call `update`.

    Raises:
        ConfigError: If `decay` is not between 0 and 1.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True, optimizer: Optimizer | None = None
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMA needs a decay of at least 0 and below 1, found {decay}. 0.999 is usual.")
        self._model = weakref.ref(model)
        self._decay = decay
        self._warmup = warmup
        self._is_swapped = False
        self.updates = 0
        """Updates so far."""

        with torch.no_grad():
            self._shadow = {name: _wide(tensor.detach()).clone() for name, tensor in _averaged_tensors(model)}
        if optimizer is not None:
            add_action(optimizer, StepPhase.MOVE_AVERAGES, lambda _: self.update())

    @property
    def decay(self) -> float:
        """The decay of the next update."""
        return min(self._decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else self._decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the model's weights.

        Raises:
            ConfigError: Inside `swapped`, or if a weight has another shape or device than when the average was made.
        """
        if self._is_swapped:
            raise ConfigError("EMA.update was called inside `with ema.swapped()`. Evaluate there, and train outside.")
        shadow, weights = self._pairs()
        wide = [weight.to(mine.dtype) for mine, weight in zip(shadow, weights, strict=True)]
        torch._foreach_lerp_(shadow, wide, 1.0 - self.decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the averaged weights inside the block, and its own again afterwards."""
        if self._is_swapped:
            raise ConfigError("the averaged weights are in the model already: swapped() was called inside itself.")
        with torch.no_grad():
            shadow, weights = self._pairs()
            own = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, shadow)
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            with torch.no_grad():
                torch._foreach_copy_(weights, own)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and the averages under the names of the plain model."""
        return {"updates": self.updates, "shadow": dict(self._shadow)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank.

        Raises:
            ConfigError: If names or shapes are not the model's.
        """
        loaded = state["shadow"]
        for name in loaded.keys() ^ self._shadow.keys():
            where, others = ("state", self._shadow) if name in loaded else ("model", loaded)
            raise ConfigError(
                f"EMA: only the {where} has {name!r}.{did_you_mean(name, others)} Load a state of this model."
            )
        for name, mine in self._shadow.items():
            loaded_part = local_part(loaded[name])
            if loaded_part.shape != local_part(mine).shape:
                raise ConfigError(
                    f"EMA: {name!r} has shape {tuple(loaded_part.shape)} in the state, and "
                    f"{tuple(local_part(mine).shape)} here. Load a state that was saved with the same placement."
                )
            local_part(mine).copy_(loaded_part)
        self.updates = state["updates"]

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the averages and the model's weights, in one order; what this rank holds of each."""
        model = self._model()
        if model is None:
            raise ConfigError("the model of this EMA is gone. Keep it as long as its averages are used.")
        current = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shadow = [local_part(mine) for mine in self._shadow.values()]
        weights = [local_part(current[name].detach()) for name in self._shadow]
        for name, mine, weight in zip(self._shadow, shadow, weights, strict=True):
            if (mine.shape, mine.device) != (weight.shape, weight.device):
                raise ConfigError(
                    f"EMA: {name!r} was {tuple(mine.shape)} on {mine.device} when the average was made and is "
                    f"{tuple(weight.shape)} on {weight.device} now. Make the EMA after the model is distributed."
                )
        return shadow, weights


def _averaged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and the buffers that `state_dict` holds, by plain name; floating-point ones, each once."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in state and tensor.is_floating_point():
            yield name, tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

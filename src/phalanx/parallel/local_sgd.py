"""LocalSGD: ranks train apart and average their parameters every so many steps.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Adaptive: the number of steps follows the loss,
k = ceil(k0 sqrt(lr0 loss / (lr loss0))) (Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best
Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, equation 17), between 1 and 16 as in Fleet.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm.groups import Group
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.data_parallel import Reducer
from phalanx.parallel.flat import synced_buffers
from phalanx.plan.value import Average

logger = logging.getLogger("phalanx.parallel")

MOST_STEPS = 16
"""Steps between two averages that the adaptive form never exceeds."""


class LocalSgd:
    """Averages the parameters of a model between steps of its optimizers.

    Args:
        model: Its parameters and floating-point buffers are averaged.
        update: When.
        group: Ranks that train apart.
        reducer: Averages gradients up to the step in which ranks begin to train apart.
    """

    def __init__(self, model: nn.Module, update: Average, group: Group, reducer: Reducer | None) -> None:
        self._model = weakref.ref(model)
        self._update = update
        self._group = group
        self._reducer = reducer
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._first: tuple[float, float] | None = None
        self._loss: Tensor | None = None
        self.every = update.every
        """Steps between two averages now."""

        self.averages = 0
        """Averages taken so far."""

        self._pause(0)

    def before_step(self, _optimizer: Optimizer) -> None:
        """Nothing comes before an update."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step, and average what the optimizer trains when it is time. Collective then."""
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._pause(step)
        begun = max(self._update.begin_step - 1, 0)
        if step <= begun or step - max(self._last.get(optimizer, 0), begun) < self.every:
            return
        self._last[optimizer] = step
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._average([*params, *self._buffers()])
        self.averages += 1
        if self._update.adaptive:
            self._adapt(float(optimizer.param_groups[0]["lr"]))

    def observe(self, loss: Tensor) -> None:
        """Take note of this rank's loss, which the adaptive form follows."""
        self._loss = loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job needs to average in the same steps."""
        steps = max(self._steps.values(), default=0)
        last = max(self._last.values(), default=0)
        return {"steps": steps, "last": last, "every": self.every, "first": list(self._first or ())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; optimizers are bound already."""
        for optimizer in list(self._steps):
            self._steps[optimizer], self._last[optimizer] = state["steps"], state["last"]
        self.every = state["every"]
        self._first = tuple(state["first"]) or None
        self._pause(state["steps"])

    def bind(self, optimizer: Optimizer) -> None:
        """Begin to count the steps of an optimizer."""
        self._steps.setdefault(optimizer, 0)

    def _pause(self, steps: int) -> None:
        """Let the reducer rest once the next step is one in which ranks train apart."""
        if self._reducer is not None:
            self._reducer.is_resting = steps + 1 >= self._update.begin_step

    def _buffers(self) -> Iterable[Tensor]:
        model = self._model()
        return () if model is None else (getattr(module, name) for module, name in synced_buffers(model))

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike]).div_(dist.get_world_size(self._group))
            with peers_named("the average of parameters", self._group):
                dist.all_reduce(flat, group=self._group)
            for tensor, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _adapt(self, rate: float) -> None:
        if self._loss is None:
            raise ConfigError(
                "adaptive_localsgd follows the loss, and no step told one. Train with phalanx.train_step, or tell it "
                "with phalanx.report(loss=...) in every step."
            )
        loss = self._loss.double().reshape(1) / dist.get_world_size(self._group)
        dist.all_reduce(loss, group=self._group)
        now = max(loss.item(), 0.0)
        if self._first is None:
            self._first = rate, now
        first_rate, first_loss = self._first
        grown = math.sqrt(first_rate * now / (rate * first_loss)) if rate and first_loss else 1.0
        self.every = min(max(math.ceil(grown * self._update.every), 1), MOST_STEPS)

"""`LocalSgd`: average parameters every k steps, fixed or adaptive.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Adaptive: the number of steps follows the loss,
k = ceil(k0 sqrt(lr0 loss / (lr loss0))) (Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best
Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, equation 17), between 1 and 16 as in Fleet.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.comm import transfers
from phalanx.comm.groups import Group
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.data.bucket_buffers import synced_buffers
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.session import StepPhase
from phalanx.parallel.step.hooks import add_action
from phalanx.plan.value import Average

logger = logging.getLogger("phalanx.parallel")

MOST_STEPS = 16
"""Steps between two averages that the adaptive form never exceeds."""


class _Progress(NamedTuple):
    """How far an optimizer is."""

    steps: int
    last: int
    """Step after which parameters were averaged last."""


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
        self._progress: weakref.WeakKeyDictionary[Optimizer, _Progress] = weakref.WeakKeyDictionary()
        self._resumed_at = _Progress(0, 0)
        self._first: tuple[float, float] | None = None
        self._loss: Tensor | None = None
        self.every = update.every
        """Steps between two averages now."""

        self.averages = 0
        """Averages taken so far."""

        self._pause(0)

    def bind(self, optimizer: Optimizer) -> None:
        """Average what an optimizer trains after some of its steps from now on."""
        self._progress.setdefault(optimizer, self._resumed_at)
        add_action(optimizer, StepPhase.AVERAGE_PARAMETERS, self._count)

    def observe(self, loss: Tensor) -> None:
        """Take note of this rank's loss, which the adaptive form follows."""
        self._loss = loss.detach()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let the model have the average of all ranks' weights inside the block, and its own again afterwards.

        Rounded once, as where a checkpoint of ranks that train apart is loaded. Collective.
        """
        model = self._model()
        params = () if model is None else (param for param in model.parameters() if param.requires_grad)
        tensors = [tensor.detach() for tensor in (*params, *self._buffers())]
        own = [tensor.clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(transfers.all_reduce(tensor.double(), "mean", self._group))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job needs to average in the same steps."""
        furthest = max(self._progress.values(), default=self._resumed_at)
        return {**furthest._asdict(), "every": self.every, "first": list(self._first or ())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._resumed_at = _Progress(state["steps"], state["last"])
        self._progress.update(dict.fromkeys(self._progress, self._resumed_at))
        self.every = state["every"]
        self._first = tuple(state["first"]) or None
        self._pause(state["steps"])

    def _count(self, optimizer: Optimizer) -> None:
        """Count a step, and average when it is time. Collective then."""
        step, last = self._progress[optimizer].steps + 1, self._progress[optimizer].last
        begun = max(self._update.begin_step - 1, 0)
        is_due = step > begun and step - max(last, begun) >= self.every
        self._progress[optimizer] = _Progress(step, step if is_due else last)
        self._pause(step)
        if not is_due:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._average([*params, *self._buffers()])
        self.averages += 1
        if self._update.adaptive:
            self._adapt(float(optimizer.param_groups[0]["lr"]))

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
                "adaptive_localsgd follows the loss, and no step reported one. Train with phalanx.train_step, or "
                "call phalanx.report(loss=...) in every step."
            )
        loss = self._loss.double().reshape(1) / dist.get_world_size(self._group)
        dist.all_reduce(loss, group=self._group)
        now = max(loss.item(), 0.0)
        if not math.isfinite(now):
            return  # such a loss says nothing
        if self._first is None:
            self._first = rate, now
        first_rate, first_loss = self._first
        grown = math.sqrt(first_rate * now / (rate * first_loss)) if rate and first_loss else 1.0
        self.every = math.ceil(min(max(grown * self._update.every, 1), MOST_STEPS))

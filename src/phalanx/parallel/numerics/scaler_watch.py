"""`ScalerWatch`: see which losses torch's GradScaler scales, and which steps it takes or leaves out.

Torch has no hook for it, and an optimizer whose step is left out is not called at all; so `scale` and `step` of the
class are wrapped. Optimizers that handle the scale themselves, as fused ones do, are called in any case, with what the
scaler found as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


class ScalerWatch:
    """What scalers do in this process.

    Args:
        on_no_call: Called with the optimizer and the scale after a step in which the optimizer was not called.
    """

    def __init__(self, on_no_call: Callable[[Optimizer, float], None]) -> None:
        self._on_no_call = on_no_call
        self._unscaled = WeakTensorKeyDictionary()
        """Losses before they were scaled, by what they became."""

        self._scaler: Any = None
        """The one whose `step` runs."""

        self._is_called = False

    def install(self) -> None:
        """Wrap torch's class; its subclasses inherit that."""
        scaler_class: Any = torch.amp.GradScaler
        scale, step = scaler_class.scale, scaler_class.step

        @wraps(scale)
        def watch_scale(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if isinstance(outputs, Tensor) and scaled is not outputs:
                self._unscaled[scaled] = outputs
            return scaled

        @wraps(step)
        def watch_step(scaler: Any, optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            if not scaler.is_enabled():
                return step(scaler, optimizer, *args, **options)
            self._scaler, self._is_called = scaler, False
            try:
                result = step(scaler, optimizer, *args, **options)
            finally:
                self._scaler = None
            if not self._is_called:
                self._on_no_call(optimizer, float(scaler.get_scale()))
            return result

        scaler_class.scale, scaler_class.step = watch_scale, watch_step

    def unscale(self, loss: Tensor) -> Tensor | None:
        """Return the loss that a scaler scaled; None if `loss` comes from none."""
        unscaled: Tensor | None = self._unscaled.get(loss)
        return unscaled

    @property
    def is_stepping(self) -> bool:
        """Whether the step of a scaler runs."""
        return self._scaler is not None

    def note_call(self) -> None:
        """Note that an optimizer is called, or would be if it did not leave the step out itself."""
        self._is_called = True

    @property
    def scale(self) -> float:
        """The scale of the step that runs; 1 where none does."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

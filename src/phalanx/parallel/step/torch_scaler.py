"""Support `torch.amp.GradScaler` around distributed optimizers.

For most optimizers it unscales gradients and leaves `step` out after an overflow, each rank as it finds. It treats
those that say `_step_supports_amp_scaling`, as fused ones do, in another way: `step` is always called, with the scale
and what was found as attributes. So a step that came from it is known there, on every rank and before any update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.parallel.session import leave_out_step, optimizer_record


def refuse_scaler(optimizer: Optimizer, why: str) -> None:
    """Let a step that comes from torch's GradScaler be an error.

    Args:
        optimizer: Its `step` asks `admit_scaled`.
        why: What goes wrong, as a sentence without its end.
    """
    optimizer_record(optimizer).scaler_refusal = why
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def handles_scale(optimizer: Optimizer) -> bool:
    """Return whether torch's GradScaler leaves scaled gradients to the steps of an optimizer: it is fused."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_overflowed(optimizer: Optimizer) -> bool:
    """Return whether torch's GradScaler, which calls `step` of a fused optimizer, found gradients that overflowed."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(_whole(overflow).item())


def admit_scaled(optimizer: Optimizer) -> bool:
    """Return whether to update, before anything else looks at the gradients; they are unscaled here if they are scaled.

    True for every step that comes from no GradScaler.

    Raises:
        ConfigError: If the optimizer cannot have one.
    """
    if getattr(optimizer, "found_inf", None) is None:
        return True
    refusal = optimizer_record(optimizer).scaler_refusal
    if refusal is not None:
        raise ConfigError(
            f"torch.amp.GradScaler steps this {type(optimizer).__name__}, and {refusal}. Use strategy.amp "
            'with amp_configs = {"dtype": "float16"}, whose loss scale is the same on all ranks and knows of it, or '
            "bfloat16, which needs none."
        )
    if has_overflowed(optimizer):
        leave_out_step(optimizer, None)
        return False
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        _unscale(optimizer, 1.0 / float(_whole(scale)))
    # The fused kernel would do it again; the scaler deletes both afterwards.
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return True


@torch.no_grad()
def _unscale(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor)


def _whole(value: Any) -> Tensor:
    """Return what the scaler hands over; of gradients that are sharded it is a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)

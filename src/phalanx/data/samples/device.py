"""Where a batch goes: onto the device this process computes on."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import copy
from typing import Any

import torch

from phalanx.comm import context


def to_device(batch: Any) -> Any:
    """Return `batch` with its tensors on the Context's device; on the CPU it is returned as it is."""
    if not context.is_initialized() or context.current().device.type == "cpu":
        return batch
    return moved(batch, context.current().device)


def moved(part: Any, device: torch.device) -> Any:
    """Return a batch, or a part of one, with its tensors on `device`."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if isinstance(part, dict):
        return {key: moved(value, device) for key, value in part.items()}
    if isinstance(part, MutableMapping):  # as torch's collate copies it: its class has no rule for its constructor
        there = copy(part)
        there.update({key: moved(value, device) for key, value in part.items()})
        return there
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(moved(value, device) for value in part))
    if isinstance(part, list | tuple):
        return type(part)(moved(value, device) for value in part)
    return part

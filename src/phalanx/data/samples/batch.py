"""`collate`, `to_device`: collate samples into batches, and move batches to the device."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from phalanx.comm import context


def collate(samples: list[Any]) -> Any:
    """Return `torch.utils.data.default_collate(samples)`.

    Tuples of tensors and integers, the samples of most datasets, take three quarters of its time.
    """
    if set(map(type, samples)) != {tuple} or len(set(map(len, samples))) != 1:
        return default_collate(samples)
    return [collate_column(values) for values in zip(*samples, strict=True)]


def collate_column(values: tuple[Any, ...]) -> Any:
    """Return `torch.utils.data.default_collate(values)`."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return torch.from_numpy(np.array(values, np.int64))
    # In a worker process torch stacks into memory that the training process sees.
    if kinds == {Tensor} and get_worker_info() is None:
        return torch.stack(values)
    return default_collate(values)  # type: ignore[arg-type]  # of strings a tuple stays a tuple


def to_device(batch: Any) -> Any:
    """Return `batch` with its tensors on the Context's device; on the CPU it is returned as it is."""
    if not context.is_initialized() or context.current().device.type == "cpu":
        return batch
    return move_to_device(batch, context.current().device)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # as torch's collate copies it: its class has no rule for its constructor
        mapping = copy(batch)
        mapping.update({key: move_to_device(value, device) for key, value in batch.items()})
        return mapping
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(value, device) for value in batch)
    return batch

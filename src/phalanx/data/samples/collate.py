"""Batches made of lists of samples: what torch's `default_collate` makes, with less work for the usual ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info


def collate(samples: list[Any]) -> Any:
    """Return `torch.utils.data.default_collate(samples)`.

    Tuples of tensors and whole numbers, the samples of most datasets, take three quarters of its time.
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

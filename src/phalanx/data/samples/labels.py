"""`check_labels`: check class labels against the number of classes of a model, before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from phalanx.errors import ConfigError, DataError


def check_labels(data: Any, class_dim: int) -> None:
    """Raise unless every label is a class of the model.

    Args:
        data: Labels as a tensor, array or list; or a dataset that holds them as `labels` or `targets`, a
            TensorDataset whose last tensor they are, or a Subset of one of these.
        class_dim: Number of classes of the model.

    Raises:
        DataError: If a label is outside [0, class_dim); names the sample and its label.
        ConfigError: If `data` holds its labels elsewhere.
    """
    labels = labels_of(data)
    wrong = np.flatnonzero((labels < 0) | (labels >= class_dim))
    if wrong.size:
        sample = int(wrong[0])
        raise DataError(
            f"The label of sample {sample} is {int(labels[sample])}, outside the model's {class_dim} classes (0 to "
            f"{class_dim - 1}); {wrong.size} of {labels.size} labels are. "
            f"Build the model with class_dim={int(labels.max()) + 1}, or correct the labels."
        )


def label_problem(output: Sequence[int], labels: Tensor, *, ignored: int) -> str | None:
    """Return what makes labels no target of a loss over classes, and what to do; None when they are one.

    Args:
        output: Shape of the logits, (samples, classes, ...).
        labels: One class for each place of the output, or probabilities, of which nothing is said.
        ignored: The label that the loss leaves out.
    """
    if len(output) < 2 or labels.is_floating_point():
        return None
    samples, classes, *places = output
    needed = (samples, *places)
    if tuple(labels.shape) != needed:
        remedy = "Let the data give one class for each sample"
        if labels.dim() == len(needed) + 1 and labels.numel() == math.prod(needed):
            dim = next(i for i in range(labels.dim() - 1, -1, -1) if labels.shape[i] == 1)
            remedy = f"Write target.squeeze({dim})"
        return (
            f"The loss takes labels of shape {needed} for outputs of shape {tuple(output)}, found "
            f"{tuple(labels.shape)}. {remedy}."
        )
    if labels.dtype not in (torch.int64, torch.uint8):
        dtype = str(labels.dtype).removeprefix("torch.")
        return f"The loss takes labels of type int64, found {dtype}. Write target.long(), or convert them in the data."
    values = labels.detach().cpu().numpy()
    wrong = ((values < 0) | (values >= classes)) & (values != ignored)
    if not wrong.any():
        return None
    row, label = np.nonzero(wrong)[0][0], values[wrong][0]
    return (
        f"The label {label}, of sample {row} of this rank's batch, is outside the {classes} classes of the output (0 "
        f"to {classes - 1}). Let the model give an output for every class, or correct the labels; "
        "px.data.check_labels(dataset, classes) finds all such samples."
    )


def labels_of(data: Any) -> NDArray[Any]:
    """Return the labels `data` holds, shape (samples,); see `check_labels`."""
    if isinstance(data, Subset):
        selected: NDArray[Any] = labels_of(data.dataset)[np.asarray(data.indices)]
        return selected
    if isinstance(data, TensorDataset):
        data = data.tensors[-1]
    values = data
    for name in ("labels", "targets"):
        values = getattr(values, name, values)
    if isinstance(values, torch.Tensor | np.ndarray | list | tuple):
        labels: NDArray[Any] = np.asarray(values).reshape(-1)
        return labels
    raise ConfigError(
        f"Asked to check the labels of a {type(data).__name__}, which has neither `labels` nor `targets`. "
        "Pass the labels themselves."
    )

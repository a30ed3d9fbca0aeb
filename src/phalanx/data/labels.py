"""Labels that fit the model, checked before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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


def labels_of(data: Any) -> NDArray[Any]:
    """Return the labels `data` holds, shape (samples,); see `check_labels`."""
    if isinstance(data, Subset):
        chosen: NDArray[Any] = labels_of(data.dataset)[np.asarray(data.indices)]
        return chosen
    if isinstance(data, TensorDataset):
        data = data.tensors[-1]
    found = data
    for name in ("labels", "targets"):
        found = getattr(found, name, found)
    if isinstance(found, torch.Tensor | np.ndarray | list | tuple):
        labels: NDArray[Any] = np.asarray(found).reshape(-1)
        return labels
    raise ConfigError(
        f"Asked to check the labels of a {type(data).__name__}, which has neither `labels` nor `targets`. "
        "Pass the labels themselves."
    )

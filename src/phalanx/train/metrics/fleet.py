"""Fleet's `fleet.metrics`: sum, max, auc, mae, ... of per-worker values.

Every function is collective over the workers: each calls it with its own counts and gets the same result. With one
process nothing travels. Counts are added up in int64, everything else in float64.

    auc = Auc()
    for dense, ids, label in batches:
        auc.update(model(dense, ids).sigmoid(), label)
    print(auc.compute())                                   # over the samples of all workers
    print(acc(correct, rows), rmse(squared_error, rows))
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.comm import all_reduce, context
from phalanx.errors import ConfigError
from phalanx.train.metrics.auc import AUC, area_under_roc

AUC_BINS = 65_536
"""Scores that share one of these equal parts of [0, 1] count as equal."""


def sum(value: Any) -> Tensor:
    """Return the sum over all workers of a number, array or tensor, element by element; the shape stays."""
    return _over_workers(value, "sum")


def max(value: Any) -> Tensor:
    """Return the largest over all workers of a number, array or tensor, element by element; the shape stays."""
    return _over_workers(value, "max")


def min(value: Any) -> Tensor:
    """Return the smallest over all workers of a number, array or tensor, element by element; the shape stays."""
    return _over_workers(value, "min")


def acc(correct: Any, total: Any) -> float:
    """Return correct samples / samples over all workers.

    Args:
        correct: Samples this worker got right; an array or tensor is added up.
        total: Samples of this worker, likewise.
    """
    return _ratio(correct, total)


def mae(absolute_error: Any, total: Any) -> float:
    """Return the mean absolute error over all workers, from this worker's sum of absolute errors and its samples."""
    return _ratio(absolute_error, total)


def mse(squared_error: Any, total: Any) -> float:
    """Return the mean squared error over all workers, from this worker's sum of squared errors and its samples."""
    return _ratio(squared_error, total)


def rmse(squared_error: Any, total: Any) -> float:
    """Return the root of `mse`."""
    return math.sqrt(_ratio(squared_error, total))


def auc(positive: Any, negative: Any) -> float:
    """Return the area under the ROC curve over all workers, from histograms of the scores.

    Exact but for scores that share a bin, which count as equal: half a win for the pair.

    Args:
        positive: How many samples with label 1 this worker saw in each bin of the score, lowest first, shape (bins,).
        negative: The same for label 0.

    Returns:
        0 to 1; NaN when no worker saw a sample of one of the labels.

    Raises:
        ConfigError: If the histograms differ in shape.
    """
    counts = _as_tensor(positive), _as_tensor(negative)
    if counts[0].shape != counts[1].shape or counts[0].ndim != 1:
        raise ConfigError(
            f"Asked for the AUC of histograms of shapes {tuple(counts[0].shape)} and {tuple(counts[1].shape)}. "
            "Count both labels in the same row of bins."
        )
    positives, negatives = sum(torch.stack(counts)).cpu()
    return area_under_roc(positives, negatives)


class Auc:
    """Counts scores into the histograms that `auc` adds up over the workers; `AUC` with 65,536 bins.

    Memory and traffic are two times 65,536 counts, for any number of samples. Not collective except for `compute`.
    """

    def __init__(self) -> None:
        self._metric = AUC(bins=AUC_BINS)

    @property
    def positive(self) -> Tensor:
        """Samples with label 1 by score, lowest first."""
        return self._metric.histogram[1].cpu()

    @property
    def negative(self) -> Tensor:
        """Samples with label 0 by score."""
        return self._metric.histogram[0].cpu()

    def update(self, score: Tensor, label: Tensor) -> None:
        """Count a batch.

        Args:
            score: Probabilities, any shape of n elements.
            label: 0 or 1, as many elements.

        Raises:
            ConfigError: If the numbers of scores and labels differ.
            DataError: If a score is not within 0 to 1 or a label neither 0 nor 1; names the sample.
        """
        self._metric.update(score.reshape(-1), label)

    def compute(self) -> float:
        """Return the AUC over all workers; see `auc`. Collective."""
        return auc(self.positive, self.negative)


def _ratio(part: Any, total: Any) -> float:
    counts = torch.stack([_as_tensor(part).sum().double(), _as_tensor(total).sum().double()])
    numerator, rows = sum(counts).tolist()
    return numerator / rows if rows else math.nan


def _as_tensor(value: Any) -> Tensor:
    tensor = torch.as_tensor(value).detach()
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _over_workers(value: Any, op: Literal["sum", "max", "min"]) -> Tensor:
    device = context.current().device if context.is_initialized() else torch.device("cpu")
    return all_reduce(_as_tensor(value).to(device), op)

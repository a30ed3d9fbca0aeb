"""Metrics over all workers, from what each worker counted: Fleet's `fleet.metrics`.

Every function is collective over the workers: each calls it with its own counts and gets the same result. With one
process nothing travels. Counts are added up in int64, everything else in float64.

    auc = Auc()
    for dense, ids, label in batches:
        auc.update(model(dense, ids).sigmoid(), label)
    print(auc.compute())                                   # over the rows of all workers
    print(acc(correct, rows), rmse(squared_error, rows))
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.comm import all_reduce, context
from phalanx.errors import ConfigError, DataError

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
    """Return correct rows / rows over all workers.

    Args:
        correct: Rows this worker got right; an array or tensor is added up.
        total: Rows of this worker, likewise.
    """
    return _ratio(correct, total)


def mae(absolute_error: Any, total: Any) -> float:
    """Return the mean absolute error over all workers, from this worker's sum of absolute errors and its rows."""
    return _ratio(absolute_error, total)


def mse(squared_error: Any, total: Any) -> float:
    """Return the mean squared error over all workers, from this worker's sum of squared errors and its rows."""
    return _ratio(squared_error, total)


def rmse(squared_error: Any, total: Any) -> float:
    """Return the root of `mse`."""
    return math.sqrt(_ratio(squared_error, total))


def auc(positive: Any, negative: Any) -> float:
    """Return the area under the ROC curve over all workers, from histograms of the scores.

    Exact but for scores that share a bin, which count as equal: half a win for the pair.

    Args:
        positive: How many rows with label 1 this worker saw in each bin of the score, lowest first, shape (bins,).
        negative: The same for label 0.

    Returns:
        0 to 1; NaN when no worker saw a row of one of the labels.

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


def area_under_roc(positives: Tensor, negatives: Tensor) -> float:
    """Return the area under the ROC curve from how many rows of each label have each score, lowest first; NaN if none.

    Counted in whole numbers, so the same wherever and in which order rows were counted.
    """
    pairs = int(positives.sum()) * int(negatives.sum())
    if pairs == 0:
        return math.nan
    # Twice the pairs won fits in 64 bits for up to 2 * 10**9 rows of each label.
    kind = torch.int64 if 2 * pairs < 2**63 else torch.float64
    positives, negatives = positives.to(kind), negatives.to(kind)
    below = negatives.cumsum(0) - negatives
    return (positives * (2 * below + negatives)).sum().item() / (2 * pairs)


class Auc:
    """Counts scores into the histograms that `auc` adds up over the workers.

    Memory and traffic are two times 65,536 counts, whatever the number of rows. Not collective but for `compute`.
    """

    def __init__(self) -> None:
        self.positive = torch.zeros(AUC_BINS, dtype=torch.int64)
        """Rows with label 1 by score, lowest first."""
        self.negative = torch.zeros(AUC_BINS, dtype=torch.int64)
        """Rows with label 0 by score."""

    def update(self, score: Tensor, label: Tensor) -> None:
        """Count a batch.

        Args:
            score: Probabilities, any shape of n elements.
            label: 0 or 1, as many elements.

        Raises:
            ConfigError: If there are more scores than labels, or fewer.
            DataError: If a score is not within 0 to 1 or a label neither 0 nor 1; names the row.
        """
        score, label = score.detach().reshape(-1).cpu(), label.detach().reshape(-1).cpu()
        if len(score) != len(label):
            raise ConfigError(f"Asked to count {len(score)} scores with {len(label)} labels. Give one label a score.")
        _check("score", score, ~((score >= 0) & (score <= 1)), "Give probabilities, such as logits.sigmoid()")
        _check("label", label, (label != 0) & (label != 1), "Give 0 or 1")
        bins = (score.double() * AUC_BINS).long().clamp_(max=AUC_BINS - 1)
        self.positive += torch.bincount(bins[label == 1], minlength=AUC_BINS)
        self.negative += torch.bincount(bins[label == 0], minlength=AUC_BINS)

    def compute(self) -> float:
        """Return the AUC over all workers; see `auc`. Collective."""
        return auc(self.positive, self.negative)


def _check(what: str, values: Tensor, wrong: Tensor, instead: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(f"The {what} of row {row} is {values[row].item()}. {instead}.")


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

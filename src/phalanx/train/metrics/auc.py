"""`AUC`: area under the ROC curve over all ranks, exact or from histograms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics.base import AllRanks


class AUC:
    """The chance that a sample with label 1 has a higher score than one with label 0; half for samples of equal scores.

    Exact, equal to the last bit on any number of ranks: scores of all samples are kept and compared by rank. That is 16
    bytes a sample, and when it is computed 24 bytes for each different score, on every rank. With `bins`, scores in one
    of so many equal parts of [0, 1] count as equal: memory and traffic no longer grow with the samples, and the error
    is at most half the share of pairs of samples that fall into one part (docs/evaluation.md has it measured).

    Outputs are one score a sample, shape (N,) or (N, 1), or two, shape (N, 2): the second less the first is taken.

    Args:
        bins: Parts of [0, 1], for probabilities; exact when omitted.
    """

    def __init__(self, bins: int | None = None) -> None:
        if bins is not None and bins < 2:
            raise ConfigError(f"AUC takes at least 2 bins, found {bins}. 65536 is usual.")
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []
        self.histogram = torch.zeros(2, self._bins or 0, dtype=torch.int64)
        """With `bins`, samples with label 0 and with label 1 in each part of the scores, lowest first."""

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a batch.

        Raises:
            ConfigError: If shapes do not fit.
            DataError: If a score is NaN, or outside [0, 1] with bins, or a label neither 0 nor 1; names the sample.
        """
        score, label = _score(output), target.detach().reshape(-1)
        if len(score) != len(label):
            raise ConfigError(f"Asked for the AUC of {len(score)} scores with {len(label)} labels. Give one a score.")
        _check("label", label, (label != 0) & (label != 1), "Give 0 or 1")
        if self._bins is None:
            _check("score", score, score.isnan(), "Give numbers")
            self._scores.append(score)
            self._labels.append(label.to(score.device, torch.int64))
            return
        _check("score", score, ~((score >= 0) & (score <= 1)), "Give probabilities, such as logits.sigmoid()")
        index = (score * self._bins).long().clamp_(max=self._bins - 1) + self._bins * label.long()
        self.histogram = self.histogram.to(index.device) + torch.bincount(index, minlength=2 * self._bins).view(2, -1)

    def compute(self, ranks: AllRanks) -> float:
        """Return the area, 0 to 1; NaN when no rank saw a sample of one of the labels."""
        if self._bins is not None:
            negatives, positives = ranks.sum(self.histogram).cpu()
            return area_under_roc(positives, negatives)
        scores, counts = _count_scores(*self._own())
        scores, counts = ranks.concat(scores), ranks.concat(counts)
        _, positives, negatives = _merge_counts(scores, counts)
        return area_under_roc(positives, negatives)

    def _own(self) -> tuple[Tensor, Tensor]:
        if not self._scores:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return torch.cat(self._scores).cpu(), torch.cat(self._labels).cpu()


def area_under_roc(positives: Tensor, negatives: Tensor) -> float:
    """Return the area under the ROC curve from the samples of each label by score, lowest first; NaN if none.

    Counted in integers, so the same wherever and in which order samples were counted.
    """
    pairs = int(positives.sum()) * int(negatives.sum())
    if pairs == 0:
        return math.nan
    # Twice the pairs won fits in 64 bits for up to 2 * 10**9 samples of each label.
    kind = torch.int64 if 2 * pairs < 2**63 else torch.float64
    positives, negatives = positives.to(kind), negatives.to(kind)
    below = negatives.cumsum(0) - negatives
    return (positives * (2 * below + negatives)).sum().item() / (2 * pairs)


def _count_scores(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each different score once, and its samples by (label 1, label 0)."""
    unique, positives, negatives = _merge_counts(scores, torch.stack([labels, 1 - labels], 1))
    return unique, torch.stack([positives, negatives], 1)


def _merge_counts(scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    unique, inverse = torch.unique(scores, return_inverse=True)
    total = torch.zeros(len(unique), 2, dtype=torch.int64, device=scores.device).index_add_(0, inverse, counts)
    return unique, total[:, 0].cpu(), total[:, 1].cpu()


def _score(output: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim > 2 or (output.ndim == 2 and output.shape[1] > 2):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"Asked for the AUC of outputs of shape {shape}. Give one score a row, of the class 1.")
    wide = output.detach().double()
    return wide[:, 1] - wide[:, 0] if wide.ndim == 2 and wide.shape[1] == 2 else wide.reshape(-1)


def _check(what: str, values: Tensor, wrong: Tensor, instead: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(f"The {what} of row {row} of a batch is {values[row].item()}. {instead}.")

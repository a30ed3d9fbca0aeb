"""`accuracy`: top-k accuracy over all ranks.

Labels have shape (N,) or (N, 1) here. `torch.nn.functional.cross_entropy` wants (N,): pass `label.squeeze(1)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.comm import context
from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics.base import sum_over_ranks


def topk_correct(out: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """Return, sample by sample, whether the label is among the k highest scores.

    Not collective. Equal scores rank by class, the lower one first, as a stable sort of the negated scores puts
    them; NaN ranks below every number.

    Args:
        out: Scores, shape (N, C).
        label: Classes as integers, shape (N,) or (N, 1).
        k: How many scores count as hits, at least 1; with k >= C every sample is a hit.

    Returns:
        Booleans, shape (N,).

    Raises:
        ConfigError: If the shapes or types do not fit, or k < 1.
        DataError: If a label is not a class; names the sample.
    """
    label = _labels(out, label)
    if k < 1:
        raise ConfigError(f"Asked for the top {k} classes. Give k of at least 1.")
    row = label.unsqueeze(1)
    score = out.gather(1, row)
    out_nan, score_nan = out.isnan(), score.isnan()
    above = (out > score) | (score_nan & ~out_nan)
    level = (out == score) | (score_nan & out_nan)
    before = torch.arange(out.shape[1], device=out.device) < row
    return (above | (level & before)).sum(1) < k


def correct_at(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `topk_correct` for a fixed k, as a metric for `evaluate`."""
    if k < 1:
        raise ConfigError(f"Asked for the top {k} classes. Give k of at least 1.")
    return lambda out, label: topk_correct(out, label, k)


def accuracy(out: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """Return the top-k accuracy of a batch over all ranks, as a number from 0 to 1.

    Collective: every rank must call it, with its own samples. Samples a rank only loaded to keep the ranks in step
    (`Context.batch.rows` is 0) do not count, so that N ranks give what one process gives.

    Args:
        out: This rank's scores, shape (N, C).
        label: This rank's classes, shape (N,) or (N, 1).
        k: How many scores count as hits; see `topk_correct` for ties.

    Returns:
        A float32 tensor without dimensions, on the device of `out`; NaN when no rank has a sample.

    Raises:
        ConfigError: If the shapes or types do not fit, or k < 1.
        DataError: If a label is not a class; names the sample.
    """
    correct = topk_correct(out, label, k)
    count = correct.numel() if _rows_count() else 0
    counts = torch.stack([correct.sum() * bool(count), torch.tensor(count, device=out.device)])
    sum_over_ranks(counts)
    return (counts[0].double() / counts[1]).float()


def _rows_count() -> bool:
    """Return whether the samples of this rank's batch count (True without a loader)."""
    batch = context.current().batch if context.is_initialized() else None
    return batch is None or batch.rows > 0


def _labels(out: Tensor, label: Tensor) -> Tensor:
    """Return the labels as int64 (N,), or raise."""
    if out.ndim != 2:
        raise ConfigError(f"Asked for the accuracy of scores of shape {tuple(out.shape)}. Give (rows, classes).")
    if label.shape not in ((len(out),), (len(out), 1)):
        raise ConfigError(
            f"Asked for the accuracy of {len(out)} rows of scores with labels of shape {tuple(label.shape)}. "
            f"Give labels of shape ({len(out)},) or ({len(out)}, 1)."
        )
    if label.is_floating_point() or label.dtype == torch.bool:
        raise ConfigError(f"Asked for the accuracy with labels of type {label.dtype}. Give whole numbers (int64).")
    flat = label.reshape(-1).long()
    wrong = ((flat < 0) | (flat >= out.shape[1])).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"The label of row {row} is {int(flat[row])}, but the scores have {out.shape[1]} classes (0 to "
            f"{out.shape[1] - 1}). Correct the label, or build the model with more classes."
        )
    return flat

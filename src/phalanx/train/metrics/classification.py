"""`ConfusionMatrix`, `Precision`, `Recall` and `F1` over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from phalanx.errors import ConfigError, DataError
from phalanx.train.metrics.base import AllRanks

Average = Literal["binary", "micro", "macro", "weighted"]
AVERAGES = ("binary", "micro", "macro", "weighted")


class Confusion:
    """How often each class was taken for each; `str()` is a table with true classes in rows."""

    def __init__(self, counts: Tensor, names: Sequence[str] | None = None) -> None:
        self.counts = counts
        """Rows by [true class, predicted class], int64 on the CPU, shape (classes, classes)."""

        self.names = list(names) if names else [str(number) for number in range(len(counts))]

    @property
    def accuracy(self) -> float:
        """Share of samples on the diagonal; NaN without samples."""
        rows = int(self.counts.sum())
        return int(self.counts.trace()) / rows if rows else math.nan

    def __rich__(self) -> Table:
        table = Table("true \\ predicted", title=f"{int(self.counts.sum())} rows, accuracy {self.accuracy:.4f}")
        for name in self.names:
            table.add_column(name, justify="right")
        table.add_column("recall", justify="right")
        for name, row, recall in zip(self.names, self.counts.tolist(), self._shares(1), strict=True):
            table.add_row(name, *map(str, row), recall)
        table.add_section()
        table.add_row("precision", *self._shares(0), "")
        return table

    def _shares(self, dim: int) -> list[str]:
        right, rows = self.counts.diagonal().tolist(), self.counts.sum(dim).tolist()
        return [f"{a / b:.3f}" if b else "-" for a, b in zip(right, rows, strict=True)]

    def __str__(self) -> str:
        widest = 200
        console = Console(width=widest, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __repr__(self) -> str:
        return f"Confusion({self.counts.tolist()})"


class ConfusionMatrix:
    """Counts true and predicted classes; the result is a `Confusion`.

    Outputs are scores of shape (N, classes), of which the highest is the prediction (the first of several); or one
    score a sample, shape (N,) or (N, 1), which is class 1 above `threshold`; or integers of shape (N,), the classes.

    Args:
        classes: How many classes there are; as many as scores when omitted, 2 for one score a sample.
        names: Their names, for the table.
        threshold: Score above which a sample with one score is class 1: 0.5 for probabilities, 0.0 for logits.
    """

    def __init__(
        self, classes: int | None = None, *, names: Sequence[str] | None = None, threshold: float = 0.5
    ) -> None:
        if names is not None:
            if classes is not None and classes != len(names):
                raise ConfigError(f"asked for {classes} classes with {len(names)} names. Give each class one name.")
            classes = len(names)
        if classes is not None and classes < 2:
            raise ConfigError(f"asked to tell {classes} classes apart. Give at least 2.")
        self._asked, self._names, self._threshold = classes, names, threshold
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self.counts = torch.zeros(0, 0, dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a batch.

        Raises:
            ConfigError: If shapes do not fit.
            DataError: If a label is no class; names the sample.
        """
        predicted, classes = _predict_classes(output, self._threshold, self._asked)
        label = _flat_labels(target, predicted, classes)
        if self.counts.numel() == 0:
            self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=predicted.device)
        self.counts += torch.bincount(label * classes + predicted, minlength=classes**2).view(classes, classes)

    def compute(self, ranks: AllRanks) -> Any:
        """Return the counts of all ranks."""
        return Confusion(self._all(ranks), self._names)

    def _all(self, ranks: AllRanks) -> Tensor:
        # A rank without samples does not know how many classes there are.
        sizes = ranks.concat(torch.tensor([len(self.counts)])).tolist()
        classes = max(*sizes, self._asked or 0)
        mine = self.counts if len(self.counts) else torch.zeros(classes, classes, dtype=torch.int64)
        if set(sizes) - {0, classes}:
            raise ConfigError(
                f"ranks saw outputs of {sorted(set(sizes) - {0})} classes. Give classes= the largest number."
            )
        return ranks.sum(mine).cpu()


class _CountMetric(ConfusionMatrix):
    """A number from the counts of classes."""

    def __init__(self, average: Average | None = None, *, classes: int | None = None, threshold: float = 0.5) -> None:
        if average is not None and average not in AVERAGES:
            raise ConfigError(f"{type(self).__name__} knows the averages {', '.join(AVERAGES)}, found {average!r}.")
        self._average = average
        super().__init__(classes, threshold=threshold)

    def compute(self, ranks: AllRanks) -> float:
        """Return the value over the samples of all ranks; NaN without samples."""
        counts = self._all(ranks)
        right, predicted, true = (x.tolist() for x in (counts.diagonal(), counts.sum(0), counts.sum(1)))
        average = self._average or ("binary" if len(right) == 2 else "macro")
        if not sum(true):
            return math.nan
        if average == "binary":
            if len(right) != 2:
                raise ConfigError(
                    f"{type(self).__name__} is 'binary' for 2 classes, found {len(right)}. Use 'macro' or 'micro'."
                )
            return self.of(right[1], predicted[1], true[1])
        if average == "micro":
            return self.of(sum(right), sum(predicted), sum(true))
        present = [number for number in range(len(right)) if predicted[number] or true[number]]
        values = [self.of(right[number], predicted[number], true[number]) for number in present]
        weights = [true[number] for number in present] if average == "weighted" else [1] * len(present)
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    @staticmethod
    def of(right: int, predicted: int, true: int) -> float:
        """Return the value of one class from its rows: rightly predicted, predicted, and true."""
        raise NotImplementedError


class Precision(_CountMetric):
    """Share of the samples predicted as a class that are of it; 0 where none was.

    Args:
        average: `binary` (of class 1), `micro` (of all samples together), `macro` (the mean over the classes that
            occur) or `weighted` (that mean by samples); `binary` for 2 classes and `macro` for more when omitted.
        classes: As `ConfusionMatrix` takes it.
        threshold: Likewise.
    """

    @staticmethod
    def of(right: int, predicted: int, true: int) -> float:
        """Return right / predicted."""
        return right / predicted if predicted else 0.0


class Recall(_CountMetric):
    """Share of the samples of a class predicted as it; 0 where there are none. Arguments as for `Precision`."""

    @staticmethod
    def of(right: int, predicted: int, true: int) -> float:
        """Return right / true."""
        return right / true if true else 0.0


class F1(_CountMetric):
    """The harmonic mean of precision and recall; 0 where both are. Arguments as for `Precision`."""

    @staticmethod
    def of(right: int, predicted: int, true: int) -> float:
        """Return 2 right / (predicted + true)."""
        return 2 * right / (predicted + true) if predicted + true else 0.0


def _predict_classes(output: Tensor, threshold: float, declared: int | None) -> tuple[Tensor, int]:
    """Return predicted classes, shape (N,), and how many classes there are."""
    if not isinstance(output, Tensor) or output.ndim not in (1, 2):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"Asked for the classes of outputs of shape {shape}. Give (rows, classes) or (rows,).")
    if output.ndim == 2 and output.shape[1] > 1:
        if declared not in (None, output.shape[1]):
            raise ConfigError(f"Asked for {declared} classes, and outputs have scores of {output.shape[1]}.")
        # The highest number, as `topk_correct` ranks them: NaN is below every one.
        return output.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(1), output.shape[1]
    flat = output.reshape(-1)
    if flat.is_floating_point():
        return (flat > threshold).long(), 2 if declared is None else declared
    if declared is None:
        raise ConfigError("outputs are classes, so how many there are is not known. Give classes=.")
    return _check_classes("prediction", flat.long(), declared), declared


def _flat_labels(target: Tensor, predicted: Tensor, classes: int) -> Tensor:
    if not isinstance(target, Tensor) or target.shape not in ((len(predicted),), (len(predicted), 1)):
        shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ConfigError(
            f"Asked to compare {len(predicted)} rows with labels of shape {shape}. Give ({len(predicted)},)."
        )
    label = target.reshape(-1)
    if label.is_floating_point() and not torch.equal(label, label.round()):
        raise ConfigError("labels must be whole numbers, found fractions. For regression use MAE, MSE, RMSE or R2.")
    return _check_classes("label", label.to(predicted.device).long(), classes)


def _check_classes(what: str, values: Tensor, classes: int) -> Tensor:
    wrong = ((values < 0) | (values >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"The {what} of row {row} of a batch is {int(values[row])}, and there are {classes} classes (0 to "
            f"{classes - 1}). Correct it, or give classes= the right number."
        )
    return values

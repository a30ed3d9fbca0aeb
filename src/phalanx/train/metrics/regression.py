"""`MAE`, `MSE`, `RMSE` and `R2` over all ranks."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.train.metrics.base import AllRanks
from phalanx.train.metrics.exact_sum import ExactSum, quotient


class _ErrorMetric:
    """Sums over predictions and targets; the same on any number of ranks, to the last bit."""

    sums = 1

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._sums = [ExactSum() for _ in range(self.sums)]
        self._numbers = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            output: Predictions, any shape.
            target: As many numbers; (N,) and (N, 1) go together.
        """
        prediction, target_values = _same_shape(output, target)
        for total, values in zip(self._sums, self.terms(prediction, target_values), strict=True):
            total.add(values)
        self._numbers += target_values.numel()

    def compute(self, ranks: AllRanks) -> float:
        """Return the value over the samples of all ranks; NaN without samples."""
        device = self._sums[0].total.device
        totals = torch.cat([*(x.total for x in self._sums), torch.tensor([self._numbers], device=device)])
        totals = ranks.sum(totals)
        parts = totals[:-1].view(self.sums, -1)
        return self.of([ExactSum.value(part) for part in parts], int(totals[-1]))

    def terms(self, prediction: Tensor, target_values: Tensor) -> tuple[Tensor, ...]:
        """Return what is added up, in float64."""
        raise NotImplementedError

    def of(self, sums: list[Fraction | float], numbers: int) -> float:
        """Return the value from the sums."""
        return quotient(sums[0], numbers)


class MAE(_ErrorMetric):
    """The mean absolute error."""

    def terms(self, prediction: Tensor, target_values: Tensor) -> tuple[Tensor, ...]:
        """Return absolute errors."""
        return ((prediction - target_values).abs(),)


class MSE(_ErrorMetric):
    """The mean squared error."""

    def terms(self, prediction: Tensor, target_values: Tensor) -> tuple[Tensor, ...]:
        """Return squared errors."""
        return ((prediction - target_values).square(),)


class RMSE(MSE):
    """The root of the mean squared error."""

    def of(self, sums: list[Fraction | float], numbers: int) -> float:
        """Return the root of the mean."""
        return math.sqrt(quotient(sums[0], numbers))


class R2(_ErrorMetric):
    """The share of the targets' variance that predictions explain: 1 - squared errors / squared distances to the mean.

    1 for perfect predictions of equal targets, and 0 for imperfect ones, as scikit-learn has it.
    """

    sums = 3

    def terms(self, prediction: Tensor, target_values: Tensor) -> tuple[Tensor, ...]:
        """Return squared errors, targets, and their squares."""
        return (prediction - target_values).square(), target_values, target_values.square()

    def of(self, sums: list[Fraction | float], numbers: int) -> float:
        """Return the share. Fractions do not cancel, however far the targets are from 0."""
        errors, total, squares = sums
        if not all(isinstance(x, Fraction) for x in sums) or numbers < 2:
            return math.nan
        spread = Fraction(squares) - Fraction(total) ** 2 / numbers
        if spread <= 0:
            return 0.0 if errors else 1.0
        return float(1 - Fraction(errors) / spread)


def _same_shape(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.numel() != target.numel():
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (output, target)]
        raise ConfigError(
            f"Asked for the error of predictions of shape {shapes[0]} for targets of shape {shapes[1]}. Give one "
            "number for each."
        )
    if tuple(output.shape) not in (tuple(target.shape), (*target.shape, 1), tuple(target.shape[:-1])):
        raise ConfigError(
            f"Asked for the error of predictions {tuple(output.shape)} for targets {tuple(target.shape)}: the same "
            "numbers in another shape. Bring one into the other's shape."
        )
    target_values = target.detach().double()
    return output.detach().double().reshape(target_values.shape), target_values

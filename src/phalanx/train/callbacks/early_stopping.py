"""`EarlyStopping`: stop when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from phalanx.comm.agreement import share
from phalanx.errors import ConfigError, did_you_mean
from phalanx.train.callbacks.base import Callback

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run

Mode = Literal["min", "max"]

_SMALLER_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "perplexity")


def better_when(metric: str, mode: Mode | None) -> Mode:
    """Return whether a metric is better when it is smaller (`min`) or larger: by its name, unless a mode is given."""
    if mode not in (None, "min", "max"):
        raise ConfigError(f"mode says when a metric is better, 'min' or 'max', found {mode!r}. Give one of them.")
    return mode or ("min" if any(word in metric.lower() for word in _SMALLER_IS_BETTER) else "max")


def check_followed(evaluated: Collection[str], name: str, asker: str) -> None:
    """Raise unless a metric is among those of the evaluation.

    Raises:
        ConfigError: Names those that are.
    """
    if name not in evaluated:
        raise ConfigError(
            f"{asker} follows the metric {name!r}, and the evaluation gives {', '.join(evaluated) or 'none'}."
            f"{did_you_mean(name, evaluated)} Evaluate it too, or follow another."
        )


def metric_of(metrics: Mapping[str, Any], name: str, asker: str) -> float:
    """Return a metric of an evaluation as a number.

    Raises:
        ConfigError: If it was not evaluated, or is no number.
    """
    check_followed(metrics, name, asker)
    try:
        return float(metrics[name])
    except (TypeError, ValueError):
        raise ConfigError(
            f"{asker} follows {name!r}, which is a {type(metrics[name]).__name__} and not one number. Follow another."
        ) from None


class BestMetric:
    """The best value of a metric so far."""

    def __init__(self, metric: str, mode: Mode | None, min_delta: float = 0.0) -> None:
        self.metric = metric
        self._sign = 1.0 if better_when(metric, mode) == "max" else -1.0
        self._min_delta = min_delta
        self.value: float | None = None

    def improves(self, value: float) -> bool:
        """Take over a value better than the best by more than `min_delta`; return whether it was. NaN never is."""
        if math.isnan(value):
            return False
        if self.value is not None and self._sign * (value - self.value) <= self._min_delta:
            return False
        self.value = value
        return True


class EarlyStopping(Callback):
    """Stops training on all ranks after `patience` evaluations in a row in which a metric got no better.

    Args:
        monitor: Name of the metric of the evaluation.
        patience: Evaluations without an improvement that end training.
        mode: `min` or `max`, when the metric is better; by its name when omitted: `min` for losses and errors.
        min_delta: By how much it must get better to count.
    """

    needs_evaluation = True

    def __init__(
        self, monitor: str = "loss", *, patience: int = 3, mode: Mode | None = None, min_delta: float = 0.0
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise ConfigError(
                f"EarlyStopping takes a patience of at least 1 and a min_delta of at least 0, found {patience} and "
                f"{min_delta}."
            )
        self._terms = monitor, mode, min_delta
        self._patience = patience
        self._best = BestMetric(*self._terms)
        self.waited = 0
        """Evaluations since the last that was better."""

    @property
    def best(self) -> float | None:
        """Best value so far."""
        return self._best.value

    def setup(self, run: Run) -> None:
        """Find out now, not after an epoch, that the metric is none of the evaluation."""
        if run.evaluated is not None:
            check_followed(run.evaluated, self._best.metric, "EarlyStopping")

    def on_train_begin(self, run: Run) -> None:
        """Reset, unless a checkpoint was loaded."""
        if run.resumed_from is None:
            self._best, self.waited = BestMetric(*self._terms), 0

    def on_eval_end(self, run: Run) -> None:
        """Compare, and stop when patience is at its end."""
        value = metric_of(run.metrics, self._best.metric, "EarlyStopping")
        value = float(share("EarlyStopping", str(value)))  # as text: JSON knows no NaN
        self.waited = 0 if self._best.improves(value) else self.waited + 1
        if self.waited >= self._patience:
            best = "one" if self._best.value is None else f"{self._best.value:.6g}"
            times = f"{self.waited} evaluation{'s' * (self.waited != 1)}"
            run.stop(f"{self._best.metric} got no better than {best} in the last {times} (now {value:.6g})")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"best": self._best.value, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        self._best.value, self.waited = state["best"], state["waited"]

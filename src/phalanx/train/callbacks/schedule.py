"""`LearningRateSchedule`: step a torch learning-rate scheduler after every update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.checkpoint.state.capture import load_scheduler
from phalanx.errors import ConfigError
from phalanx.train.callbacks.base import Callback
from phalanx.train.callbacks.early_stopping import check_followed, metric_of

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class LearningRateSchedule(Callback):
    """Steps a learning-rate scheduler of torch once an update, whatever the number of ranks.

    An update is an `optimizer.step()` that changed parameters: under gradient_merge one in so many batches, in sink
    mode every step inside the sink. So a schedule over `T_max=1000` lasts 1000 updates on 1 rank and on 8.

        px.LearningRateSchedule(lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000))

    Args:
        scheduler: A scheduler of the optimizer that trains, or a function that makes one.
        every: `update`, or `epoch` to step at the end of each.
        monitor: The metric a `ReduceLROnPlateau` follows; it steps after each evaluation.

    Raises:
        ConfigError: If `every` is another word, or a metric is given to, or missing for, a scheduler.
    """

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler],
        *,
        every: Literal["update", "epoch"] = "update",
        monitor: str | None = None,
    ) -> None:
        if every not in ("update", "epoch"):
            raise ConfigError(f"LearningRateSchedule steps every 'update' or 'epoch', found {every!r}. Give one.")
        self._given, self._every, self._monitor = scheduler, every, monitor
        self.needs_evaluation = monitor is not None
        self._scheduler: LRScheduler | None = None

    @property
    def scheduler(self) -> LRScheduler:
        """The scheduler; available once training has started."""
        if self._scheduler is None:
            raise ConfigError("LearningRateSchedule has no scheduler before training began. Ask for it afterwards.")
        return self._scheduler

    def setup(self, run: Run) -> None:
        """Make the scheduler, or check that it is of the optimizer that trains."""
        if self._monitor is not None and run.evaluated is not None:
            check_followed(run.evaluated, self._monitor, "LearningRateSchedule")
        source = self._given
        scheduler = source if isinstance(source, LRScheduler) else source(run.optimizer)
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"LearningRateSchedule takes a scheduler of torch.optim.lr_scheduler, or a function that makes one of "
                f"an optimizer, found {type(scheduler).__name__}."
            )
        if scheduler.optimizer is not run.optimizer:
            raise ConfigError(
                f"the {type(scheduler).__name__} was made for another optimizer than the one that trains. Give a "
                f"function: LearningRateSchedule(lambda optimizer: {type(scheduler).__name__}(optimizer, ...))."
            )
        if isinstance(scheduler, ReduceLROnPlateau) != (self._monitor is not None):
            raise ConfigError(
                f"monitor={self._monitor!r} was given for a {type(scheduler).__name__}. ReduceLROnPlateau needs the "
                "name of a metric, and no other scheduler takes one."
            )
        self._scheduler = scheduler

    def on_update(self, run: Run) -> None:
        """Step, if it steps with updates."""
        if self._every == "update" and self._monitor is None:
            self._step()

    def on_epoch_end(self, run: Run) -> None:
        """Step, if it steps with epochs."""
        if self._every == "epoch" and self._monitor is None:
            self._step()

    def on_eval_end(self, run: Run) -> None:
        """Step, if it follows a metric."""
        if self._monitor is not None:
            self._step(metric_of(run.metrics, self._monitor, "LearningRateSchedule"))

    def _step(self, *metric: Any) -> None:
        # torch marks the calls of optimizer.step, but not those of a step that was compiled or bound before.
        self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scheduler.step(*metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        load_scheduler(self.scheduler, state)

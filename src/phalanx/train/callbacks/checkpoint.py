"""`ModelCheckpoint`: save checkpoints during training, keep the best, save on SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint import background as background_saves
from phalanx.checkpoint.saving import save_training
from phalanx.errors import ConfigError
from phalanx.train.callbacks.base import Callback
from phalanx.train.callbacks.early_stopping import BestMetric, Mode, check_followed, metric_of
from phalanx.train.callbacks.measure import StepInterval

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run

logger = logging.getLogger("phalanx.train")


class ModelCheckpoint(Callback):
    """Saves model, optimizer, data position, random numbers and the state of all callbacks, as `px.save` does.

    Saves every so many steps or epochs and at the end of training. From the beginning of training, SIGTERM does not end
    the process: all ranks save after the same step and exit with code 0, also when only one of them got it.

        saver = px.ModelCheckpoint("runs/a", every_steps=500, best="acc1")
        model.train(10, data, callbacks=[saver], valid_dataset=test, resume="runs/a")

    Args:
        folder: Folder of checkpoints, seen by all ranks.
        every_steps: Updates from one save to the next, in sink mode the ends of sinks that hold one.
        every_epochs: Epochs from one save to the next; 1 when neither is given, 0 for none.
        keep: How many checkpoints to keep; all when None.
        best: A metric of the evaluation: the checkpoint with its best value is kept in `folder/best` beside the others.
        mode: `min` or `max`, when that metric is better; by its name when omitted: `min` for losses and errors.
        background: Whether to write while training continues.
    """

    acts_last = True

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: Mode | None = None,
        background: bool = True,
    ) -> None:
        if every_epochs is not None and every_epochs < 0:
            raise ConfigError(f"every_epochs is a number of epochs, found {every_epochs}. Give 0 for none, or more.")
        if mode is not None and best is None:
            raise ConfigError(f"mode={mode!r} was given without best=. Name the metric.")
        if keep is not None and keep < 1:
            raise ConfigError(f"keep is a number of checkpoints, found {keep}. Give at least 1, or None for all.")
        self.folder = Path(folder)
        self._pace = StepInterval(every_steps, "every_steps")
        self._every_epochs = (1 if every_steps is None else 0) if every_epochs is None else every_epochs
        self._keep, self._background = keep, background
        self._best = None if best is None else BestMetric(best, mode)
        self.needs_evaluation = best is not None
        self._saved_at: tuple[int, int] | None = None

    @property
    def best(self) -> float | None:
        """The best value of the metric so far."""
        return None if self._best is None else self._best.value

    def setup(self, run: Run) -> None:
        """Find out now, not after hours, that the folder is none, or the metric none of the evaluation."""
        if self.folder.is_file():
            raise ConfigError(f"ModelCheckpoint saves to a folder, and {self.folder} is a file. Name another.")
        if self._best is not None and run.evaluated is not None:
            check_followed(run.evaluated, self._best.metric, "ModelCheckpoint")

    def on_train_begin(self, run: Run) -> None:
        """Take SIGTERM as a request to save and end."""
        run.stop_on_signal()
        self._pace.restart(run.step)
        self._saved_at = None
        if self._best is not None and run.resumed_from is None:
            self._best.value = None

    def on_step_end(self, run: Run) -> None:
        """Save a step that is due."""
        if self._pace.is_due(run.step):
            self._save(run)

    def on_eval_end(self, run: Run) -> None:
        """Save the best so far."""
        best = self._best
        if best is not None and best.improves(metric_of(run.metrics, best.metric, "ModelCheckpoint")):
            self._write(run, self.folder / "best", keep=1)

    def on_epoch_end(self, run: Run) -> None:
        """Save an epoch that is due."""
        if self._every_epochs and (run.epoch + 1) % self._every_epochs == 0:
            self._save(run)

    def on_train_end(self, run: Run) -> None:
        """Save the end, and wait until all is written."""
        self._save(run)
        background_saves.wait()
        if run.was_signalled and run.rank == 0:
            logger.info("asked to end: saved at step %d in %s", run.step, self.folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return {} if self._best is None else {"best": self._best.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        if self._best is not None:
            self._best.value = state["best"]

    def _save(self, run: Run) -> None:
        # An epoch's end is another place than its last step: the next pass resumes from there.
        if self._saved_at != (position := (run.step, run.loader.epoch)):
            self._write(run, self.folder, self._keep)
            self._saved_at = position

    def _write(self, run: Run, folder: Path, keep: int | None) -> None:
        save_training(
            folder, run.training, step=run.step, extra={"run": run.state_dict()}, background=self._background, keep=keep
        )


def checkpoint_folder(callbacks: Iterable[Callback]) -> Path:
    """Return the folder in which the callbacks save checkpoints.

    Raises:
        ConfigError: If they save none, or in several folders.
    """
    folders = [callback.folder for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if len(folders) != 1:
        raise ConfigError(
            f"resume=True resumes from the folder of the ModelCheckpoint among the callbacks, found {len(folders)}. "
            "Name the folder: resume='runs/a'."
        )
    return folders[0]

"""`ProgressBar`: a progress bar on a terminal, progress lines in a file."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from phalanx.train.callbacks.base import Callback
from phalanx.train.callbacks.measure import Throughput

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run

logger = logging.getLogger("phalanx.train")

LOOKS_PER_EPOCH = 20
"""How often the loss is asked for in an epoch, which is a host round trip on every rank."""

LINE_EVERY_S = 5.0
"""Seconds between two lines in a file."""


class ProgressBar(Callback):
    """Shows batches of the epoch, the loss over all ranks, and samples/s of all ranks in this epoch; on rank 0 only.

    On a terminal a bar; where standard output is a file or pipe, as under a launcher, a log line now and then and at
    the end of each epoch.
    """

    acts_last = True

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_look = 0
        self._loss = ""
        self._line_at = 0.0
        self._speed = Throughput()

    def on_train_begin(self, run: Run) -> None:
        """Open the bar where there is a terminal."""
        if run.rank == 0 and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
                console=Console(file=sys.stdout),
            )
            self._bar.start()

    def on_epoch_begin(self, run: Run) -> None:
        """Begin a bar for the epoch."""
        self._next_look = run.batches
        self._speed.restart(run)
        self._line_at = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(_epoch(run), total=run.steps_per_epoch, completed=run.batches, said="")

    def on_step_end(self, run: Run) -> None:
        """Move on; ask for the loss now and then, at the same steps on all ranks."""
        if run.batches >= self._next_look:
            self._next_look = run.batches + max(1, (run.steps_per_epoch or 1000) // LOOKS_PER_EPOCH)
            self._loss = f"loss {run.global_loss():.4g}"
            self._show(run)
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=run.batches)

    def on_epoch_end(self, run: Run) -> None:
        """Show the end of the epoch, and the evaluation that came before it."""
        if run.loss is not None:
            self._loss = f"loss {run.global_loss():.4g}"
            self._show(run, is_end=True)

    def on_train_end(self, run: Run) -> None:
        """Leave the bars where they are."""
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _show(self, run: Run, *, is_end: bool = False) -> None:
        if run.rank != 0:
            return
        # Where an epoch ends, its own line follows; a sink of an epoch without a length ends there too.
        is_last = run.batches == run.steps_per_epoch or run.steps_in_sink > run.batches
        is_early = is_last or time.monotonic() - self._line_at < LINE_EVERY_S
        if self._bar is None and not is_end and is_early:
            return
        text = f"{self._loss}  {self._speed.mean(run):,.0f} samples/s"
        if is_end and (shown := {name: value for name, value in run.metrics.items() if isinstance(value, float)}):
            text += "  eval" + "".join(f" {name} {value:.4g}" for name, value in shown.items())
        of = f"/{run.steps_per_epoch}" if run.steps_per_epoch else ""
        line = f"{_epoch(run)}  {run.batches}{of}  {text}"
        if self._bar is None or self._task is None:
            self._line_at = time.monotonic()
            logger.info("%s", line)
        elif is_end:  # a line stays of each epoch, above the bar of the next
            self._bar.remove_task(self._task)
            self._bar.console.print(line, highlight=False)
        else:
            self._bar.update(self._task, completed=run.batches, said=text)


def _epoch(run: Run) -> str:
    return f"epoch {run.epoch + 1}/{run.epochs}"

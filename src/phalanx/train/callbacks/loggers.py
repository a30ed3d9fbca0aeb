"""`CSVLogger`, `JSONLogger` and `TensorBoard`: metric loggers on rank 0."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from phalanx.errors import ConfigError
from phalanx.train.callbacks.base import Callback
from phalanx.train.callbacks.measure import StepInterval, Throughput, values_of
from phalanx.train.metrics.classification import Confusion

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class RunRecorder(Callback):
    """Collects the numbers of a run every so many steps and after each epoch, and hands them on, on rank 0.

    Every row has epoch, step (from 0), samples, loss over all ranks, learning rate and samples/s of all ranks; the rows
    of epochs have the metrics of the evaluation too.

    Args:
        every_steps: Updates from one row to the next beside those of epochs, in sink mode the ends of sinks that hold
            one; rows of epochs only when omitted.
    """

    acts_last = True

    def __init__(self, every_steps: int | None = None) -> None:
        self._pace = StepInterval(every_steps, "every_steps")
        self._speed = Throughput()
        self._written_at = -1

    def on_train_begin(self, run: Run) -> None:
        """Open what is written to."""
        self._pace.restart(run.step)
        self._speed.restart(run)
        self._written_at = -1
        if run.rank == 0:
            self.open(run)

    def on_step_end(self, run: Run) -> None:
        """Record a step that is due."""
        if self._pace.is_due(run.step):
            self._record(run, {})

    def on_epoch_end(self, run: Run) -> None:
        """Record the epoch."""
        self._record(run, run.metrics)

    def _record(self, run: Run, metrics: Any) -> None:
        values = values_of(run, self._speed)  # on all ranks: it is collective
        if run.rank == 0:
            self.write({**values, **{f"eval/{name}": _plain(value) for name, value in metrics.items()}})

    @abstractmethod
    def open(self, run: Run) -> None:
        """Open what is written to; on rank 0."""

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None:
        """Write one row; on rank 0."""


class FileRecorder(RunRecorder):
    """Records to one file: a new one, or appended to if training is resumed or continued by another call."""

    def __init__(self, path: str | Path, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        self.path = Path(path)
        self._file: TextIO | None = None
        self._was_open = False

    def open(self, run: Run) -> None:
        """Open the file; its folder is created if missing."""
        if self.path.is_dir():
            raise ConfigError(
                f"{type(self).__name__} writes to a file, and {self.path} is a folder. Name a file in it."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if run.resumed_from is not None and self.path.exists():
            self.truncate(run.step)  # rows after the checkpoint come again
        elif not self._was_open:
            self.path.unlink(missing_ok=True)
        self._was_open = True
        self._file = self.path.open("a", encoding="utf-8", newline="", buffering=1)

    @abstractmethod
    def truncate(self, step: int) -> None:
        """Remove the rows of a step and later ones from the file."""

    @property
    def file(self) -> TextIO:
        """The open file."""
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JSONLogger(FileRecorder):
    """Writes one JSON object a line to `path`: `{"epoch": 0, "step": 194, "loss": 1.997, "eval/acc1": 0.31, ...}`."""

    def truncate(self, step: int) -> None:
        """Remove the lines of a step and later ones, and one that a kill cut short."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        self.path.write_text("".join(line for line in whole if json.loads(line)["step"] < step), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(finite) + "\n")


class CSVLogger(FileRecorder):
    """Writes a table with a header to `path`, one row each time; a column that comes later is empty in rows before."""

    def __init__(self, path: str | Path, every_steps: int | None = None) -> None:
        super().__init__(path, every_steps)
        self._columns: list[str] = []

    def open(self, run: Run) -> None:
        """Open the file, and read its header if there is one."""
        super().open(run)
        with self.path.open(encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file), [])

    def truncate(self, step: int) -> None:
        """Remove the rows of a step and later ones, and one that a kill cut short."""
        with self.path.open(encoding="utf-8", newline="") as file:
            header, *rows = [*csv.reader(line for line in file if line.endswith("\n"))] or [[]]
        at = header.index("step") if header else 0
        with self.path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in rows if int(row[at]) < step)] if header else [])

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; rewrite the table when it has new columns, which is rare."""
        if new := [name for name in row if name not in self._columns]:
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self.file.seek(0)
            self.file.truncate()
            writer = csv.DictWriter(self.file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        csv.DictWriter(self.file, self._columns).writerow(row)


class TensorBoard(RunRecorder):
    """Writes `train/loss`, `train/lr`, `train/samples_per_s` and `eval/<metric>` over steps for TensorBoard.

    Look at them with `tensorboard --logdir <folder>`.

    Args:
        folder: Where event files go.
        every_steps: Updates from one point to the next, in sink mode the ends of sinks that hold one; one point an
            epoch when omitted.

    Raises:
        ConfigError: If the package tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorBoard needs the package tensorboard, which is not installed. Run "
                "`pip install 'phalanx[tensorboard]'`, or use CSVLogger or JSONLogger."
            )
        self.folder = Path(folder)
        self._writer: Any = None

    def open(self, run: Run) -> None:
        """Begin an event file; points after the step of a resumed checkpoint, of the run before, are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # over a second

        purge = run.step if run.resumed_from is not None else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)

    def write(self, row: dict[str, Any]) -> None:
        """Add a point to each curve."""
        for name, value in row.items():
            if name not in ("epoch", "step", "samples") and isinstance(value, (int, float)):
                curve = name if name.startswith("eval/") else f"train/{name}"
                self._writer.add_scalar(curve, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _plain(value: Any) -> Any:
    if isinstance(value, Confusion):
        value = value.counts
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, (int, float, str, list)) else str(value)

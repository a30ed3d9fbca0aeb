"""`TensorBoard`: curves of a run for TensorBoard, written by rank 0."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError
from phalanx.train.callbacks.records import Recorder

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class TensorBoard(Recorder):
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

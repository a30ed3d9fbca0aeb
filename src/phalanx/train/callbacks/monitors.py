"""`LossMonitor` and `TimeMonitor`: print the loss of steps and the time of epochs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.train.callbacks.base import Callback
from phalanx.train.callbacks.measure import StepInterval, show

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


class LossMonitor(Callback):
    """Prints `global_step: 194, loss: 1.997`: the step counted from 0, and the mean loss of its batch on all ranks.

    Args:
        per_print_times: Steps from one line to the next, in sink mode the ends of sinks that hold one; the last step of
            each epoch when omitted.
    """

    def __init__(self, per_print_times: int | None = None) -> None:
        self._pace = StepInterval(per_print_times, "per_print_times")
        self._by_epoch = per_print_times is None

    def on_train_begin(self, run: Run) -> None:
        """Begin to count."""
        self._pace.restart(run.step)

    def on_step_end(self, run: Run) -> None:
        """Print a step that is due."""
        if self._pace.is_due(run.step):
            self._print(run)

    def on_epoch_end(self, run: Run) -> None:
        """Print the last step of the epoch."""
        if self._by_epoch and run.loss is not None:
            self._print(run)

    def _print(self, run: Run) -> None:
        loss = run.global_loss()  # on all ranks: it is collective
        show(run.rank, f"global_step: {run.step - 1}, loss: {loss:.3f}")


class TimeMonitor(Callback):
    """Prints `epoch time: 5021.114 ms, per step time: 25.749 ms` after each epoch, as rank 0 sees it.

    An evaluation after the epoch does not count. Steps that compiled something are reported separately, here and in the
    line after training, `training 50.2 s in 1950 steps, compiling 212.6 s`.
    """

    def __init__(self) -> None:
        self._started = self._ended = 0.0
        self._first_step = self._step_before = 0
        self._compiled_before = 0.0

    def on_train_begin(self, run: Run) -> None:
        """Begin to count."""
        self._step_before = run.step

    def on_epoch_begin(self, run: Run) -> None:
        """Start the clock."""
        self._started = self._ended = time.perf_counter()
        self._first_step, self._compiled_before = run.step, run.compile_s

    def on_step_end(self, run: Run) -> None:
        """Stop it, for now."""
        self._ended = time.perf_counter()

    def on_epoch_end(self, run: Run) -> None:
        """Print the time."""
        steps = run.step - self._first_step
        if steps == 0:
            return
        whole, compiling = self._ended - self._started, run.compile_s - self._compiled_before
        line = f"epoch time: {whole * 1e3:.3f} ms, per step time: {(whole - compiling) / steps * 1e3:.3f} ms"
        show(run.rank, line + (f" without {compiling:.1f} s of compiling" if compiling else ""))

    def on_train_end(self, run: Run) -> None:
        """Print the time of it all."""
        if steps := run.step - self._step_before:
            line = f"training {run.clock.seconds - run.compile_s:.1f} s in {steps} steps"
            show(run.rank, line + (f", compiling {run.compile_s:.1f} s" if run.compile_s else ""))

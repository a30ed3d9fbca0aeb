"""`EventStream`: per-rank JSON lines of steps, losses and speed, read by `phalanx ps` and the console."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from phalanx.comm.events.event_file import EVENTS_VARIABLE, append_line, open_events
from phalanx.errors import ConfigError
from phalanx.parallel import session

MIN_INTERVAL_S = 0.2
"""Reports closer together than this are counted, not written, so that reporting costs nothing per step."""

RowsRead = Callable[[], tuple[int, int] | None]
"""Returns an epoch and the samples of it that all ranks have read; None where nobody counts them."""

Facts = Callable[[], Mapping[str, float | int | str]]


class EventStream:
    """Appends events to one file; does nothing when there is no file to append to."""

    def __init__(self, path: str | None, rows_read: RowsRead = lambda: None) -> None:
        self._file: BinaryIO | None = _open(path) if path else None
        self._last_time = 0.0
        self._rows_read = rows_read
        self._rows: tuple[int, int] | None = None
        self._step = -1
        self.facts: Facts | None = None
        """Called for each event that is written: what else it holds."""

    def report(self, step: int | None = None, **values: float | int | str | torch.Tensor) -> bool:
        """Append one event; return whether it was written (False when too soon after the last, or nowhere to write)."""
        self._step = self._step + 1 if step is None else step
        now = time.time()
        if self._file is None or now - self._last_time < MIN_INTERVAL_S:
            return False
        before, self._last_time = self._last_time, now
        event = {
            "time": round(now, 3),
            "step": self._step,
            **(self.facts() if self.facts is not None else self._speed(now - before)),
        }
        if session.session.balance is not None:
            event |= session.session.balance.facts()
        event |= {name: _plain(name, v) for name, v in values.items()}  # what a script says itself goes first
        return append_line(self._file, event)

    def _speed(self, seconds: float) -> dict[str, float]:
        """Rows of all ranks a second since the last event, where both lie in one epoch of a loader that counts them."""
        before, self._rows = self._rows, self._rows_read()
        if before is None or self._rows is None or before[0] != self._rows[0] or self._rows[1] <= before[1]:
            return {}
        return {"samples_per_s": round((self._rows[1] - before[1]) / seconds, 1)}

    def close(self) -> None:
        """Close the file; reports afterwards are counted only."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: str) -> BinaryIO | None:
    """Return the file; None where its folder is gone."""
    try:
        return open_events(path)
    except OSError as problem:
        warnings.warn(f"Nothing of this run is reported: {path} cannot be written, {problem.strerror}.", stacklevel=4)
        return None


_stream: EventStream | None = None


def tell_loss(loss: torch.Tensor) -> None:
    """Let updates that follow the loss know this step's, before the optimizer's step."""
    session.observe_loss(loss)


def report(step: int | None = None, **values: float | int | str | torch.Tensor) -> bool:
    """Tell whoever watches this run (`phalanx ps`, the console) where it is.

    Not collective; each rank writes its own file, at most five times a second. Without a launcher there is no file and
    nothing happens.

    Args:
        step: Optimizer step, counted from 0; one more than at the last report when omitted.
        **values: Numbers, words or one-element tensors, such as `loss=loss`.

    Returns:
        Whether the event was written.

    Raises:
        ConfigError: If a value is neither.
    """
    if "loss" in values:
        tell_loss(torch.as_tensor(values["loss"]))
    return _own().report(step, **values)


def run_reports(facts: Facts | None) -> None:
    """Let a run that reports its own steps take over: events hold its `facts` too, and steps report no more.

    Args:
        facts: Called for each event that is written; None ends it.
    """
    _own().facts = facts


def report_step(step: int, loss: torch.Tensor) -> bool:
    """Report a single step of `px.train_step`, unless a run reports them."""
    stream = _own()
    return stream.facts is None and stream.report(step, loss=loss)


def report_run(step: int, loss: torch.Tensor) -> bool:
    """Report a step of the run that called `run_reports`."""
    return _own().report(step, loss=loss)


def _own() -> EventStream:
    global _stream
    if _stream is None:
        _stream = EventStream(os.environ.get(EVENTS_VARIABLE), _rows_read)
    return _stream


def _rows_read() -> tuple[int, int] | None:
    loader = session.session.loader
    if loader is None or loader.has_batch_sampler:
        return None  # its batches are counted, not their samples
    state = loader.state_dict()
    return state["epoch"], state["position"]


def _plain(name: str, value: Any) -> float | int | str:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigError(f"report({name}=...) takes one number, found a tensor of shape {tuple(value.shape)}.")
        value = value.item()
    elif hasattr(value, "item"):  # numpy's scalars
        value = value.item()
    if not isinstance(value, (int, float, str)):
        raise ConfigError(f"report({name}=...) takes a number or a word, found {type(value).__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers; a reader sees "nan" or "inf"
    return value

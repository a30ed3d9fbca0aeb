"""`StepClock`: seconds that this rank computes for its part of a global batch, without waits for other ranks.

A batch counts from the moment a loop asks the loader for it until it asks for the next, or the parameters are updated:
input, forward and backward pass. The update counts apart, as it does not depend on the number of samples. What a script
does between an update and the next batch (it evaluates, saves, logs) does not count. On a GPU marks in its stream tell
the seconds, and waits for the network are what the stream waits.

A process whose cores are limited by a quota computes at full speed until the quota of a period is used up, and then not
at all until the next (CFS bandwidth control). Seconds are therefore no less than its CPU seconds divided by the cores
of the quota: what it would take if every step were as large.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from phalanx import accelerator
from phalanx.cluster.cgroup import ControlGroups
from phalanx.comm.waits.waiting import waits


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What a rank did since it was last asked."""

    batch_s: float = 0.0
    """Seconds of its batches."""

    update_s: float = 0.0
    """Seconds of its updates."""

    batches: int = 0
    rows: int = 0
    """Samples in its batches."""

    updates: int = 0

    @property
    def sample_s(self) -> float:
        """Seconds of a sample, its part of the update included; 0 if none was computed."""
        return (self.batch_s + self.update_s) / self.rows if self.rows else 0.0


class StepClock:
    """Measures batches and updates of this process. Loaders and optimizers call it.

    Args:
        device: What computes.
        groups: The control groups of this process.
    """

    def __init__(self, device: torch.device, groups: ControlGroups | None = None) -> None:
        self._groups = groups or ControlGroups()
        self._device = device if accelerator.is_accelerator(device) else None
        self._batch: _Mark | None = None
        """When the batch at hand was asked for."""

        self._has_batch = False
        self._update: _Mark | None = None
        self._rows = 0
        if self._device is not None:
            waits.mark = mark = partial(_mark_wait, self._device)  # one of its own, to end with this clock
            weakref.finalize(self, _end_marks, mark)
        self._begin()

    def _begin(self) -> None:
        self._spans: list[tuple[bool, _Mark, _Mark]] = []
        """Of batches (True) and updates."""

        self._batches = self._updates = self._counted_rows = 0
        self._groups.refresh()
        self._cores = self._groups.cores()
        self._cpu_s = 0.0
        waits.marks = []

    def begin_batch(self) -> None:
        """Note that a loop asks for a batch."""
        now = self._now()
        if self._batch is not None and self._has_batch:  # the pass of a replica, or one that accumulates gradients
            self._end_batch(now)
        self._batch, self._has_batch = now, False

    def end_input(self, rows: int | None) -> None:
        """Note that the loader has it.

        Args:
            rows: Its samples; None if there is no batch, as the epoch is over.
        """
        self._has_batch, self._rows = rows is not None, rows or 0

    def begin_update(self, _optimizer: object = None) -> None:
        """Note that the parameters are about to be updated."""
        self._update = self._now()
        if self._batch is not None and self._has_batch:
            self._end_batch(self._update)
        self._batch, self._has_batch = None, False

    def end_update(self) -> None:
        """Note that they are."""
        if self._update is not None:
            self._add(False, self._update, self._now())
            self._updates += 1
            self._update = None

    def take(self) -> MeasuredWork:
        """Return what was measured since the last call, and begin again."""
        seconds = [0.0, 0.0]
        for is_batch, first, last in self._spans:
            seconds[is_batch] += first.seconds_to(last)
        busy_s = sum(seconds)
        slower = max(1.0, self._cpu_s / self._cores / busy_s) if self._cores and busy_s else 1.0
        measured = MeasuredWork(
            slower * seconds[True], slower * seconds[False], self._batches, self._counted_rows, self._updates
        )
        self._begin()
        return measured

    def _end_batch(self, now: _Mark) -> None:
        assert self._batch is not None
        self._add(True, self._batch, now)
        self._batches += 1
        self._counted_rows += self._rows

    def _add(self, is_batch: bool, first: _Mark, last: _Mark) -> None:
        self._spans.append((is_batch, first, last))
        self._cpu_s += last.cpu_s - first.cpu_s

    def _now(self) -> _Mark:
        cpu_s = 0.0 if self._cores is None else self._groups.cpu_seconds()
        if self._device is not None:
            return _Mark(0.0, cpu_s, accelerator.record_event(self._device), len(waits.marks))
        return _Mark(time.perf_counter() - waits.seconds, cpu_s)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment, by a clock that stands still while this rank waits for others."""

    seconds: float
    cpu_s: float
    event: Any = None
    waited: int = 0
    """Waits of the device before it."""

    def seconds_to(self, later: _Mark) -> float:
        if self.event is None:
            return later.seconds - self.seconds
        later.event.synchronize()
        waited = sum(_elapsed_s(*pair) for pair in waits.marks[self.waited : later.waited])
        return max(0.0, _elapsed_s(self.event, later.event) - waited)


def _mark_wait(device: torch.device) -> Any:
    """Return an event of now; None while a graph is captured, which nothing is timed in."""
    return None if accelerator.is_capturing(device) else accelerator.record_event(device)


def _end_marks(mark: Callable[[], Any]) -> None:
    if waits.mark is mark:
        waits.mark, waits.marks = None, []


def _elapsed_s(first: Any, last: Any) -> float:
    return float(first.elapsed_time(last)) / 1e3

"""What a run measures of itself: its speed, and the memory of its process."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # a run measures itself
    from phalanx.train.callbacks.run import Run

_PAGE_BYTES = resource.getpagesize()


class Clock:
    """Seconds spent in epochs, from their first batch to their last: without evaluations and what is between."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Go on from now."""
        self._since = time.perf_counter()

    def tick(self) -> None:
        """Count the time until now."""
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now


class Speed:
    """Samples per second of all ranks."""

    def __init__(self) -> None:
        self._samples, self._seconds = 0, 0.0
        self._rate = 0.0

    def restart(self, run: Run) -> None:
        """Count from here."""
        self._samples, self._seconds, self._rate = run.samples, run.clock.seconds, 0.0

    def rate(self, run: Run) -> float:
        """Return samples/s since the last call or `restart`; what it returned then, while there are no new ones."""
        self._rate = self.mean(run)
        self._samples, self._seconds = run.samples, run.clock.seconds
        return self._rate

    def mean(self, run: Run) -> float:
        """Return samples/s since `rate` or `restart` was last called, and go on from there."""
        seconds = run.clock.seconds - self._seconds
        return (run.samples - self._samples) / seconds if run.samples > self._samples and seconds > 0 else self._rate


def memory(device: torch.device) -> dict[str, int]:
    """Return `memory_bytes` and `peak_memory_bytes`: of the device's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"memory_bytes": resident, "peak_memory_bytes": max(peak, resident)}

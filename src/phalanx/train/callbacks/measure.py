"""What a run measures of itself: its speed, and the memory of its process."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

_PAGE_BYTES = resource.getpagesize()


class Speed:
    """Samples per second since it was last asked."""

    def __init__(self) -> None:
        self._samples, self._asked = 0, time.perf_counter()
        self._rate = 0.0

    def restart(self, samples: int) -> None:
        """Count from here."""
        self._samples, self._asked, self._rate = samples, time.perf_counter(), 0.0

    def rate(self, samples: int) -> float:
        """Return samples/s since the last call; what it returned then, while there are no new ones."""
        now = time.perf_counter()
        if samples > self._samples and now > self._asked:
            self._rate = (samples - self._samples) / (now - self._asked)
            self._samples, self._asked = samples, now
        return self._rate


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

"""`keep_freed_memory`: let the C library keep the memory that a training step frees, for the next step."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc (man mallopt)."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
"""With which users say how glibc keeps memory; GLIBC_TUNABLES may say it too."""


def keep_freed_memory() -> None:
    """Keep up to 512 MiB of freed memory in this process.

    glibc hands freed memory back to the system, and a training step asks for the same activations again: thousands of
    page faults a step, or none, by what was freed before. What the user set through MALLOC_* or GLIBC_TUNABLES stays,
    and C libraries without `mallopt` stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or is_set:
        return
    # Larger blocks are mapped, and freed at once. A process that trains alone has the activations of a whole batch, so
    # that its blocks are longer than those of ranks, who would have the advantage of them otherwise.
    if not mallopt(_MMAP_THRESHOLD, 256 << 20):
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that an older glibc takes
    mallopt(_TRIM_THRESHOLD, 512 << 20)  # else twice as much: a unit that sharding gathers, and its gradients

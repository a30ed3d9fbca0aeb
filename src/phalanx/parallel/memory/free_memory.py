"""`free_caches`: give back memory that nothing uses, to the device or to the operating system."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch

_MMAP_THRESHOLD = -3  # in malloc.h
_LARGE_BYTES = 1 << 20


def free_caches(device: torch.device) -> None:
    """Free what nothing refers to, and what allocators keep for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        _call_libc("malloc_trim", 0)


def return_large_blocks(device: torch.device) -> None:
    """Free caches; on a host, let the allocator return large blocks to the system as soon as they are freed.

    By itself it keeps them, between others, where a block of another size does not fit.
    """
    if device.type == "cpu":
        _call_libc("mallopt", _MMAP_THRESHOLD, _LARGE_BYTES)
    free_caches(device)


def _call_libc(name: str, *values: int) -> None:
    """Call a function that only some C libraries have."""
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*map(ctypes.c_int if name == "mallopt" else ctypes.c_size_t, values))

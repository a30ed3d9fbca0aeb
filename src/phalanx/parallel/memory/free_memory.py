"""`free_caches` and others: give back memory that nothing uses, to the device or to the operating system."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from phalanx import accelerator

_MMAP_THRESHOLD = -3  # in malloc.h
_LARGE_BYTES = 1 << 20


def free_caches(device: torch.device) -> None:
    """Free what nothing refers to, and what allocators keep for later."""
    gc.collect()
    if accelerator.is_accelerator(device):
        accelerator.empty_cache(device)
    else:
        _call_libc("malloc_trim", 0)


def return_large_blocks(device: torch.device) -> None:
    """Free caches; on a host, let the allocator return large blocks to the system as soon as they are freed.

    By itself it keeps them, between others, where a block of another size does not fit.
    """
    if device.type == "cpu":
        _call_libc("mallopt", _MMAP_THRESHOLD, _LARGE_BYTES)
    free_caches(device)


def can_run_out(device: torch.device) -> bool:
    """Return whether an allocation can fail: on a host without a limit, the kernel ends processes instead."""
    if device.type != "cpu":
        return True
    limits = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[0]
    return limits != (resource.RLIM_INFINITY, resource.RLIM_INFINITY) or _never_overcommits()


@cache
def _never_overcommits() -> bool:
    """Return whether the kernel refuses memory that it may not have."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False


def _call_libc(name: str, *values: int) -> None:
    """Call a function that only some C libraries have."""
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*map(ctypes.c_int if name == "mallopt" else ctypes.c_size_t, values))

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
from phalanx.cluster.proc import most_address_space, process_memory

_MMAP_THRESHOLD = -3  # in malloc.h
_LARGE_BYTES = 1 << 20
_TIGHT_BYTES = 1 << 17
"""Smallest block that goes back where memory is short. Each costs the page faults of new memory, at every step."""

_FIRST_PASSES = 16
"""Forward passes after which it is known whether memory is short: of a few steps, the optimizer's first among them."""

_ROOM_LEFT = 0.25
"""Part of what a limit left when training began that has to be left for memory not to be short."""


def free_caches(device: torch.device) -> None:
    """Free what nothing refers to, and what allocators keep for later."""
    gc.collect()
    if accelerator.is_accelerator(device):
        accelerator.empty_cache(device)
    else:
        _call_libc("malloc_trim", 0)


class BlockReturn:
    """Lets the allocator of a host return large blocks to the system as soon as they are freed.

    By itself it keeps them, between others, where a block of another size does not fit. Nobody knows before the first
    steps whether memory is short, so it counts as short until then, and for good once it has run out.
    """

    def __init__(self) -> None:
        self._at_start: int | None = None
        """The address space in use before the first steps; None once they are over, or memory has run out."""

        self._has_run_out = False
        self._passes = 0

    def begin(self, device: torch.device) -> None:
        """Free caches and return blocks from now on: the first pass begins that can run out of memory."""
        self._return_blocks(device)
        if device.type == "cpu" and not self._has_run_out:
            self._at_start, self._passes = process_memory().address_space, 0

    def tighten(self, device: torch.device) -> None:
        """Free caches and return blocks for good: memory has run out."""
        self._at_start, self._has_run_out = None, True
        self._return_blocks(device)

    def _return_blocks(self, device: torch.device) -> None:
        if device.type == "cpu":
            _call_libc("mallopt", _MMAP_THRESHOLD, _TIGHT_BYTES)
        free_caches(device)

    def count_pass(self) -> None:
        """Note that a pass begins; after the first ones return the largest blocks only, if they left room."""
        if self._at_start is None:
            return
        self._passes += 1
        if self._passes > _FIRST_PASSES:
            at_start, self._at_start = self._at_start, None
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit == resource.RLIM_INFINITY or limit - most_address_space() >= _ROOM_LEFT * (limit - at_start):
                _call_libc("mallopt", _MMAP_THRESHOLD, _LARGE_BYTES)


block_return = BlockReturn()
"""That of this process."""


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

"""Memory that one training step frees serves the next one, instead of going back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have rules of their own"),
]

COUNT_FAULTS = """
import ctypes, resource, sys
import phalanx
if "init" in sys.argv:
    phalanx.init()
SIZES = [48, 100] if "long" in sys.argv else []
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(size << 20) for size in [6] * 16 + SIZES]
    for block, size in zip(blocks, [6] * 16 + SIZES):
        ctypes.memset(block, 1, size << 20)
    for block in reversed(blocks):
        libc.free(block)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Page faults of a step that fills and frees 96 MiB, 24576 pages, or 244, after three others."""


def page_faults(*arguments: str, **environment: str) -> int:
    """Return the page faults of one step in a fresh process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, *arguments],
        env=kept | environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout)


def test_a_step_reuses_the_pages_of_the_step_before():
    assert page_faults("init") < 100


@pytest.mark.skipif(platform.libc_ver()[1] < "2.35", reason="takes no threshold above 32 MiB")
def test_a_step_reuses_the_long_blocks_of_a_process_that_has_the_whole_batch():
    assert page_faults("init", "long") < 100


def test_a_users_own_malloc_setting_stays():
    assert page_faults("init", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") >= 24576
    tunables = "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=131072"
    assert page_faults("init", GLIBC_TUNABLES=tunables) >= 24576


def test_a_users_setting_of_something_else_in_glibc_does_not_switch_it_off():
    assert page_faults("init", GLIBC_TUNABLES="glibc.pthread.rseq=1") < 100

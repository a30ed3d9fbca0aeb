"""`map_in_threads`: call a function for each shard, several shards at a time in each of several threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_MOST_AT_ONCE = 16
"""To hand a shard of a small table to a thread takes longer than to write it."""

_TURNS = 4
"""How often each thread takes shards at least, so that all end at about the same time."""

_NICENESS = 5
"""Of threads in the background: a third of the weight of others. With much less, one that holds a lock would keep those
who wait for it waiting."""


def map_in_threads(
    call: Callable[[int], Result], shards: Sequence[int], *, threads: int, name: str, in_background: bool = False
) -> Iterator[Result]:
    """Return what `call` gives for each shard, in order.

    Args:
        call: Called by any thread. What it raises is raised here, and shards that have not begun are left.
        shards: Numbers of shards.
        threads: How many, at least 1.
        name: What their names begin with.
        in_background: Whether other threads of the machine run first.
    """
    at_once = max(1, min(_MOST_AT_ONCE, len(shards) // (_TURNS * threads)))
    parts = [shards[start : start + at_once] for start in range(0, len(shards), at_once)]

    def call_each(part: Sequence[int]) -> list[Result]:
        return [call(shard) for shard in part]

    initializer = _lower_priority if in_background else None
    with ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=initializer) as pool:
        for results in pool.map(call_each, parts):
            yield from results


def _lower_priority() -> None:
    """Let other threads run before this one."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and the save is right without
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)

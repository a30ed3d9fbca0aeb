"""`TimeUse`: what a rank knows of its own time that nobody else can see: input, garbage collector, waits for ranks.

Nothing is sent for it. Loaders and the collector add to counters, groups that share memory count their waits in C++,
and of torch's backends the reporter looks ten times a second whether a collective has not ended.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeAlias

Groups: TypeAlias = Mapping[str, tuple[Any, tuple[int, ...]]]
"""Every process group by its name, with its global ranks in order."""

LOOK_S = 0.1
"""Between two looks at collectives of torch's backends."""


class TimeUse:
    """Counters of this process, from `begin` on."""

    def __init__(self) -> None:
        self._collector_s = self._collector_began = 0.0
        self._begun_calls_s = 0.0
        self._looked_at = 0.0
        self._in_calls_s = 0.0
        self._main: defaultdict[int, float] = defaultdict(float)
        self._entered: defaultdict[int, float] = defaultdict(float)
        self._before: dict[str, tuple[int, tuple[float, list[float], list[float]]]] = {}

    def begin(self) -> None:
        """Count from now on."""
        gc.callbacks.append(self._time_collector)
        if "torch" in sys.modules:
            _time_loaders()

    def look(self, *, has_begun_call: bool) -> None:
        """Note whether a collective of torch's backends has not ended; it lasts since the last look."""
        now = time.monotonic()
        if has_begun_call and self._looked_at:
            self._begun_calls_s += min(now - self._looked_at, 10 * LOOK_S)
        self._looked_at = now

    def read(self, groups: Groups) -> dict[str, Any]:
        """Return the fields of `Activity` about time."""
        self._add_waits(groups)
        loading = sys.modules.get("phalanx.comm.batch.input_time")
        return {
            "input_s": round(loading.input_time.seconds, 4) if loading else 0.0,
            "input_cpu_s": round(loading.input_time.cpu_seconds, 4) if loading else 0.0,
            "collector_s": round(self._collector_s, 4),
            "begun_calls_s": round(self._begun_calls_s, 2),
            "in_calls_s": round(self._in_calls_s, 4),
            "main_waits_s": {str(rank): round(seconds, 4) for rank, seconds in self._main.items()},
            "entered_waits_s": {str(rank): round(seconds, 4) for rank, seconds in self._entered.items()},
        }

    def _time_collector(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collector_began = now
        else:
            self._collector_s += now - self._collector_began

    def _add_waits(self, groups: Groups) -> None:
        """Add what the groups that share memory counted since the last time; groups end, and their counts with them."""
        for name, (group, members) in groups.items():
            count = getattr(group, "wait_times", None)
            if count is None or (times := count()) is None:
                continue
            before = self._before.get(name)
            # A group that was made where another one had been counts from zero too.
            if before is None or before[0] != id(group) or times[0] < before[1][0]:
                before = (0, (0.0, [0.0] * len(members), [0.0] * len(members)))
            self._before[name] = (id(group), times)
            self._in_calls_s += times[0] - before[1][0]
            for waits, now, earlier in zip((self._main, self._entered), times[1:], before[1][1:], strict=True):
                for rank, seconds, earlier_s in zip(members, now, earlier, strict=True):
                    if seconds > earlier_s:
                        waits[rank] += seconds - earlier_s


def _time_loaders() -> None:
    """Time the batches of torch's loaders in the main thread."""
    from torch.utils.data import dataloader

    base: Any = dataloader._BaseDataLoaderIter
    give = base.__next__

    @wraps(give)
    def next_batch(iterator: Any) -> Any:
        # Imported by the first batch: a script without loaders need not wait for it.
        from phalanx.comm.batch.input_time import input_time

        with input_time:
            return give(iterator)

    base.__next__ = next_batch

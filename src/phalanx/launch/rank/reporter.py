"""`Reporter`: a thread of a rank that looks which calls are under way, and says so in the rank's `ActivityMemory`.

Nothing is added to the calls themselves. Torch's flight recorder, which is on by default, has the collectives of gloo
and NCCL, those that DistributedDataParallel makes in C++ too; groups that share memory and connections to servers know
theirs. The thread asks for counts (microseconds); only when a call has not ended for a while it asks what call it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from phalanx.cluster import proc
from phalanx.launch.rank.activity import ActivityMemory, Call
from phalanx.launch.rank.time_use import LOOK_S, TimeUse

STACKS = "phalanx-stacks"
"""What the file is called, in `/proc/PID/fd`, into which a rank writes its stacks when it gets `STACKS_SIGNAL`."""

STACKS_SIGNAL = signal.SIGRTMIN + 14
"""Of the signals that no library is known to use."""

_SLOWEST_S, _FASTEST_S = 1.0, 0.1
_PR_SET_PTRACER = 0x59616D61
_STEPS_KEPT = 32

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
           "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip
_WORKER = re.compile(r"worker (\d+)")
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


def start_reporting(hang_after_s: float, *, times_itself: bool) -> None:
    """Let this rank say from now on what it is in, and let its launcher look at its stacks.

    Args:
        hang_after_s: How long a call may take before somebody looks; 0 where nobody looks for hangs.
        times_itself: Whether it also says what it spends its time on.
    """
    # The launcher: the parent of the fork server, which is the parent of this process.
    allow_tracer(proc.parent(os.getppid()))
    register_stacks()
    interval_s = min(_SLOWEST_S, max(_FASTEST_S, hang_after_s / 5)) if hang_after_s else _SLOWEST_S
    reporter = Reporter(interval_s, TimeUse() if times_itself else None)
    reporter.begin()
    threading.Thread(target=reporter.run, name="phalanx reporter", daemon=True).start()


def allow_tracer(pid: int) -> None:
    """Let a process and its children read this one, where Yama lets only ancestors do so; elsewhere nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def register_stacks() -> None:
    """Write the stacks of all threads to a file on `STACKS_SIGNAL`, where reading them from outside is not allowed."""
    fd = os.memfd_create(STACKS)
    # Whoever reads it empties it first, and what comes next must not leave a gap.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


class Reporter:
    """What one rank says of itself.

    Args:
        interval_s: Seconds between two looks.
        time_use: What this rank spends its time on, where that is to be said.
    """

    def __init__(self, interval_s: float, time_use: TimeUse | None = None) -> None:
        self._interval_s = interval_s
        self._time_use = time_use
        self._memory = ActivityMemory()
        self._steps = 0
        self._last_step = 0.0
        self._durations: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._before: dict[str, tuple[int, int]] = {}
        self._recorded: tuple[dict[str, tuple[int, int]], list[Call]] = ({}, [])

    def begin(self) -> None:
        """Count the steps of every optimizer of torch; a script without torch has none. Count this rank's time."""
        if self._time_use is not None:
            self._time_use.begin()
        if "torch" not in sys.modules:
            return
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def count(*_: Any) -> None:
            # A compiler that traces the step must not see the counter.
            if torch.compiler.is_compiling():
                return
            now = time.monotonic()
            if self._steps:
                self._durations.append(now - self._last_step)
            self._steps += 1
            self._last_step = now

        register_optimizer_step_post_hook(count)

    def run(self) -> None:
        """Look again and again, for as long as the process lives."""
        activity: dict[str, Any] = {}
        while True:
            # Groups may end, and modules be half imported, while this thread looks at them.
            with contextlib.suppress(Exception):
                activity = self._look()
            if activity:
                self._memory.write(activity)
            self._pause()

    def _pause(self) -> None:
        """Wait for the next look; meanwhile see whether collectives of torch's backends last, where there are such."""
        until = time.monotonic() + self._interval_s
        while self._time_use is not None and self._before and time.monotonic() < until - LOOK_S:
            time.sleep(LOOK_S)
            with contextlib.suppress(Exception):
                # A card works on calls of NCCL while its rank continues: that says nothing of waits.
                counts = [count for key, count in _recorded_counts() if key.endswith("@gloo")]
                has_begun = any(begun > completed for begun, completed in counts)
                self._time_use.look(has_begun_call=has_begun)
        time.sleep(max(0.0, until - time.monotonic()))

    def _look(self) -> dict[str, Any]:
        calls, begun, completed = [*_requests()], {}, {}
        groups = _groups()
        for name, (group, members) in groups.items():
            under_way = getattr(group, "under_way", None)
            if under_way is not None and (report := under_way()) is not None:
                key = f"{name}@shm"
                begun[key], completed[key], waiting = report
                calls += [_shared_call(key, members, each) for each in waiting]
        counts = dict(_recorded_counts()) if groups else {}
        calls += self._recorded_calls(counts, {name: members for name, (_, members) in groups.items()})
        for key, (number, last_ended) in counts.items():
            # Backends end calls on several threads, so the last that ended need not be the latest of those that did.
            has_ended = key in self._recorded[0] and all(call.group != key for call in self._recorded[1])
            begun[key], completed[key] = number, number if has_ended else last_ended
        durations = list(self._durations)
        step_s = statistics.median(durations) if len(durations) > 1 else 0.0
        return {
            "interval_s": self._interval_s,
            "steps": self._steps,
            "step_s": round(step_s, 4),
            "begun": begun,
            "completed": completed,
            "calls": calls,
            **({} if self._time_use is None else self._time_use.read(groups)),
        }

    def _recorded_calls(self, counts: dict[str, tuple[int, int]], members: dict[str, tuple[int, ...]]) -> list[Call]:
        """Collectives of torch's own backends that did not end since the last look; they are read once."""
        late = {
            name: count for name, count in counts.items() if count[0] > count[1] and count == self._before.get(name)
        }
        self._before = counts
        if not late:
            self._recorded = ({}, [])
        elif self._recorded[0] != late:
            self._recorded = (late, [call for entry in _entries() if (call := _recorded_call(entry, members))])
        return self._recorded[1]


def _groups() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Every process group of this process by its name, with its global ranks in order."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return {}
    groups = {}
    for group, ranks in list(distributed._world.pg_group_ranks.items()):
        members = [rank for rank, _ in sorted(ranks.items(), key=lambda pair: pair[1])]
        groups[str(group.group_name)] = (group, tuple(members))
    return groups


def _shared_call(group: str, members: tuple[int, ...], call: tuple[str, str, str, int, float, list[int]]) -> Call:
    verb, detail, label, number, age_s, missing = call
    return Call(
        verb=verb,
        number=number,
        group=group,
        members=members,
        detail=detail,
        label=label,
        since=_rounded(time.monotonic() - age_s),
        missing=tuple(f"rank {members[rank]}" for rank in missing),
        is_collective=verb not in ("send", "recv"),
    )


def _rounded(moment: float) -> float:
    """A moment to half a second, so that the same call is the same text at each look."""
    return round(moment * 2) / 2


def _requests() -> Iterator[Call]:
    """Requests to parameter servers that have no answer."""
    connection = sys.modules.get("phalanx.ps.wire.client.connection")
    if connection is None:
        return
    for server, pending in connection.oldest_requests():
        yield Call(
            verb=pending.op,
            backend="wire",
            number=pending.seq,
            group=server,
            label=f"it {pending.server_state}" if pending.server_state else "",
            # A server that recovers, and gets on with it, is no hang.
            since=_rounded(pending.waits_since),
            # A server that waits itself says for which workers.
            missing=tuple(f"rank {worker}" for worker in _WORKER.findall(pending.server_state)) or (server,),
            is_collective=False,
        )


def _recorded_counts() -> Iterator[tuple[str, tuple[int, int]]]:
    """Collectives begun and ended in each group, as torch's flight recorder counts them."""
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        if (dump := _recorder(name)) is not None:
            for group, status in json.loads(dump(False, False)).get("pg_status", {}).items():
                counts = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
                yield f"{group}@{backend}", (max(0, counts[0]), max(0, counts[1]))


def _entries() -> Iterator[dict[str, Any]]:
    """What torch's flight recorder has of the last calls, but no stacks: to name lines torch imports its compiler."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := _recorder(name)) is not None:
            yield from json.loads(dump(True, True)).get("entries") or ()


def _recorder(name: str) -> Any:
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def _recorded_call(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> Call | None:
    """Return the call of an entry of the flight recorder, or None if it has ended."""
    if entry.get("retired") or entry.get("state") == "completed":
        return None
    group = str(entry["process_group"][0])
    ranks = members.get(group, ())
    # One group of torch may have a backend for each kind of device, and each counts its own calls.
    backend, _, name = str(entry["profiling_name"]).partition(":")
    peer = _MESSAGE.fullmatch(name)
    age_s = time.time() - entry["time_created_ns"] / 1e9
    return Call(
        verb=name.partition(" ")[0].lstrip("_"),
        backend=backend,
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        group=f"{group}@{backend}",
        members=ranks,
        detail=_detail(entry["input_dtypes"], entry["input_sizes"]),
        since=_rounded(time.monotonic() - age_s),
        missing=tuple(f"rank {ranks[int(r)]}" for r in _peer(peer)) if ranks and peer else (),
        is_collective=not entry["is_p2p"],
    )


def _peer(message: re.Match[str] | None) -> tuple[str, ...]:
    """Whom a message waits for; `send 0->1` and `recv 0<-1` both name the other one last."""
    return () if message is None else (message[3],)


def _detail(dtypes: list[str], sizes: list[list[int]]) -> str:
    if not sizes:
        return ""
    shape = ", ".join(str(size) for size in sizes[0])
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    dtype = dtypes[0] if dtypes else ""
    return f"{_DTYPES.get(dtype, dtype.lower())}[{shape}]{more}"

"""`ExitRecords`: how the processes of a node ended, with recorded errors and last lines of logs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.launch.hang.verdict import Verdict
from phalanx.launch.process import environment
from phalanx.launch.reports.log_tail import last_lines
from phalanx.launch.reports.root_cause import ProcessExit
from phalanx.launch.request.topology import Process, Topology

HANG_CODE = 124
"""Exit code of a job that is ended because it hangs, as that of timeout(1)."""

LAST_LINES = 20

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ExitRecords:
    """Makes the `ProcessExit` of each process of an attempt on this host."""

    layout: Topology
    log_dir: str
    pids: Mapping[str, int]
    """By process id; filled as processes start."""

    def of_process(self, process: Process, code: int, at: float, *, is_stopping: bool) -> ProcessExit:
        """Return how a process ended.

        Args:
            process: The process.
            code: Its exit code, or minus the signal.
            at: When it ended, in seconds since the epoch.
            is_stopping: Whether the launcher had asked it to end.
        """
        record = _read_record(environment.error_file(process, self.log_dir))
        return self._exit(
            process,
            code,
            record.get("time", at),
            # A process that recorded an error before it was asked to end failed by itself.
            stopped_by_us=is_stopping and code in (0, 130, *(-number for number in _STOP_SIGNALS)),
            kind=record.get("kind", ""),
            error=f"{record['type']}: {record['message']}" if record else "",
            traceback=record.get("traceback", ""),
        )

    def of_hang(self, process: Process, verdict: Verdict) -> ProcessExit:
        """Return what to report of a job that is ended because it hangs: the process that the others wait for."""
        return self._exit(process, HANG_CODE, time.time(), kind="hang", error=verdict.lines[0])

    def _exit(self, process: Process, code: int, at: float, **details: Any) -> ProcessExit:
        """Return how a process ended, with the last lines of its log unless it ended well."""
        return ProcessExit(
            title=process.title,
            role=process.role,
            rank=process.rank,
            host=self.layout.hostnames[process.node_rank],
            pid=self.pids[process.id],
            code=code,
            time=at,
            log_file=process.log_file,
            last_lines=tuple(last_lines(process.log_file, LAST_LINES)) if code != 0 else (),
            **details,
        )

    def of_launcher(self, number: int) -> ProcessExit:
        """Return what to tell the other hosts when this launcher is stopped by a signal."""
        node = self.layout.node_rank
        return ProcessExit(
            title=f"the launcher of node {node}",
            role="launcher",
            rank=node,
            host=self.layout.hostnames[node],
            pid=os.getpid(),
            code=-number,
            time=time.time(),
            log_file=self.log_dir,
        )


def _read_record(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}  # There is none, or half of one: the disk is full, or the rank was killed while it wrote.
    is_record = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("type", "message"))
    return record if is_record else {}

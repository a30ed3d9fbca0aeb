"""`StatusFile`: what a server holds and does, in a file that `phalanx ps`, the console and Prometheus show."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from phalanx.ps.server.clocks import Clocks
from phalanx.ps.server.service import Service

STATUS_S = 2.0
"""Seconds between two states of the file."""


class StatusFile:
    """Replaces a file by the server's state: at once, as a rolling restart waits for it, and every two seconds.

    Args:
        service: The server.
        path: The file; its folder is there. None: nobody wants to know.
    """

    def __init__(self, service: Service, path: str | None) -> None:
        self._service, self._path = service, path
        self._last, self._last_at = service.engine.counts(), time.monotonic()
        self._due_at = self._last_at

    def tick(self) -> None:
        """Write the state if it is time to. A full disk is no reason to stop."""
        now = time.monotonic()
        if self._path is None or now < self._due_at:
            return
        counts = self._service.engine.counts()
        status = server_status(self._service, counts) | {"rates": rates(self._last, counts, now - self._last_at)}
        self._last, self._last_at, self._due_at = counts, now, now + STATUS_S
        part = f"{self._path}.part"
        try:
            Path(part).write_text(json.dumps(status))
            os.replace(part, self._path)
        except OSError:
            return


def server_status(service: Service, counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the state of a server: counts since it started, sizes now; times in seconds, sizes in bytes."""
    clocks = service.state.clocks
    steps = clocks.steps if clocks else []
    live = [steps[worker] for worker in clocks.live] if clocks else []
    return {
        "time": round(time.time(), 3),
        "server": service.state.server,
        "mode": clocks.mode if clocks else None,
        "steps": steps,
        "lag": max(live) - min(live) if live else 0,
        "awaited": _awaited_now(service, clocks) if clocks and counts["waiting"] else [],
        "tables": {
            name: counts | _file_counts(service, name) for name, counts in service.state.tables.report().items()
        },
        "bytes": service.state.tables.bytes,
        "budget": service.budget,
        "log_bytes": service.log.bytes if service.log else 0,
        "requests": dict(counts),
    }


def _awaited_now(service: Service, clocks: Clocks) -> list[tuple[int, int]]:
    holds_back = service.write_freeze.holds_back
    awaited = awaited_workers(clocks, service.served_workers)
    return [(worker, pushes) for worker, pushes in awaited if not holds_back(worker, pushes)]


def awaited_workers(clocks: Clocks, served: Collection[int]) -> list[tuple[int, int]]:
    """Return the workers whom others may wait for, each with its pushes: the slowest, where some are ahead of them.

    Args:
        clocks: The pushes of each worker.
        served: Workers that wait for this server, and are not to blame.
    """
    if clocks.mode not in ("sync", "bounded"):
        return []
    pushed = {worker: clocks.steps[worker] for worker in clocks.live}
    least = min(pushed.values(), default=0)
    if max(pushed.values(), default=0) == least:
        return []
    return [(worker, pushes) for worker, pushes in pushed.items() if pushes == least and worker not in served]


def _file_counts(service: Service, name: str) -> dict[str, int]:
    """Return what a table has in files."""
    table = service.state.tables.tables[name]
    return {"stored": table.stored, "file_bytes": table.file_bytes, "file_reads": table.file_reads}


def rates(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return requests and ids a second between two states of the engine's counts, and the mean work for a request."""
    change = {name: now[name] - before[name] for name in now}
    requests = change["pull_requests"] + change["push_requests"]
    work_s = change["pull_seconds"] + change["push_seconds"] - change["wait_seconds"]
    return {
        "pulls_per_s": change["pull_requests"] / seconds,
        "pushes_per_s": change["push_requests"] / seconds,
        "pulled_ids_per_s": change["pull_keys"] / seconds,
        "pushed_ids_per_s": change["push_keys"] / seconds,
        "ms_per_request": 1000 * max(work_s, 0.0) / requests if requests else 0.0,
    }

"""`/healthz`, and Prometheus `/metrics`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.models import Counts, JobState, ResourceUse

routes = APIRouter(tags=["health"])

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Requests:
    """Counts answers by method and status; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, method: str, status: int) -> None:
        """Count one answer."""
        label = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
        with self._lock:
            self._counts[label, status] += 1

    def now(self) -> dict[tuple[str, int], int]:
        """Return how many there were."""
        with self._lock:
            return dict(self._counts)


@routes.get("/healthz", response_class=PlainTextResponse)
def health() -> str:
    """Return `ok`. Nothing is read, so that a slow disk or database does not get the server killed."""
    return "ok\n"


@routes.get("/metrics", response_class=PlainTextResponse, responses=RESPONSES)
def metrics(request: Request, caller: Caller) -> PlainTextResponse:
    """Return the numbers of the jobs that the caller sees, and of this server, as Prometheus reads them."""
    lines = _lines(caller.counts(), caller.machine(), request.app.state.requests.now())
    return PlainTextResponse("\n".join(lines) + "\n" + caller.table_metrics(), media_type=_TEXT)


def _lines(
    counts: Counts, machine: Mapping[str, ResourceUse], requests: Mapping[tuple[str, int], int]
) -> Iterator[str]:
    yield from _family("phalanx_jobs", "gauge", "Jobs by state.")
    yield from (f'phalanx_jobs{{state="{state}"}} {counts.jobs.get(state, 0)}' for state in JobState)
    yield from _family("phalanx_queue_length", "gauge", "Jobs that wait, by backend and queue.")
    for line in sorted(counts.waiting, key=lambda line: (line.backend, line.queue)):
        yield f'phalanx_queue_length{{backend="{line.backend}",queue="{line.queue}"}} {line.jobs}'
    yield from _family("phalanx_attempts", "gauge", "Attempts that are kept, by state.")
    yield from (f'phalanx_attempts{{state="{state}"}} {counts.attempts.get(state, 0)}' for state in JobState)
    for name, field in (("phalanx_machine_given", "used"), ("phalanx_machine_total", "total")):
        yield from _family(name, "gauge", "Of this machine, given to jobs or there: cores, bytes of memory, GPUs.")
        yield from (f'{name}{{resource="{kind}"}} {getattr(use, field):g}' for kind, use in machine.items())
    yield from _family("phalanx_http_requests_total", "counter", "Answers of this server since it started.")
    for (method, status), count in sorted(requests.items()):
        yield f'phalanx_http_requests_total{{method="{method}",status="{status}"}} {count}'


def _family(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"

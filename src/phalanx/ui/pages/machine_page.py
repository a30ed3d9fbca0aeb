"""`queue_page`: what jobs asked for, what their processes use, what waits and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from phalanx.jobs.attempt.usage import Sample
from phalanx.jobs.models import Job, JobState
from phalanx.ui.pages.job_list import CurrentSession
from phalanx.ui.session import ConsoleSession
from phalanx.units import format_gib

routes = APIRouter(include_in_schema=False)

_LIVE = tuple(state for state in JobState if not state.is_terminal)
_MOST_NODES = 64
"""Most nodes that are listed."""


@dataclass(frozen=True)
class NodeUse:
    """One node of a running job: what it may take, and the last sample of what it does."""

    job: Job
    node: int
    sample: Sample

    @property
    def cores(self) -> str:
        """Cores in use, of those asked for."""
        limit = self.job.spec["resources"].get("cpu")
        return f"{self.sample.cpu:.1f}" + (f" / {limit:g}" if limit else "")

    @property
    def memory(self) -> str:
        """Memory in use, of what was asked for."""
        limit = self.job.spec["resources"].get("memory")
        return format_gib(self.sample.memory) + (f" / {format_gib(limit)}" if limit else "")

    @property
    def gpus(self) -> str:
        """GPUs in use, of those asked for; a dash without any."""
        if self.sample.gpu is None:
            return "–"
        return f"{self.sample.gpu:.1f} / {self.job.spec['resources'].get('gpu', 0)}"

    @property
    def gpu_memory(self) -> str:
        """Memory of GPUs in use; a dash without any."""
        return "–" if self.sample.gpu_memory is None else format_gib(self.sample.gpu_memory)


@routes.get("/queue")
def queue_page(session: CurrentSession) -> Response:
    """Show what waits, what runs and what it uses."""
    return session.page("queue.html", place="queue", **_queue(session))


@routes.get("/queue-table")
def queue_table(session: CurrentSession) -> Response:
    """Show the queue's tables alone."""
    return session.page("queue_table.html", **_queue(session))


def _queue(session: ConsoleSession) -> dict[str, Any]:
    live = session.jobs.jobs(states=_LIVE)[::-1]
    waiting = [job for job in live if job.state is JobState.QUEUED]
    waiting.sort(key=lambda job: -job.priority)
    running = [job for job in live if job.state is not JobState.QUEUED]
    return {"waiting": waiting, "running": running, "meters": list_meters(session), "nodes": _nodes(session, running)}


def _nodes(session: ConsoleSession, running: list[Job]) -> list[NodeUse]:
    """The nodes of running jobs that have left samples."""
    nodes: list[NodeUse] = []
    for job in running:
        if not job.attempt or len(nodes) >= _MOST_NODES:
            continue
        used = session.jobs.usage(job.id, offset=-1)
        nodes += [NodeUse(job, item.node, item.samples[-1]) for item in used if item.samples]
    return nodes[:_MOST_NODES]


def list_meters(session: ConsoleSession) -> list[dict[str, Any]]:
    """Return how much of this machine's resources is given to jobs: `{"name", "used", "total", "text"}` each."""
    return [
        {"name": name, "used": use.used, "total": use.total, "text": _amounts(name, use.used, use.total)}
        for name, use in session.jobs.machine().items()
        if use.total
    ]


def _amounts(name: str, used: float, total: float) -> str:
    return f"{format_gib(used)} / {format_gib(total)}" if name == "memory" else f"{used:g} / {total:g}"

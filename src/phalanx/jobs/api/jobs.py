"""Jobs, their attempts, events, logs and reports over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.attempt.metrics import Reports
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.models import Attempt, Event, Job
from phalanx.jobs.protocol import Jobs, LogPart
from phalanx.jobs.spec import TrainingJob
from phalanx.jobs.states import JobState

routes = APIRouter(responses=RESPONSES, tags=["jobs"])

_POLL_S = 0.5
LOG_START = 1 << 18
"""Bytes of a log's end that a stream begins with."""

Number = Annotated[int | None, Query(ge=1, le=2**31)]
Offset = Annotated[int, Query(ge=-(2**53), le=2**53)]


class Submitted(BaseModel):
    """A job to submit; `request` is any text of the caller's, with which a repeated request makes no second job."""

    model_config = ConfigDict(extra="forbid")

    spec: TrainingJob
    request: str | None = Field(default=None, max_length=200)


class ToRender(Submitted):
    """A job to render; `full` leaves nothing out, so that its engine takes the text."""

    full: bool = False


class Rendered(BaseModel):
    """What a backend would be handed."""

    text: str


class Waiting(BaseModel):
    """How many jobs wait in a queue."""

    backend: str
    queue: str
    jobs: int


class Counted(BaseModel):
    """How many jobs and attempts there are, by state, and how many jobs wait."""

    jobs: dict[str, int]
    attempts: dict[str, int]
    waiting: list[Waiting]


@routes.post("/jobs", status_code=201)
def submit(caller: Caller, body: Submitted) -> Job:
    """Check a job and queue it."""
    return caller.submit(body.spec, request=body.request)


@routes.post("/jobs/render")
def render(caller: Caller, body: ToRender) -> Rendered:
    """Return what a backend would be handed for a job; nothing is kept."""
    return Rendered(text=caller.render(body.spec, full=body.full))


@routes.get("/jobs")
def listed(
    caller: Caller,
    workspace: str | None = None,
    state: Annotated[tuple[JobState, ...], Query()] = (),
    owner: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> list[Job]:
    """Return jobs, newest first."""
    return caller.jobs(workspace, states=state, owner=owner, limit=limit)


@routes.get("/jobs/{job}")
def shown(caller: Caller, job: str) -> Job:
    """Return one job."""
    return caller.job(job)


@routes.get("/jobs/{job}/attempts")
def attempts(caller: Caller, job: str) -> list[Attempt]:
    """Return the attempts of a job."""
    return caller.attempts(job)


@routes.get("/jobs/{job}/events")
def events(caller: Caller, job: str, after: Annotated[int, Query(ge=0, le=2**31)] = 0) -> list[Event]:
    """Return what happened to a job since event number `after`."""
    return caller.events(job, after=after)


@routes.post("/jobs/{job}/stop")
def stop(caller: Caller, job: str) -> Job:
    """Ask a job to end."""
    return caller.stop(job)


@routes.post("/jobs/{job}/retry", status_code=201)
def retry(caller: Caller, job: str) -> Job:
    """Submit the resolved spec of a job that has ended again."""
    return caller.retry(job)


@routes.get("/jobs/{job}/logs")
def logs(caller: Caller, job: str, attempt: Number = None) -> list[str]:
    """Return the names of the logs of an attempt."""
    return caller.logs_of(job, attempt=attempt)


@routes.get("/jobs/{job}/logs/{rank}")
def log(
    caller: Caller,
    job: str,
    rank: str,
    attempt: Number = None,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=1 << 20)] = 65536,
) -> LogPart:
    """Return some of one log; a negative offset counts from the end."""
    return caller.log(job, rank=rank, attempt=attempt, offset=offset, limit=limit)


@routes.get("/jobs/{job}/logs/{rank}/stream", response_class=StreamingResponse)
async def stream(request: Request, caller: Caller, job: str, rank: str, attempt: Number = None) -> StreamingResponse:
    """Send one log as server-sent events while it is written: pieces of text as JSON strings, then the event `end`."""
    first = await run_in_threadpool(caller.log, job, rank=rank, attempt=attempt, offset=-LOG_START)
    return streamed(request, caller, job, rank, attempt, first)


def streamed(
    request: Request, caller: Jobs, job: str, rank: str, attempt: int | None, first: LogPart
) -> StreamingResponse:
    """Return a log from `first` on as server-sent events."""
    return StreamingResponse(_pieces(request, caller, job, rank, attempt, first), media_type="text/event-stream")


async def _pieces(
    request: Request, caller: Jobs, job: str, rank: str, attempt: int | None, part: LogPart
) -> AsyncIterator[str]:
    # One piece at a time: a reader that is slower than the log holds back the reading of the file, and no memory.
    while not await request.is_disconnected():
        if part.text:
            yield f"data: {json.dumps(part.text)}\n\n"
        elif part.ended:
            yield "event: end\ndata: \n\n"
            return
        else:
            yield ": still here\n\n"
            await asyncio.sleep(_POLL_S)
        part = await run_in_threadpool(caller.log, job, rank=rank, attempt=attempt, offset=part.next)


@routes.get("/jobs/{job}/reports")
def reporting(caller: Caller, job: str, attempt: Number = None) -> list[str]:
    """Return the ranks of an attempt that report their steps."""
    return caller.reporting(job, attempt=attempt)


@routes.get("/jobs/{job}/reports/{rank}")
def reports(caller: Caller, job: str, rank: str, attempt: Number = None, offset: Offset = 0) -> Reports:
    """Return what one rank reported: steps, losses, samples a second."""
    return caller.reports(job, rank=rank, attempt=attempt, offset=offset)


@routes.get("/jobs/{job}/usage")
def usage(
    caller: Caller,
    job: str,
    node: Annotated[int | None, Query(ge=0, le=2**31)] = None,
    attempt: Number = None,
    offset: Offset = 0,
) -> list[Usage]:
    """Return what the processes of an attempt used, node by node; a negative offset counts from the end."""
    return caller.usage(job, node=node, attempt=attempt, offset=offset)


@routes.get("/jobs/{job}/plan", response_class=PlainTextResponse)
def plan(caller: Caller, job: str) -> str:
    """Return the picture of the Plan the job trains by, as SVG; empty if it left none."""
    return caller.plan(job)


@routes.get("/counts")
def counted(caller: Caller) -> Counted:
    """Return how many jobs and attempts there are of those that the caller sees; /metrics has them for Prometheus."""
    counts = caller.counts()
    waiting = [Waiting(backend=name, queue=queue, jobs=count) for (name, queue), count in counts.waiting.items()]
    return Counted(jobs=counts.jobs, attempts=counts.attempts, waiting=waiting)


@routes.get("/machine")
def machine(caller: Caller) -> dict[str, Any]:
    """Return what this machine has and how much of it jobs use: `{"cpu": {"used", "total"}, ...}`."""
    return {name: {"used": used, "total": total} for name, (used, total) in caller.machine().items()}

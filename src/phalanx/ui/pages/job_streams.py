"""`reports`, `usage`, `log_stream`: what an open page of a job asks for, as JSON, events or text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse

from phalanx.jobs.api.streams import LOG_START, stream_log
from phalanx.ui.pages.job_list import CurrentSession
from phalanx.ui.plan_words import translate_picture
from phalanx.ui.session import ConsoleSession, language

routes = APIRouter(include_in_schema=False)

AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31)]


@routes.get("/jobs/{job}/log-names")
def log_names(session: CurrentSession, job: str, attempt: AttemptNumber = None) -> list[str]:
    """Return the names of an attempt's logs."""
    return session.jobs.logs_of(job, attempt=attempt) if session.jobs.job(job).attempt else []


@routes.get("/jobs/{job}/log-stream")
async def log_stream(
    request: Request, session: CurrentSession, job: str, rank: str, attempt: AttemptNumber = None
) -> StreamingResponse:
    """Send one log while it is written."""
    part = await run_in_threadpool(session.jobs.log, job, rank=rank, attempt=attempt, offset=-LOG_START)
    return stream_log(request, session.jobs, job, rank, attempt, part)


@routes.get("/jobs/{job}/log-file")
def log_file(session: CurrentSession, job: str, rank: str, attempt: AttemptNumber = None) -> StreamingResponse:
    """Send one log whole, as a file to save."""
    number = attempt or session.jobs.job(job).attempt or 1
    first = session.jobs.log(job, rank=rank, attempt=attempt)  # an unknown rank is an error before anything is sent
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{job}-{number}-{rank}.log")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    pieces = _pieces(session, job, rank, attempt, first.text, first.next)
    return StreamingResponse(pieces, media_type="text/plain; charset=utf-8", headers=headers)


def _pieces(session: ConsoleSession, job: str, rank: str, attempt: int | None, text: str, offset: int) -> Iterator[str]:
    while text:
        yield text
        part = session.jobs.log(job, rank=rank, attempt=attempt, offset=offset, limit=2**20)
        text, offset = part.text, part.next


@routes.get("/jobs/{job}/reports")
def reports(session: CurrentSession, job: str, attempt: AttemptNumber = None, offsets: str = "") -> dict[str, Any]:
    """Return what every rank reported since `offsets` ("worker.0:120,worker.1:88"), and whether more will come."""
    record = session.jobs.job(job)
    if not record.attempt:
        return {"ranks": [], "ended": record.state.is_terminal}
    starts = _offsets(offsets)
    ranks = []
    for rank in session.jobs.reporting(job, attempt=attempt):
        part = session.jobs.reports(job, rank=rank, attempt=attempt, offset=starts.get(rank, 0))
        ranks.append({"rank": rank, "events": part.events, "offset": part.offset})
    return {"ranks": ranks, "ended": record.state.is_terminal and not any(entry["events"] for entry in ranks)}


@routes.get("/jobs/{job}/usage")
def usage(session: CurrentSession, job: str, attempt: AttemptNumber = None, offsets: str = "") -> dict[str, Any]:
    """Return what every node used since `offsets` ("0:120,1:88"), and whether more will come."""
    record = session.jobs.job(job)
    starts = _offsets(offsets)
    nodes = []
    for node in range(record.spec["resources"]["nodes"]):
        nodes += session.jobs.usage(job, node=node, attempt=attempt, offset=starts.get(str(node), 0))
    return {"nodes": nodes, "ended": record.state.is_terminal and not any(item.samples for item in nodes)}


def _offsets(text: str) -> dict[str, int]:
    pairs = [part.rsplit(":", 1) for part in text.split(",") if ":" in part]
    return {name: int(start) for name, start in pairs if start.isdecimal() and len(start) < 16}


@routes.get("/jobs/{job}/plan.svg")
def plan(session: CurrentSession, job: str) -> Response:
    """Return the picture of the job's Plan."""
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}  # its own colours, no script
    drawn = session.jobs.plan(job)
    if language(session.request) == "zh":
        drawn = translate_picture(drawn)
    return Response(drawn, media_type="image/svg+xml", headers=headers)

"""Pages that show: jobs, one job, the queue, datasets and codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from phalanx.errors import NotFoundError
from phalanx.jobs.api.jobs import LOG_START, streamed
from phalanx.jobs.models import Attempt, Job
from phalanx.jobs.spec import TrainingJob
from phalanx.jobs.states import State
from phalanx.ui import formatting
from phalanx.ui.session import ROOT, Visitor, visitor

routes = APIRouter(include_in_schema=False)

Visiting = Annotated[Visitor, Depends(visitor)]
PageNumber = Annotated[int, Query(ge=1, le=10_000)]
AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31)]

_ROWS = 50
_COLUMNS = 30
"""Most values of a report that are shown: a script may report as many as it likes."""
_LIVE = tuple(state for state in State if not state.terminal)


@routes.get("/")
def first(who: Visiting) -> Response:
    """Lead to the jobs of the visitor's workspace."""
    return RedirectResponse(f"{ROOT}/w/{who.workspace}/", 303)


@routes.get("/w/{workspace}/")
def jobs_page(who: Visiting, workspace: str, state: str = "", search: str = "", page: PageNumber = 1) -> Response:
    """Show the jobs of a workspace."""
    values = _jobs(who, workspace, state, search, page)
    return who.page("jobs.html", place="jobs", states=list(State), **values)


@routes.get("/w/{workspace}/jobs-table")
def jobs_table(who: Visiting, workspace: str, state: str = "", search: str = "", page: PageNumber = 1) -> Response:
    """Show the table of jobs alone."""
    return who.page("jobs_table.html", **_jobs(who, workspace, state, search, page))


def _jobs(who: Visitor, workspace: str, state: str, search: str, page: int) -> dict[str, Any]:
    _check_workspace(who, workspace)
    states = (State(state),) if state in set(State) else ()
    last = page * _ROWS
    # A search goes through all names, the rest only as far as the page.
    found = who.jobs.jobs(workspace, states=states, limit=None if search else last + 1)
    found = [job for job in found if search.lower() in job.name.lower()]
    shown = found[last - _ROWS : last]
    return {"jobs": shown, "more": len(found) > last, "page": page, "state": state, "search": search}


def _check_workspace(who: Visitor, workspace: str) -> None:
    if workspace not in who.workspaces:
        raise NotFoundError(f"There is no workspace {workspace!r} that you may see.")


@routes.get("/jobs/{job}")
def job_page(who: Visiting, job: str, attempt: AttemptNumber = None, rank: str = "") -> Response:
    """Show one job: why it is as it is, charts, logs, events."""
    found = who.jobs.job(job)
    number = attempt or found.attempt or 1
    ranks = who.jobs.logs_of(job, attempt=number) if found.attempt else []
    head = _head(who, found)
    chosen = next((one for one in (rank, _failing(head["attempts"], number), *ranks) if one in ranks), "")
    log = who.jobs.log(job, rank=chosen, attempt=number, offset=-LOG_START) if chosen else None
    said = TrainingJob.model_validate(found.spec).model_dump(mode="json", exclude_defaults=True)
    spec = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
    values: dict[str, Any] = {
        "ranks": ranks,
        "chosen": chosen,
        "log": log,
        "spec": spec,
        "picture": bool(who.jobs.plan(job)),
    }
    who.workspace = found.workspace
    return who.page("job.html", place="jobs", attempt=number, **head, **values)


def _failing(attempts: list[Attempt], number: int) -> str:
    """Return the name of the log of the rank to blame for the end of an attempt; empty where none is."""
    ranks = [tried.failure.rank for tried in attempts if tried.number == number and tried.failure is not None]
    return "" if not ranks or ranks[0] is None else str(ranks[0])


def _head(who: Visitor, job: Job) -> dict[str, Any]:
    attempts: list[Attempt] = who.jobs.attempts(job.id)
    events = who.jobs.events(job.id)
    reports = _last_reports(who, job) if job.attempt else []
    return {
        "job": job,
        "may_stop": who.may_stop(job),
        "may_submit": who.may_submit(job.workspace),
        "attempts": attempts,
        "events": events,
        "states": list(State),
        "phases": formatting.phases(events, job.ended),
        "reports": reports,
        "columns": _columns(event for _, event in reports),
        "grace": formatting.length(float(job.spec.get("grace", 30))),
    }


def _last_reports(who: Visitor, job: Job) -> list[tuple[str, dict[str, Any]]]:
    """The last event of each rank."""
    found = []
    for rank in who.jobs.reporting(job.id):
        events = who.jobs.reports(job.id, rank=rank, offset=-4096).events
        if events:
            found.append((rank, events[-1]))
    return found


def _columns(events: Iterable[dict[str, Any]]) -> list[str]:
    """Names of what was reported, with those of every training first."""
    names = dict.fromkeys(name for event in events for name in event if name not in ("time", "step"))
    first = ("loss", "samples_per_s")
    return [*first, *(name for name in names if name not in first)][:_COLUMNS]


@routes.get("/jobs/{job}/head")
def job_head(who: Visiting, job: str) -> Response:
    """Show the part of a job's page that changes."""
    return who.page("job_head.html", **_head(who, who.jobs.job(job)))


@routes.get("/jobs/{job}/events-table")
def events_table(who: Visiting, job: str) -> Response:
    """Show the events of a job alone."""
    return who.page("events.html", events=who.jobs.events(job), states=list(State))


@routes.get("/jobs/{job}/log-names")
def log_names(who: Visiting, job: str, attempt: AttemptNumber = None) -> list[str]:
    """Return the names of an attempt's logs."""
    return who.jobs.logs_of(job, attempt=attempt) if who.jobs.job(job).attempt else []


@routes.get("/jobs/{job}/log-stream")
async def log_stream(
    request: Request, who: Visiting, job: str, rank: str, attempt: AttemptNumber = None
) -> StreamingResponse:
    """Send one log while it is written."""
    part = await run_in_threadpool(who.jobs.log, job, rank=rank, attempt=attempt, offset=-LOG_START)
    return streamed(request, who.jobs, job, rank, attempt, part)


@routes.get("/jobs/{job}/reports")
def reports(who: Visiting, job: str, attempt: AttemptNumber = None, offsets: str = "") -> dict[str, Any]:
    """Return what every rank reported since `offsets` ("worker.0:120,worker.1:88"), and whether more will come."""
    found = who.jobs.job(job)
    if not found.attempt:
        return {"ranks": [], "ended": found.state.terminal}
    known = _offsets(offsets)
    ranks = []
    for rank in who.jobs.reporting(job, attempt=attempt):
        part = who.jobs.reports(job, rank=rank, attempt=attempt, offset=known.get(rank, 0))
        ranks.append({"rank": rank, "events": part.events, "offset": part.offset})
    return {"ranks": ranks, "ended": found.state.terminal and not any(one["events"] for one in ranks)}


@routes.get("/jobs/{job}/usage")
def usage(who: Visiting, job: str, attempt: AttemptNumber = None, offsets: str = "") -> dict[str, Any]:
    """Return what every node used since `offsets` ("0:120,1:88"), and whether more will come."""
    found = who.jobs.job(job)
    known = _offsets(offsets)
    nodes = []
    for node in range(found.spec["resources"]["nodes"]):
        nodes += who.jobs.usage(job, node=node, attempt=attempt, offset=known.get(str(node), 0))
    return {"nodes": nodes, "ended": found.state.terminal and not any(one.samples for one in nodes)}


def _offsets(said: str) -> dict[str, int]:
    pairs = [one.rsplit(":", 1) for one in said.split(",") if ":" in one]
    return {name: int(start) for name, start in pairs if start.isdecimal() and len(start) < 16}


@routes.get("/jobs/{job}/plan.svg")
def plan(who: Visiting, job: str) -> Response:
    """Return the picture of the job's Plan."""
    return Response(who.jobs.plan(job), media_type="image/svg+xml")


@routes.post("/jobs/{job}/stop")
def stop(who: Visiting, job: str) -> Response:
    """Ask a job to end."""
    who.jobs.stop(job)
    return RedirectResponse(f"{ROOT}/jobs/{job}", 303)


@routes.post("/jobs/{job}/retry")
def retry(who: Visiting, job: str) -> Response:
    """Run a job that has ended again."""
    return RedirectResponse(f"{ROOT}/jobs/{who.jobs.retry(job).id}", 303)


@routes.get("/queue")
def queue_page(who: Visiting) -> Response:
    """Show what waits and what runs."""
    return who.page("queue.html", place="queue", **_queue(who))


@routes.get("/queue-table")
def queue_table(who: Visiting) -> Response:
    """Show the queue's tables alone."""
    return who.page("queue_table.html", **_queue(who))


def _queue(who: Visitor) -> dict[str, Any]:
    live = who.jobs.jobs(states=_LIVE)[::-1]
    waiting = [job for job in live if job.state is State.QUEUED]
    waiting.sort(key=lambda job: -job.priority)
    running = [job for job in live if job.state is not State.QUEUED]
    meters = [
        {"name": name, "used": used, "total": total, "text": _amounts(name, used, total)}
        for name, (used, total) in who.jobs.machine().items()
        if total
    ]
    return {"waiting": waiting, "running": running, "meters": meters}


def _amounts(name: str, used: float, total: float) -> str:
    return f"{formatting.gib(used)} / {formatting.gib(total)}" if name == "memory" else f"{used:g} / {total:g}"


@routes.get("/w/{workspace}/datasets")
def datasets(who: Visiting, workspace: str) -> Response:
    """Show the datasets of a workspace."""
    _check_workspace(who, workspace)
    configs = [
        {"name": one.name, "kind": one.config.get("kind"), "where": one.config.get("uri"), "created": one.created}
        for one in who.jobs.datasets(workspace)
    ]
    command = f"phalanx dataset add NAME PATH_OR_ADDRESS --workspace {workspace}"
    return who.page("configs.html", place="datasets", configs=configs, command=command)


@routes.get("/w/{workspace}/codes")
def codes(who: Visiting, workspace: str) -> Response:
    """Show the codes of a workspace."""
    _check_workspace(who, workspace)
    configs = [
        {
            "name": one.name,
            "kind": "git" if one.config.get("git") else "path",
            "where": f"{one.config.get('git') or one.config.get('path')} @ {one.config.get('ref', '')}",
            "created": one.created,
        }
        for one in who.jobs.codes(workspace)
    ]
    command = f"phalanx code add NAME git+https://HOST/REPOSITORY.git@main --workspace {workspace}"
    return who.page("configs.html", place="codes", configs=configs, command=command)

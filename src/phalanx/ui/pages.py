"""Pages of the console: jobs, job details, queue, datasets, code sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from phalanx.jobs.api.streams import LOG_START, stream_log
from phalanx.jobs.models import Attempt, Job, JobState
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import formatting
from phalanx.ui.session import ROOT, ConsoleSession, current_session
from phalanx.units import format_gib, format_length

routes = APIRouter(include_in_schema=False)

CurrentSession = Annotated[ConsoleSession, Depends(current_session)]
PageNumber = Annotated[int, Query(ge=1, le=10_000)]
AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31)]

_ROWS = 50
_EPOCHS, _EPOCH_NODES = 10, 16
"""Changes of the members that are shown, and nodes whose launchers are asked for them."""

_COLUMNS = 30
"""Most values of a report that are shown: a script may report as many as it likes."""
_LIVE = tuple(state for state in JobState if not state.is_terminal)


@routes.get("/")
def first(session: CurrentSession) -> Response:
    """Lead to the jobs of the visitor's workspace."""
    return RedirectResponse(f"{ROOT}/w/{session.workspace}/", 303)


@routes.get("/w/{workspace}/")
def jobs_page(
    session: CurrentSession, workspace: str, state: str = "", search: str = "", page: PageNumber = 1
) -> Response:
    """Show the jobs of a workspace."""
    values = _jobs(session, workspace, state, search, page)
    return session.page("jobs.html", place="jobs", states=list(JobState), **values)


@routes.get("/w/{workspace}/jobs-table")
def jobs_table(
    session: CurrentSession, workspace: str, state: str = "", search: str = "", page: PageNumber = 1
) -> Response:
    """Show the table of jobs alone."""
    return session.page("jobs_table.html", **_jobs(session, workspace, state, search, page))


def _jobs(session: ConsoleSession, workspace: str, state: str, search: str, page: int) -> dict[str, Any]:
    session.check_workspace(workspace)
    states = (JobState(state),) if state in set(JobState) else ()
    last = page * _ROWS
    # A search goes through all names, the rest only as far as the page.
    matches = session.jobs.jobs(workspace, states=states, limit=None if search else last + 1)
    matches = [job for job in matches if search.lower() in job.name.lower()]
    shown = matches[last - _ROWS : last]
    return {"jobs": shown, "more": len(matches) > last, "page": page, "state": state, "search": search}


@routes.get("/jobs/{job}")
def job_page(session: CurrentSession, job: str, attempt: AttemptNumber = None, rank: str = "") -> Response:
    """Show one job: why it is as it is, charts, logs, events."""
    record = session.jobs.job(job)
    number = attempt or record.attempt or 1
    ranks = session.jobs.logs_of(job, attempt=number) if record.attempt else []
    head = _head(session, record)
    failed = [record.failed_log for record in head["attempts"] if record.number == number]
    chosen = next((name for name in (rank, *failed, *ranks) if name in ranks), "")
    log = session.jobs.log(job, rank=chosen, attempt=number, offset=-LOG_START) if chosen else None
    fields = TrainingJob.model_validate(record.spec).model_dump(mode="json", exclude_defaults=True)
    spec = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    values: dict[str, Any] = {
        "ranks": ranks,
        "chosen": chosen,
        "log": log,
        "spec": spec,
        "picture": bool(session.jobs.plan(job)),
    }
    session.workspace = record.workspace
    return session.page("job.html", place="jobs", attempt=number, **head, **values)


def _head(session: ConsoleSession, job: Job) -> dict[str, Any]:
    attempts: list[Attempt] = session.jobs.attempts(job.id)
    events = session.jobs.events(job.id)
    reports = _last_reports(session, job) if job.attempt else []
    return {
        "job": job,
        "hang": session.jobs.hang(job.id),
        "slow": session.jobs.slow(job.id),
        "tables": session.jobs.tables(job.id),
        "may_stop": session.may_stop(job),
        "may_submit": session.may_submit(job.workspace),
        "attempts": attempts,
        "events": events,
        "states": list(JobState),
        "phases": formatting.phases(events, job.ended),
        "reports": reports,
        "epochs": _epochs(session, job) if job.attempt else [],
        "columns": _columns(event for _, event in reports),
        "grace": format_length(float(job.spec.get("grace", 30))),
    }


def _epochs(session: ConsoleSession, job: Job) -> list[dict[str, Any]]:
    """The last changes of the members of an elastic job, newest first; every launcher writes them."""
    resources = job.spec.get("resources", {})
    if not (resources.get("least_nodes") or resources.get("least_procs_per_node")):
        return []
    by_epoch: dict[int, dict[str, Any]] = {}
    for node in range(min(resources["nodes"], _EPOCH_NODES)):
        for event in session.jobs.reports(job.id, rank=f"launcher.{node}", offset=-32768).events:
            if (change := _epoch(event)) is not None:
                by_epoch.setdefault(change["epoch"], change)
    return [by_epoch[epoch] for epoch in sorted(by_epoch, reverse=True)][:_EPOCHS]


def _epoch(event: dict[str, Any]) -> dict[str, Any] | None:
    """What the page shows of a change of the members; None for what is none, for any script may write that file."""
    seconds = event.get("seconds", {})
    is_change = (
        event.get("kind") == "epoch"
        and isinstance(event.get("epoch"), int)
        and isinstance(seconds, dict)
        and all(isinstance(value, int | float) for value in seconds.values())
    )
    if not is_change:
        return None
    shown = {name: event.get(name) for name in ("epoch", "step", "ranks", "reason", "redone")}
    return {**shown, "stall_s": max(seconds.values(), default=None)}


def _last_reports(session: ConsoleSession, job: Job) -> list[tuple[str, dict[str, Any]]]:
    """The last report of each rank."""
    last = []
    for rank in session.jobs.reporting(job.id):
        report = _last_report(session.jobs.reports(job.id, rank=rank, offset=-4096).events)
        if report is not None:
            last.append((rank, report))
    return last


def _last_report(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last event that is a report: a rank also writes that a split changed, or that memory ran out."""
    return next((event for event in reversed(events) if "step" in event), None)


def _columns(events: Iterable[dict[str, Any]]) -> list[str]:
    """Names of what was reported, with those of every training first."""
    names = dict.fromkeys(name for event in events for name in event if name not in ("time", "step"))
    first = ("loss", "samples_per_s")
    return [*first, *(name for name in names if name not in first)][:_COLUMNS]


@routes.get("/jobs/{job}/head")
def job_head(session: CurrentSession, job: str) -> Response:
    """Show the part of a job's page that changes."""
    return session.page("job_head.html", **_head(session, session.jobs.job(job)))


@routes.get("/jobs/{job}/events-table")
def events_table(session: CurrentSession, job: str) -> Response:
    """Show the events of a job alone."""
    return session.page("events.html", events=session.jobs.events(job), states=list(JobState))


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
    return Response(session.jobs.plan(job), media_type="image/svg+xml")


@routes.post("/jobs/{job}/stop")
def stop(session: CurrentSession, job: str) -> Response:
    """Ask a job to end."""
    session.jobs.stop(job)
    return RedirectResponse(f"{ROOT}/jobs/{job}", 303)


@routes.post("/jobs/{job}/retry")
def retry(session: CurrentSession, job: str) -> Response:
    """Run a job that has ended again."""
    return RedirectResponse(f"{ROOT}/jobs/{session.jobs.retry(job).id}", 303)


@routes.get("/queue")
def queue_page(session: CurrentSession) -> Response:
    """Show what waits and what runs."""
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
    meters = [
        {"name": name, "used": use.used, "total": use.total, "text": _amounts(name, use.used, use.total)}
        for name, use in session.jobs.machine().items()
        if use.total
    ]
    return {"waiting": waiting, "running": running, "meters": meters}


def _amounts(name: str, used: float, total: float) -> str:
    return f"{format_gib(used)} / {format_gib(total)}" if name == "memory" else f"{used:g} / {total:g}"


@routes.get("/w/{workspace}/datasets")
def datasets(session: CurrentSession, workspace: str) -> Response:
    """Show the datasets of a workspace."""
    session.check_workspace(workspace)
    configs = [
        {
            "name": config.name,
            "kind": config.config.get("kind"),
            "where": config.config.get("uri"),
            "created": config.created,
        }
        for config in session.jobs.datasets(workspace)
    ]
    command = f"phalanx dataset add NAME PATH_OR_ADDRESS --workspace {workspace}"
    return session.page("configs.html", place="datasets", configs=configs, command=command)


@routes.get("/w/{workspace}/codes")
def codes(session: CurrentSession, workspace: str) -> Response:
    """Show the code sources of a workspace."""
    session.check_workspace(workspace)
    configs = [
        {
            "name": config.name,
            "kind": "git" if config.config.get("git") else "path",
            "where": f"{config.config.get('git') or config.config.get('path')} @ {config.config.get('ref', '')}",
            "created": config.created,
        }
        for config in session.jobs.codes(workspace)
    ]
    command = f"phalanx code add NAME git+https://HOST/REPOSITORY.git@main --workspace {workspace}"
    return session.page("configs.html", place="codes", configs=configs, command=command)

"""`job_page`: the page of one job, in tabs: overview, charts, logs, checkpoints, Plan, events, spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml
from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from phalanx.jobs.api.streams import LOG_START
from phalanx.jobs.models import Attempt, Job, JobState
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import formatting
from phalanx.ui.pages.job_list import TAIL_BYTES, CurrentSession
from phalanx.ui.pages.job_streams import AttemptNumber
from phalanx.ui.progress import compute_progress
from phalanx.ui.session import ROOT, ConsoleSession
from phalanx.units import format_length

routes = APIRouter(include_in_schema=False)

TABS = ("overview", "charts", "logs", "checkpoints", "plan", "events", "spec")

_EPOCHS, _EPOCH_NODES = 10, 16
"""Changes of the members that are shown, and nodes whose launchers are asked for them."""

_COLUMNS = 30
"""Most values of a report that are shown: a script may report as many as it likes."""


@routes.get("/jobs/{job}")
def job_page(
    session: CurrentSession, job: str, tab: str = "overview", attempt: AttemptNumber = None, rank: str = ""
) -> Response:
    """Show one job: why it is as it is, charts, logs, checkpoints, Plan, events or spec."""
    record = session.jobs.job(job)
    number = attempt or record.attempt or 1
    tab = tab if tab in TABS else TABS[0]
    head = _head(session, record, is_whole=tab == TABS[0])
    values: dict[str, Any] = {"tab": tab, "tabs": TABS, "attempt": number}
    match tab:
        case "logs":
            values |= _log(session, record, number, rank, head["attempts"])
        case "checkpoints":
            values["checkpoints"] = session.jobs.checkpoints(job)
        case "plan":
            values["picture"] = bool(session.jobs.plan(job))
        case "events":
            values["events"] = session.jobs.events(job)
        case "spec":
            values["spec"] = spec_text(record)
    session.workspace = record.workspace
    return session.page("job.html", place="jobs", **head, **values)


def spec_text(job: Job) -> str:
    """Return what of a job's spec differs from the defaults, as YAML that can be submitted."""
    fields = TrainingJob.model_validate(job.spec).model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(fields, sort_keys=False, allow_unicode=True))


def _log(session: ConsoleSession, job: Job, number: int, rank: str, attempts: Iterable[Attempt]) -> dict[str, Any]:
    ranks = session.jobs.logs_of(job.id, attempt=number) if job.attempt else []
    failed = [record.failed_log for record in attempts if record.number == number]
    chosen = next((name for name in (rank, *failed, *ranks) if name in ranks), "")
    log = session.jobs.log(job.id, rank=chosen, attempt=number, offset=-LOG_START) if chosen else None
    return {"ranks": ranks, "chosen": chosen, "log": log}


def _head(session: ConsoleSession, job: Job, *, is_whole: bool) -> dict[str, Any]:
    """What the top of every tab shows; with `is_whole` what the overview shows too."""
    attempts: list[Attempt] = session.jobs.attempts(job.id)
    reports = _last_reports(session, job) if job.attempt else []
    head = {
        "job": job,
        "hang": session.jobs.hang(job.id),
        "slow": session.jobs.slow(job.id),
        "may_stop": session.may_stop(job),
        "may_submit": session.may_submit(job.workspace),
        "attempts": attempts,
        "states": list(JobState),
        "progress": compute_progress(reports[0][1]) if reports else None,
        "grace": format_length(float(job.spec.get("grace", 30))),
        "is_whole": is_whole,
    }
    if is_whole:
        last = [(rank, events[-1]) for rank, events in reports]
        head |= {
            "tables": session.jobs.tables(job.id),
            "phases": formatting.phases(session.jobs.events(job.id), job.ended),
            "reports": last,
            "columns": _columns(event for _, event in last),
            "epochs": _epochs(session, job) if job.attempt else [],
        }
    return head


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


def _last_reports(session: ConsoleSession, job: Job) -> list[tuple[str, list[dict[str, Any]]]]:
    """The last events of each rank that has any."""
    ranks = session.jobs.reporting(job.id)
    parts = ((rank, session.jobs.reports(job.id, rank=rank, offset=-TAIL_BYTES).events) for rank in ranks)
    return [(rank, events) for rank, events in parts if events]


def _columns(events: Iterable[dict[str, Any]]) -> list[str]:
    """Names of what was reported, with those of every training first."""
    names = dict.fromkeys(
        name for event in events for name in event if name not in ("time", "step", "epochs", "total_steps")
    )
    first = ("loss", "samples_per_s")
    return [*first, *(name for name in names if name not in first)][:_COLUMNS]


@routes.get("/jobs/{job}/head")
def job_head(session: CurrentSession, job: str) -> Response:
    """Show the top of a job's page, which changes."""
    return session.page("job_head.html", **_head(session, session.jobs.job(job), is_whole=False))


@routes.get("/jobs/{job}/facts")
def job_facts(session: CurrentSession, job: str) -> Response:
    """Show the part of the overview that changes, below its charts."""
    return session.page("job_facts.html", **_head(session, session.jobs.job(job), is_whole=True))


@routes.get("/jobs/{job}/events-table")
def events_table(session: CurrentSession, job: str) -> Response:
    """Show the events of a job alone."""
    return session.page("events.html", events=session.jobs.events(job), states=list(JobState))


@routes.post("/jobs/{job}/stop")
def stop(session: CurrentSession, job: str) -> Response:
    """Ask a job to end."""
    session.jobs.stop(job)
    return RedirectResponse(f"{ROOT}/jobs/{job}", 303)


@routes.post("/jobs/{job}/retry")
def retry(session: CurrentSession, job: str) -> Response:
    """Run a job that has ended again."""
    return RedirectResponse(f"{ROOT}/jobs/{session.jobs.retry(job).id}", 303)

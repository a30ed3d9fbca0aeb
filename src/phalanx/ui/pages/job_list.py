"""`jobs_page`: the list of jobs, with states, search, sorting, progress, and actions on several jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Form, Query
from fastapi.responses import RedirectResponse, Response

from phalanx.errors import ConfigError, PhalanxError
from phalanx.jobs.models import Job, JobState
from phalanx.ui.progress import JobProgress, compute_progress
from phalanx.ui.session import ROOT, ConsoleSession, current_session

routes = APIRouter(include_in_schema=False)

CurrentSession = Annotated[ConsoleSession, Depends(current_session)]
PageNumber = Annotated[int, Query(ge=1, le=10_000)]

_ROWS = 50
_MOST_SELECTED = 200
MOST_COMPARED = 8
"""Most runs side by side: as many colours as lines can be told apart by."""

TAIL_BYTES = 8192
"""Bytes of a rank's reports from which progress is told: some dozens of events."""

_SORTS: dict[str, Callable[[Job], Any]] = {
    "name": lambda job: job.id,
    "state": lambda job: list(JobState).index(job.state),
    "priority": lambda job: job.priority,
    "owner": lambda job: job.owner,
    "submitted": lambda job: job.created,
    "duration": lambda job: ((job.ended or datetime.now(UTC)) - job.started).total_seconds() if job.started else -1.0,
}
"""Columns that a list is sorted by, and by what of a job."""


@dataclass(frozen=True)
class ListQuery:
    """What a list of jobs is asked for, as its address has it."""

    state: str = ""
    search: str = ""
    sort: str = "submitted"
    descending: bool = True
    page: int = 1

    def address(self, **changes: Any) -> str:
        """Return the query of the address that shows the same list with some values changed."""
        values = {**self.__dict__, **changes}
        values["order"] = "desc" if values.pop("descending") else "asc"
        return f"?{urlencode(values)}"

    def sorted_by(self, column: str) -> str:
        """Return the address that sorts by `column`, the other way round if it is sorted by it now."""
        return self.address(sort=column, descending=column == self.sort and not self.descending, page=1)


def read_query(
    state: str = "", search: str = "", sort: str = "submitted", order: str = "desc", page: PageNumber = 1
) -> ListQuery:
    """Return the query of an address; an unknown column means the newest first."""
    return ListQuery(state, search, sort if sort in _SORTS else "submitted", order != "asc", page)


Asked = Annotated[ListQuery, Depends(read_query)]


@routes.get("/")
def first(session: CurrentSession) -> Response:
    """Lead to the jobs of the visitor's workspace."""
    return RedirectResponse(f"{ROOT}/w/{session.workspace}/", 303)


@routes.get("/w/{workspace}/")
def jobs_page(session: CurrentSession, workspace: str, query: Asked) -> Response:
    """Show the jobs of a workspace."""
    return session.page("jobs.html", place="jobs", **_list_values(session, workspace, query))


@routes.get("/w/{workspace}/jobs-table")
def jobs_table(session: CurrentSession, workspace: str, query: Asked) -> Response:
    """Show the summary and the table of jobs alone."""
    return session.page("jobs_table.html", **_list_values(session, workspace, query))


def _list_values(session: ConsoleSession, workspace: str, query: ListQuery) -> dict[str, Any]:
    session.check_workspace(workspace)
    shown, has_more = _select(session, workspace, query)
    counts = session.jobs.counts(workspace).jobs
    return {
        "jobs": shown,
        "more": has_more,
        "query": query,
        "counts": [(state, counts[state]) for state in JobState if counts.get(state)],
        "total": sum(counts.values()),
        "progress": {job.id: progress for job in shown if (progress := read_progress(session, job)) is not None},
    }


def _select(session: ConsoleSession, workspace: str, query: ListQuery) -> tuple[Sequence[Job], bool]:
    """The jobs of a page, and whether more follow."""
    states = (JobState(query.state),) if query.state in set(JobState) else ()
    last = query.page * _ROWS
    # The store has the newest first; another order, or a search, needs all of them.
    is_stored_order = query.sort == "submitted" and query.descending and not query.search
    jobs = session.jobs.jobs(workspace, states=states, limit=last + 1 if is_stored_order else None)
    if not is_stored_order:
        jobs = [job for job in jobs if query.search.lower() in job.name.lower()]
        jobs.sort(key=_SORTS[query.sort], reverse=query.descending)
    return jobs[last - _ROWS : last], len(jobs) > last


def read_progress(session: ConsoleSession, job: Job) -> JobProgress | None:
    """Return how far a job's last attempt is by the reports of its first rank; None if it has reported nothing."""
    if not job.attempt:
        return None
    ranks = session.jobs.reporting(job.id)
    return compute_progress(session.jobs.reports(job.id, rank=ranks[0], offset=-TAIL_BYTES).events) if ranks else None


@routes.post("/w/{workspace}/selected")
def act_on_selected(
    session: CurrentSession,
    workspace: str,
    action: Annotated[str, Form()],
    job: Annotated[list[str], Form(max_length=_MOST_SELECTED)] = [],  # noqa: B006 - the framework makes a new one
    back: Annotated[str, Form()] = "",
) -> Response:
    """Stop, run again or compare the selected jobs; what cannot be done is said for each job, the rest is done."""
    session.check_workspace(workspace)
    if action == "compare":
        if len(job) > MOST_COMPARED:
            raise ConfigError(f"{len(job)} jobs were selected; at most {MOST_COMPARED} are compared. Select fewer.")
        chosen = urlencode([("job", name) for name in job])
        return RedirectResponse(f"{ROOT}/w/{workspace}/compare?{chosen}", 303)
    actions: dict[str, Callable[[str], Job]] = {"stop": session.jobs.stop, "retry": session.jobs.retry}
    if action not in actions:
        raise ConfigError(f"{action!r} is nothing that can be done with several jobs: compare, stop or retry them.")
    refusals = []
    for name in job:
        try:
            actions[action](name)
        except PhalanxError as error:
            refusals.append(f"{name}: {error}")
    if refusals:
        return session.page("problem.html", 409, problem="\n".join(refusals))
    back = back if back.startswith("?") else ""
    return RedirectResponse(f"{ROOT}/w/{workspace}/{back}", 303)

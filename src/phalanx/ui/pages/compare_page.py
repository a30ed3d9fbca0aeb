"""`compare`: runs side by side: what their specs differ in, their reports, charts of every metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response

from phalanx.jobs.models import Job
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui.pages.job_list import MOST_COMPARED, CurrentSession, read_progress
from phalanx.ui.session import ROOT

routes = APIRouter(include_in_schema=False)


@routes.get("/w/{workspace}/compare")
def compare(
    session: CurrentSession,
    workspace: str,
    job: Annotated[list[str], Query(max_length=MOST_COMPARED)] = [],  # noqa: B006
) -> Response:
    """Show up to eight jobs side by side."""
    session.check_workspace(workspace)
    records = [session.jobs.job(name) for name in dict.fromkeys(job)]
    sources = {record.id: f"{ROOT}/jobs/{record.id}/reports?" for record in records if record.attempt}
    values: dict[str, Any] = {
        "records": records,
        "progress": {record.id: read_progress(session, record) for record in records},
        "differences": list_differences(records),
        "sources": sources,
    }
    return session.page("compare.html", place="jobs", **values)


def list_differences(records: list[Job]) -> list[tuple[str, list[str]]]:
    """Return the fields in which the specs of jobs differ, each with its value in every job; names are left out."""
    flat = [dict(_flatten("", TrainingJob.model_validate(record.spec).model_dump(mode="json"))) for record in records]
    names = dict.fromkeys(name for fields in flat for name in fields)
    rows = [(name, [fields.get(name, "") for fields in flat]) for name in names if name not in ("name", "workspace")]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def _flatten(prefix: str, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in fields.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat += _flatten(f"{path}.", value)
        else:
            flat.append((path, "" if value is None or value in ({}, [], ()) else str(value)))
    return flat

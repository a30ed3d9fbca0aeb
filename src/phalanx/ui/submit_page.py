"""`form_page`: the job submission page."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError

from phalanx.errors import AccessError, SpecError
from phalanx.jobs.spec.file import describe_mistake
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import form
from phalanx.ui.field_words import CHINESE
from phalanx.ui.pages import CurrentSession
from phalanx.ui.session import ROOT, ConsoleSession, language

routes = APIRouter(include_in_schema=False)

_SCHEMA = TrainingJob.model_json_schema()
_HIDDEN = frozenset({"workspace", "code.commit", "code.digest"})
"""Said by the page's address, or filled at submission."""


@routes.get("/w/{workspace}/new")
def form_page(session: CurrentSession, workspace: str, like: str = "") -> Response:
    """Show the form, filled in from the job `like` if there is one."""
    _check_role(session, workspace)
    filled = _fields_of(session, like) if like else {}
    return _form(session, filled, {}, "", secrets.token_hex(8))


@routes.post("/w/{workspace}/new")
async def submit(request: Request, session: CurrentSession, workspace: str) -> Response:
    """Submit what was filled in, or show the form again with what is wrong at each field."""
    sent = await request.form()
    filled = {name: value for name, value in sent.items() if isinstance(value, str)}
    key = filled.pop("request", "")
    return await run_in_threadpool(_submit, session, workspace, filled, key)


def _fields_of(session: ConsoleSession, job: str) -> dict[str, str]:
    """Return what the form shows for an existing job: the fields that differ from their defaults."""
    spec = TrainingJob.model_validate(session.jobs.job(job).spec)
    return form.filled_from(_SCHEMA, spec.model_dump(mode="json", exclude_defaults=True))


def _check_role(session: ConsoleSession, workspace: str) -> None:
    session.check_workspace(workspace)
    if not session.may_submit(workspace):
        name, role = session.actor.name, session.roles[workspace]
        raise AccessError(
            f"{name} has role {role} in workspace {workspace!r}; to submit jobs requires developer. An admin can "
            f"change that: phalanx workspace member add {name} developer -w {workspace}."
        )


def _submit(session: ConsoleSession, workspace: str, filled: dict[str, str], key: str) -> Response:
    job, errors = form.collect(_SCHEMA, filled)
    try:
        spec = TrainingJob.model_validate(job | {"workspace": workspace})
    except ValidationError as error:
        return _form(session, filled, _messages_by_path(error) | errors, "", key)
    if errors:
        return _form(session, filled, errors, "", key)
    try:
        new_job = session.jobs.submit(spec, request=key or None)
    except SpecError as error:
        return _form(session, filled, {}, str(error), key)
    return RedirectResponse(f"{ROOT}/jobs/{new_job.id}", 303)


def _form(session: ConsoleSession, filled: dict[str, str], errors: dict[str, str], problem: str, key: str) -> Response:
    words = CHINESE if language(session.request) == "zh" else None
    # Code that was sent to the server has no other name than its digest.
    sent = filled.get("code.digest") and not any(filled.get(f"code.{name}") for name in ("path", "git", "name"))
    form_fields = form.fields(_SCHEMA, filled, errors, _HIDDEN - {"code.digest"} if sent else _HIDDEN, words)
    summary = "\n".join(f"{path}: {message}" for path, message in errors.items())
    values: dict[str, Any] = {"fields": form_fields, "problem": problem or summary, "request_key": key}
    return session.page("form.html", 422 if values["problem"] else 200, place="jobs", **values)


def _messages_by_path(error: ValidationError) -> dict[str, str]:
    """What is wrong by the field it is wrong in: the names of its place, without indices and kinds."""
    messages = {}
    for mistake in error.errors():
        names = [part for part in mistake["loc"] if isinstance(part, str)]
        messages[".".join(names)] = describe_mistake(TrainingJob, mistake)
    return messages

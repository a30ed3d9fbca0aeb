"""`form_page`: submit a job by a form of few fields, the others behind a fold, and the YAML beside it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from pydantic import ValidationError
from starlette.datastructures import FormData

from phalanx.errors import AccessError, SpecError
from phalanx.i18n import wording
from phalanx.jobs.spec.file import describe_mistake, read
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.ui import form
from phalanx.ui.field_labels import LABELS
from phalanx.ui.pages.job_list import CurrentSession
from phalanx.ui.pages.machine_page import list_meters
from phalanx.ui.session import ROOT, ConsoleSession, language

routes = APIRouter(include_in_schema=False)

_SCHEMA = TrainingJob.model_json_schema()
_HIDDEN = frozenset(
    {"workspace", "code.commit", "code.digest", "resources.least_nodes", "resources.least_procs_per_node"}
)
"""In the page's address, or filled at submission."""

_MAIN = ("name", "command", "code", "datasets", "resources", "backend", "kubernetes", "slurm", "env", "secrets")
"""Fields that are shown at once; backends' own only where that backend is chosen."""

_SOURCES = {"path": ("path",), "git": ("git", "ref", "secret"), "name": ("name", "ref", "secret")}
"""Where code can come from, and the fields that belong to it."""

_SOURCE, _NAMES, _YAML, _ACTION, _REQUEST = "code.source", "datasets.names", "yaml", "action", "request"
"""Inputs of the page that are no fields of a job."""


@dataclass(frozen=True)
class Draft:
    """What the page shows: a job that is being written.

    Attributes:
        filled: Text of each field, by path.
        source: Where the code comes from, a key of _SOURCES.
        names: Datasets that are picked by name.
        yaml: The job as YAML, where it was typed.
        errors: What is wrong, by path.
        problem: What is wrong with the job as a whole.
        rendered: What would be submitted, after a check.
    """

    filled: Mapping[str, str] = field(default_factory=dict)
    source: str = "path"
    names: tuple[str, ...] = ()
    yaml: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    rendered: str = ""

    def build_job(self, workspace: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the job as JSON, and what could not be read of it, by path."""
        own = _SOURCES[self.source]
        foreign = {f"code.{name}" for names in _SOURCES.values() for name in names if name not in own}
        job, errors = form.collect(_SCHEMA, {path: text for path, text in self.filled.items() if path not in foreign})
        in_full = job.get("datasets", [])
        if self.names and isinstance(in_full, list):
            job["datasets"] = [*self.names, *in_full]
        return job | {"workspace": workspace}, errors


@routes.get("/w/{workspace}/new")
def form_page(session: CurrentSession, workspace: str, like: str = "") -> Response:
    """Show the form, filled in from the job `like` if there is one."""
    _check_role(session, workspace)
    draft = _draft_of(TrainingJob.model_validate(session.jobs.job(like).spec)) if like else Draft()
    return _page(session, workspace, draft, secrets.token_hex(8))


@routes.post("/w/{workspace}/new")
async def submit(request: Request, session: CurrentSession, workspace: str) -> Response:
    """Submit what was filled in, check it, or fill the form from YAML; mistakes are shown at their fields."""
    sent = await request.form()
    return await run_in_threadpool(_act, session, workspace, sent)


@routes.post("/w/{workspace}/new/yaml")
async def preview(request: Request, session: CurrentSession, workspace: str) -> Response:
    """Return the YAML of the job that the form would submit, as far as it can be read."""
    session.check_workspace(workspace)
    draft = _read_draft(await request.form())
    job, _ = draft.build_job(workspace)
    job.pop("workspace")
    return PlainTextResponse(yaml.safe_dump(job, sort_keys=False, allow_unicode=True) if job else "")


def _act(session: ConsoleSession, workspace: str, sent: FormData) -> Response:
    draft, key = _read_draft(sent), str(sent.get(_REQUEST, ""))
    match sent.get(_ACTION):
        case "fill":
            _check_role(session, workspace)
            return _page(session, workspace, _draft_of_yaml(draft), key)
        case "check":
            return _submit(session, workspace, draft, key, is_check=True)
    return _submit(session, workspace, draft, key, is_check=False)


def _read_draft(sent: FormData) -> Draft:
    texts: dict[str, list[str]] = {}
    for name, value in sent.multi_items():
        if isinstance(value, str):
            texts.setdefault(name, []).append(value)
    source = texts.pop(_SOURCE, ["path"])[-1]
    names = tuple(texts.pop(_NAMES, []))
    text = texts.pop(_YAML, [""])[-1]
    for name in (_ACTION, _REQUEST):
        texts.pop(name, None)
    filled = {name: "\n".join(values) for name, values in texts.items()}
    return Draft(filled, source if source in _SOURCES else "path", names, text)


def _draft_of(spec: TrainingJob) -> Draft:
    """The draft that shows an existing job: the fields that differ from their defaults."""
    fields = spec.model_dump(mode="json", exclude_defaults=True)
    datasets = fields.get("datasets", [])
    names = tuple(entry["name"] for entry in datasets if list(entry) == ["name"])
    fields["datasets"] = [entry for entry in datasets if list(entry) != ["name"]]
    source = next((key for key in _SOURCES if fields.get("code", {}).get(key)), "path")
    return Draft(form.filled_from(_SCHEMA, _with_ranges(fields)), source, names)


def _with_ranges(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields with ranges as they are typed: 1:4."""
    resources = dict(fields.get("resources", {}))
    for name in ("nodes", "procs_per_node"):
        least = resources.pop(f"least_{name}", None)
        if least is not None:
            resources[name] = f"{least}:{resources.get(name, 1)}"
    return fields | {"resources": resources}


def _draft_of_yaml(draft: Draft) -> Draft:
    try:
        filled = _draft_of(read(draft.yaml))
    except SpecError as error:
        return Draft(draft.filled, draft.source, draft.names, draft.yaml, problem=str(error))
    return Draft(filled.filled, filled.source, filled.names, draft.yaml)


def _check_role(session: ConsoleSession, workspace: str) -> None:
    session.check_workspace(workspace)
    if not session.may_submit(workspace):
        name, role = session.actor.name, session.roles[workspace]
        raise AccessError(
            f"{name} has role {role} in workspace {workspace!r}; to submit jobs requires developer. An admin can "
            f"change that: phalanx workspace member add {name} developer -w {workspace}."
        )


def _submit(session: ConsoleSession, workspace: str, draft: Draft, key: str, *, is_check: bool) -> Response:
    job, errors = draft.build_job(workspace)
    try:
        spec = TrainingJob.model_validate(job)
    except ValidationError as error:
        return _page(session, workspace, _with(draft, errors=_messages_by_path(error) | errors), key)
    if errors:
        return _page(session, workspace, _with(draft, errors=errors), key)
    try:
        if is_check:
            return _page(session, workspace, _with(draft, rendered=session.jobs.render(spec)), key)
        new_job = session.jobs.submit(spec, request=key or None)
    except SpecError as error:
        return _page(session, workspace, _with(draft, problem=str(error)), key)
    return RedirectResponse(f"{ROOT}/jobs/{new_job.id}", 303)


def _with(draft: Draft, **changes: Any) -> Draft:
    return Draft(**{**draft.__dict__, **changes})


def _page(session: ConsoleSession, workspace: str, draft: Draft, key: str) -> Response:
    chosen = language(session.request)
    # Code that was sent to the server has no other name than its digest.
    is_sent = bool(draft.filled.get("code.digest")) and not any(draft.filled.get(f"code.{name}") for name in _SOURCES)
    shown = form.fields(
        _SCHEMA,
        draft.filled,
        draft.errors,
        _HIDDEN - {"code.digest"} if is_sent else _HIDDEN,
        LABELS,
        _options(session, workspace),
        chosen,
    )
    main = {child.path: child for child in shown if child.path in _MAIN}
    rest = [child for child in shown if child.path not in _MAIN]
    text = draft.yaml or _text_of(draft, workspace)
    has_problem = bool(draft.problem or draft.errors)
    return session.page(
        "form.html",
        422 if has_problem else 200,
        place="jobs",
        main=[main[path] for path in _MAIN],
        rest=rest,
        rest_open=any(child.value or child.error or child.open for child in rest),
        draft=draft,
        errors=dict(draft.errors),
        labels={path: wording(label, chosen) for path, label in LABELS.items()},
        sources=_SOURCES,
        yaml=text,
        meters=list_meters(session),
        request_key=key,
    )


def _text_of(draft: Draft, workspace: str) -> str:
    job, _ = draft.build_job(workspace)
    job.pop("workspace")
    return str(yaml.safe_dump(job, sort_keys=False, allow_unicode=True)) if job else ""


def _options(session: ConsoleSession, workspace: str) -> dict[str, list[str]]:
    """What the workspace offers for fields that name something of it."""
    names = [secret.name for secret in session.jobs.secrets(workspace)]
    return {
        "code.name": [config.name for config in session.jobs.codes(workspace)],
        "code.secret": names,
        "secrets": names,
        "datasets": [config.name for config in session.jobs.datasets(workspace)],
    }


def _messages_by_path(error: ValidationError) -> dict[str, str]:
    """What is wrong by the field it is wrong in: the names of its place, without indices and kinds."""
    messages = {}
    for mistake in error.errors():
        names = [part for part in mistake["loc"] if isinstance(part, str)]
        messages[".".join(names)] = describe_mistake(TrainingJob, mistake)
    return messages

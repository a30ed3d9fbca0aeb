"""`add_errors`: map exceptions to HTTP statuses and one JSON error format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from phalanx.errors import AccessError, BackendError, ConfigError, NotFoundError, PhalanxError, StateError
from phalanx.jobs.api.auth import TokenError
from phalanx.jobs.spec.file import describe_mistake
from phalanx.jobs.spec.training_job import TrainingJob

logger = logging.getLogger("phalanx.jobs")

_STATUS: tuple[tuple[type[PhalanxError], int], ...] = (
    (TokenError, 401),
    (AccessError, 403),
    (NotFoundError, 404),
    (StateError, 409),
    (ConfigError, 422),
    (BackendError, 502),
)


class Problem(BaseModel):
    """What every answer that is no success holds."""

    error: str
    """Kind of the error: the name of its class."""
    message: str
    """What was asked, what was found, what to do."""


RESPONSES: dict[int | str, dict[str, object]] = {
    status: {"model": Problem} for status in (400, 401, 403, 404, 409, 413, 422, 429, 502)
}
"""For the description of every route."""


def status_of(error: PhalanxError) -> int:
    """Return the HTTP status that `error` answers with."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def add_errors(app: FastAPI) -> None:
    """Let `app` answer every error as a Problem."""
    app.add_exception_handler(PhalanxError, _answer_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)


def _answer_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PhalanxError)
    status = status_of(error)
    if status == 500:
        logger.error("an answer failed", exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return _problem(type(error).__name__, str(error), status, headers)


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    bare = [part["loc"][1] for part in mistakes if part["type"] == "extra_forbidden" and len(part["loc"]) == 2]
    if any(part["loc"] == ("body", "spec") for part in mistakes) and TrainingJob.model_fields.keys() & bare:
        return _problem("SpecError", 'body: this is a job itself; put it under `spec`: {"spec": {...}}', 422)
    return _problem("SpecError", "\n".join(map(_describe, mistakes)), 422)


def _describe(mistake: Any) -> str:
    """Return what is wrong at one place; within a job, in the words of the command line."""
    location, words = mistake["loc"], mistake["msg"]
    if location[:2] == ("body", "spec") and len(location) > 2:
        inside: Any = {**mistake, "loc": location[2:]}
        words = describe_mistake(TrainingJob, inside)
    elif mistake["type"] == "string_pattern_mismatch":
        words = describe_mistake(TrainingJob, mistake)
    return f"{'.'.join(map(str, location))}: {words}"


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _problem("HTTPError", str(error.detail), error.status_code, error.headers)


def _problem(kind: str, message: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    # A message quotes what came in, and that may hold what is no letter.
    text = message.encode("utf-8", "replace").decode()
    return JSONResponse({"error": kind, "message": text}, status, headers)

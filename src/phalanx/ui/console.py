"""`add_console`: the web console under /ui: static files, sign-in, error pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Form, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from phalanx.errors import AccessError, NotFoundError, PhalanxError
from phalanx.jobs.api.auth import TokenError, authenticate
from phalanx.jobs.api.error_handlers import status_of
from phalanx.ui.i18n import LANGUAGES, speaker
from phalanx.ui.pages import (
    compare_page,
    job_list,
    job_page,
    job_streams,
    machine_page,
    submit_page,
    workspace_pages,
)
from phalanx.ui.session import COOKIE, ROOT, check_origin, current_session, keep_language, language, plain_page

routes = APIRouter(include_in_schema=False)

_PAGES = (job_list, job_page, job_streams, compare_page, machine_page, workspace_pages, submit_page)


def add_console(app: FastAPI) -> None:
    """Add the console to the server's application, under /ui; / leads there."""
    app.mount(f"{ROOT}/static", StaticFiles(directory=Path(__file__).with_name("static")), name="static")
    for part in (routes, *(page.routes for page in _PAGES)):
        app.include_router(part, prefix=ROOT)
    app.add_api_route("/", lambda: RedirectResponse(f"{ROOT}/"), include_in_schema=False)
    _show_errors(app)


def _show_errors(app: FastAPI) -> None:
    handler: Callable[[Request, Exception], Response] = app.exception_handlers[PhalanxError]  # type: ignore[assignment]

    def handle(request: Request, error: Exception) -> Response:
        if not request.url.path.startswith(ROOT):
            return handler(request, error)
        assert isinstance(error, PhalanxError)
        return _error_page(request, error)

    app.add_exception_handler(PhalanxError, handle)
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _page_instead(app.exception_handlers[kind]))  # type: ignore[arg-type]


def _page_instead(handler: Callable[[Request, Exception], Response]) -> Callable[[Request, Exception], Response]:
    """Return what shows errors of the framework as pages under the console's address."""

    def handle(request: Request, error: Exception) -> Response:
        if not request.url.path.startswith(f"{ROOT}/"):
            return handler(request, error)
        say = speaker(language(request))
        if request.method == "POST" and isinstance(error, RequestValidationError):
            return _problem_page(request, 422, say("field missing"))
        status = error.status_code if isinstance(error, HTTPException) else 404
        problem = str(error.detail) if isinstance(error, HTTPException) and status != 404 else say("not found")
        return _problem_page(request, status, problem)

    return handle


def _problem_page(request: Request, status: int, problem: str) -> Response:
    """Return a page with an error, inside the console's frame if the user has signed in."""
    try:
        return current_session(request).page("problem.html", status, problem=problem)
    except PhalanxError:
        return plain_page(request, "problem.html", status, problem=problem)


def _error_page(request: Request, error: PhalanxError) -> Response:
    if isinstance(error, TokenError):
        if (
            request.method == "GET"
            and "text/html" in request.headers.get("accept", "")
            and "live" not in request.headers
        ):
            back = quote(str(request.url.path), safe="/")
            return RedirectResponse(f"{ROOT}/sign-in?back={back}", 303)
        return plain_page(request, "sign_in.html", 401, problem=str(error), back=f"{ROOT}/")
    say = speaker(language(request))
    problem = say("not found") if isinstance(error, NotFoundError) else str(error)
    return _problem_page(request, status_of(error), problem)


@routes.get("/sign-in")
def sign_in_page(request: Request, back: str = "") -> Response:
    """Ask for a token."""
    return plain_page(request, "sign_in.html", problem="", back=_console_path(back))


@routes.post("/sign-in")
def sign_in(request: Request, token: Annotated[str, Form()], back: Annotated[str, Form()] = "") -> Response:
    """Keep a valid token in a cookie that no script reads and no other site sends."""
    check_origin(request)
    try:
        authenticate(request, token.strip())
    except AccessError:
        say = speaker(language(request))
        return plain_page(request, "sign_in.html", 401, problem=say("token refused"), back=_console_path(back))
    response = RedirectResponse(_console_path(back), 303)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, token.strip(), httponly=True, samesite="strict", secure=secure, path=ROOT)
    return response


@routes.post("/sign-out")
def sign_out(request: Request) -> Response:
    """Forget the token."""
    check_origin(request)
    response = RedirectResponse(f"{ROOT}/sign-in", 303)
    response.delete_cookie(COOKIE, path=ROOT)
    return response


@routes.get("/language/{chosen}")
def choose_language(chosen: str, back: str = "") -> Response:
    """Remember a language and go back."""
    response = RedirectResponse(_console_path(back), 303)
    if chosen in LANGUAGES:
        keep_language(response, chosen)
    return response


def _console_path(back: str) -> str:
    """`back` if it is a page of the console, else the first page: a link must not lead elsewhere."""
    return back if back.startswith(f"{ROOT}/") and "\\" not in back and "//" not in back else f"{ROOT}/"

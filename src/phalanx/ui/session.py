"""`ConsoleSession`: cookie session of a signed-in user, and page rendering."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.responses import HTMLResponse

from phalanx.errors import AccessError, NotFoundError
from phalanx.jobs.api.auth import TokenError, authenticate
from phalanx.jobs.models import Actor, Job, MemberRole
from phalanx.jobs.protocol import Jobs
from phalanx.ui import formatting, i18n
from phalanx.units import format_bytes

ROOT = "/ui"
COOKIE = "phalanx_session"
_LANGUAGE = "phalanx_language"
_WORKSPACE = "phalanx_workspace"
_YEAR_S = 365 * 24 * 3600

_pages = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_pages.globals |= {
    "when": formatting.when,
    "ago": formatting.ago,
    "length": formatting.length,
    "span": formatting.span,
    "number": formatting.number,
    "size": format_bytes,
    "prose": formatting.prose,
}


def language(request: Request) -> str:
    """Return the language chosen before, or the one the browser prefers."""
    chosen = request.cookies.get(_LANGUAGE, "")
    return chosen if chosen in i18n.LANGUAGES else i18n.best(request.headers.get("accept-language", ""))


def keep_language(response: Response, chosen: str) -> None:
    """Store the chosen language in a cookie of `response`."""
    response.set_cookie(_LANGUAGE, chosen, max_age=_YEAR_S, samesite="strict", httponly=True)


@dataclass
class ConsoleSession:
    """A signed-in user of the console.

    Attributes:
        jobs: What they may ask.
        actor: Who they are.
        roles: What they may do, by the workspaces they see.
        workspace: The one the pages are about.
    """

    request: Request
    jobs: Jobs
    actor: Actor
    roles: dict[str, MemberRole]
    workspace: str

    @property
    def workspaces(self) -> list[str]:
        """Names of the workspaces they see."""
        return list(self.roles)

    def check_workspace(self, workspace: str) -> None:
        """Raise NotFoundError for a workspace that they do not see."""
        if workspace not in self.roles:
            raise NotFoundError(f"There is no workspace {workspace!r} that you may see.")

    def may_submit(self, workspace: str | None = None) -> bool:
        """Return whether they may submit jobs in a workspace, by default the one the pages are about."""
        return self.roles.get(workspace or self.workspace) in (MemberRole.DEVELOPER, MemberRole.ADMIN)

    def may_stop(self, job: Job) -> bool:
        """Return whether they may stop a job: their own, or as an admin anyone's."""
        own = job.owner == self.actor.name and self.may_submit(job.workspace)
        return own or self.roles.get(job.workspace) is MemberRole.ADMIN

    def page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a page, or a part of one, made for this visitor."""
        at = f"{ROOT}/w/{self.workspace}"
        places = (
            ("jobs", f"{at}/"),
            ("queue", f"{ROOT}/queue"),
            ("datasets", f"{at}/datasets"),
            ("codes", f"{at}/codes"),
            ("secrets", f"{at}/secrets"),
            ("members", f"{at}/members"),
        )
        around = {"actor": self.actor, "places": places, "workspaces": self.workspaces, "home": f"{at}/"}
        around["may_submit"] = self.may_submit()
        response = plain_page(self.request, template, status, **{"workspace": self.workspace, **around, **values})
        response.set_cookie(_WORKSPACE, self.workspace, max_age=_YEAR_S, samesite="strict", httponly=True)
        return response


def current_session(request: Request) -> ConsoleSession:
    """Return who sent `request`.

    Raises:
        TokenError: If they have not signed in, or their token is no longer valid.
        AccessError: If another site's page sent it in their name.
    """
    check_origin(request)
    token = request.cookies.get(COOKIE)
    if not token:
        raise TokenError("Sign in first.")
    jobs = authenticate(request, token)
    actor = jobs.whoami()
    roles = {
        space.name: MemberRole.ADMIN if actor.owner else space.members.get(actor.name, MemberRole.VIEWER)
        for space in jobs.workspaces()
    }
    return ConsoleSession(request, jobs, actor, roles, _workspace(request, list(roles)))


def _workspace(request: Request, names: list[str]) -> str:
    candidates = (
        request.path_params.get("workspace"),
        request.query_params.get("workspace"),
        request.cookies.get(_WORKSPACE),
    )
    return next((name for name in candidates if name in names), names[0] if names else "default")


def check_origin(request: Request) -> None:
    """Refuse what a page of another site sends in a visitor's name.

    Raises:
        AccessError: If one did.
    """
    # The cookie is not sent with what other sites ask for (SameSite=Strict); this holds for browsers without that too.
    origin = request.headers.get("origin")
    if request.method != "GET" and origin and urlsplit(origin).netloc != request.headers.get("host"):
        raise AccessError(f"This was sent by a page of {origin}, not by the console. Nothing was done.")


def plain_page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page in the language of `request`; no sign-in is needed."""
    spoken = language(request)
    say = i18n.speaker(spoken)
    address = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
    around: dict[str, Any] = {"root": ROOT, "static": f"{ROOT}/static", "home": f"{ROOT}/", "actor": None, "place": ""}
    around |= {
        "language": spoken,
        "languages": i18n.LANGUAGES,
        "say": say,
        "badge": formatting.badge(say),
        "needs": formatting.needs(say),
        "event_kind": formatting.event_kind(say),
        "reason_text": formatting.reason_text(spoken),
        "here": address,
    }
    return HTMLResponse(_pages.get_template(template).render(around | values), status)

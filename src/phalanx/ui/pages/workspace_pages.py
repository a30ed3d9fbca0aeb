"""`datasets`, `codes`, `secrets`, `members`, `tokens`: pages to look at and change what a workspace has."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form
from fastapi.responses import RedirectResponse, Response

from phalanx.errors import PhalanxError, SpecError
from phalanx.jobs.api.error_handlers import status_of
from phalanx.jobs.models import MemberRole
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.file import validate
from phalanx.ui.pages.job_list import CurrentSession
from phalanx.ui.session import ROOT, ConsoleSession

routes = APIRouter(include_in_schema=False)

Text = Annotated[str, Form()]

_DAY_S = 86_400.0
LIFETIMES = {"7": 7 * _DAY_S, "30": 30 * _DAY_S, "90": 90 * _DAY_S, "0": None}
"""Seconds that a new token can be made for, by the days that the form offers; 0: until it is removed."""


def _back(workspace: str, page: str) -> Response:
    return RedirectResponse(f"{ROOT}/w/{workspace}/{page}", 303)


# -- datasets and code ---------------------------------------------------------------------------------------------


@routes.get("/w/{workspace}/datasets")
def datasets(session: CurrentSession, workspace: str) -> Response:
    """Show the datasets of a workspace."""
    return _datasets(session, workspace)


def _datasets(session: ConsoleSession, workspace: str, problem: str = "", status: int = 200) -> Response:
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
    return session.page(
        "configs.html", status, place="datasets", configs=configs, command=command, problem=problem,
        placeholder="s3://bucket/folder",
    )  # fmt: skip


@routes.post("/w/{workspace}/datasets")
def put_dataset(session: CurrentSession, workspace: str, name: Text, where: Text) -> Response:
    """Add a dataset, or replace the one of that name; its kind follows from its address."""
    try:
        session.jobs.put_dataset(workspace, validate(Dataset, {"name": name.strip(), "uri": where.strip()}))
    except SpecError as error:
        return _datasets(session, workspace, str(error), status_of(error))
    return _back(workspace, "datasets")


@routes.post("/w/{workspace}/datasets/{name}/remove")
def remove_dataset(session: CurrentSession, workspace: str, name: str) -> Response:
    """Remove a dataset; its data stays where it is."""
    session.jobs.remove_dataset(workspace, name)
    return _back(workspace, "datasets")


@routes.get("/w/{workspace}/codes")
def codes(session: CurrentSession, workspace: str) -> Response:
    """Show the code sources of a workspace."""
    return _codes(session, workspace)


def _codes(session: ConsoleSession, workspace: str, problem: str = "", status: int = 200) -> Response:
    session.check_workspace(workspace)
    configs = [
        {
            "name": config.name,
            "kind": "git" if config.config.get("git") else "path",
            "where": " @ ".join(
                filter(None, (config.config.get("git") or config.config.get("path"), config.config.get("ref")))
            ),
            "created": config.created,
        }
        for config in session.jobs.codes(workspace)
    ]
    command = f"phalanx code add NAME git+https://HOST/REPOSITORY.git@main --workspace {workspace}"
    return session.page(
        "configs.html", status, place="codes", configs=configs, command=command, problem=problem,
        placeholder="git+https://host/repository.git@main",
    )  # fmt: skip


@routes.post("/w/{workspace}/codes")
def put_code(session: CurrentSession, workspace: str, name: Text, where: Text) -> Response:
    """Add a code source, or replace the one of that name."""
    try:
        session.jobs.put_code(workspace, name.strip(), validate(Code, where.strip()))
    except SpecError as error:
        return _codes(session, workspace, str(error), status_of(error))
    return _back(workspace, "codes")


@routes.post("/w/{workspace}/codes/{name}/remove")
def remove_code(session: CurrentSession, workspace: str, name: str) -> Response:
    """Remove a code source."""
    session.jobs.remove_code(workspace, name)
    return _back(workspace, "codes")


# -- secrets -------------------------------------------------------------------------------------------------------


@routes.get("/w/{workspace}/secrets")
def secrets(session: CurrentSession, workspace: str) -> Response:
    """Show the names of the secrets of a workspace; no page has their values."""
    return _secrets(session, workspace)


def _secrets(session: ConsoleSession, workspace: str, problem: str = "", status: int = 200) -> Response:
    session.check_workspace(workspace)
    values: dict[str, Any] = {"secrets": session.jobs.secrets(workspace), "problem": problem}
    return session.page("secrets.html", status, place="secrets", **values)


@routes.post("/w/{workspace}/secrets")
def put_secret(session: CurrentSession, workspace: str, name: Text, value: Text) -> Response:
    """Store a secret, or another value of one."""
    try:
        session.jobs.put_secret(workspace, name.strip(), value)
    except SpecError as error:
        return _secrets(session, workspace, str(error), status_of(error))
    return _back(workspace, "secrets")


@routes.post("/w/{workspace}/secrets/{name}/remove")
def remove_secret(session: CurrentSession, workspace: str, name: str) -> Response:
    """Remove a secret; running jobs keep the value that they were started with."""
    session.jobs.remove_secret(workspace, name)
    return _back(workspace, "secrets")


# -- members -------------------------------------------------------------------------------------------------------


@routes.get("/w/{workspace}/members")
def members(session: CurrentSession, workspace: str) -> Response:
    """Show who is a member of a workspace, and as what."""
    session.check_workspace(workspace)
    space = next(space for space in session.jobs.workspaces() if space.name == workspace)
    is_admin = session.roles[workspace] is MemberRole.ADMIN
    return session.page(
        "members.html",
        place="members",
        members=sorted(space.members.items()),
        is_admin=is_admin,
        roles=list(MemberRole),
    )


@routes.post("/w/{workspace}/members")
def put_member(session: CurrentSession, workspace: str, name: Text, role: Annotated[MemberRole, Form()]) -> Response:
    """Add a member, or change the role of one."""
    session.jobs.put_member(workspace, name.strip(), role)
    return _back(workspace, "members")


@routes.post("/w/{workspace}/members/remove")
def remove_member(session: CurrentSession, workspace: str, name: Text) -> Response:
    """Remove a member."""
    session.jobs.remove_member(workspace, name)
    return _back(workspace, "members")


@routes.post("/workspaces")
def add_workspace(session: CurrentSession, name: Text) -> Response:
    """Make a workspace; the owner of the store alone may."""
    return _back(session.jobs.add_workspace(name.strip()).name, "")


# -- tokens --------------------------------------------------------------------------------------------------------


@routes.get("/tokens")
def tokens(session: CurrentSession) -> Response:
    """Show the visitor's tokens; all of them for the owner of the store."""
    return _tokens(session)


def _tokens(session: ConsoleSession, problem: str = "", new_text: str = "", status: int = 200) -> Response:
    values: dict[str, Any] = {"tokens": session.jobs.tokens(), "problem": problem, "new_text": new_text}
    response = session.page("tokens.html", status, place="tokens", lifetimes=list(LIFETIMES), **values)
    response.headers["Cache-Control"] = "no-store"  # the text of a new token is on this page once
    return response


@routes.post("/tokens")
def add_token(session: CurrentSession, name: Text, days: Text = "30", owner: Text = "") -> Response:
    """Make a token and show its text, this one time."""
    try:
        new = session.jobs.add_token(
            name.strip(), owner=owner.strip() or None, lasts_s=LIFETIMES.get(days, 30 * _DAY_S)
        )
    except PhalanxError as error:
        return _tokens(session, str(error), status=status_of(error))
    return _tokens(session, new_text=new.text)


@routes.post("/tokens/remove")
def remove_token(session: CurrentSession, owner: Text, name: Text) -> Response:
    """Revoke a token."""
    session.jobs.remove_token(name, owner=owner)
    return RedirectResponse(f"{ROOT}/tokens", 303)

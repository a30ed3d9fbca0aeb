"""Workspaces, members and tokens over HTTP."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.models import Actor, MemberRole, Workspace
from phalanx.jobs.protocol import NewToken, Token

routes = APIRouter(responses=RESPONSES, tags=["people"])


class Membership(BaseModel):
    """The role of a member."""

    model_config = ConfigDict(extra="forbid")

    role: MemberRole


class TokenAsked(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100)
    owner: str | None = Field(default=None, min_length=1, max_length=100)
    lasts_s: float | None = Field(default=None, gt=0, le=3.2e9)


@routes.get("/whoami")
def whoami(caller: Caller) -> Actor:
    """Return who calls."""
    return caller.whoami()


@routes.get("/workspaces")
def workspaces(caller: Caller) -> list[Workspace]:
    """Return the workspaces the caller is in."""
    return caller.workspaces()


@routes.put("/workspaces/{workspace}")
def add_workspace(caller: Caller, workspace: str) -> Workspace:
    """Make a workspace."""
    return caller.add_workspace(workspace)


@routes.delete("/workspaces/{workspace}", status_code=204)
def remove_workspace(caller: Caller, workspace: str) -> None:
    """Remove a workspace with everything in it."""
    caller.remove_workspace(workspace)


@routes.put("/workspaces/{workspace}/members/{name}", status_code=204)
def put_member(caller: Caller, workspace: str, name: str, body: Membership) -> None:
    """Make someone a member, or give a member another role."""
    caller.put_member(workspace, name, body.role)


@routes.delete("/workspaces/{workspace}/members/{name}", status_code=204)
def remove_member(caller: Caller, workspace: str, name: str) -> None:
    """End a membership."""
    caller.remove_member(workspace, name)


@routes.get("/tokens")
def tokens(caller: Caller) -> list[Token]:
    """Return the caller's tokens, without their text."""
    return caller.tokens()


@routes.post("/tokens", status_code=201)
def add_token(caller: Caller, body: TokenAsked) -> NewToken:
    """Make a token; its text is shown this once."""
    return caller.add_token(body.name, owner=body.owner, lasts_s=body.lasts_s)


@routes.delete("/tokens/{name}", status_code=204)
def remove_token(caller: Caller, name: str, owner: str | None = None) -> None:
    """End a token."""
    caller.remove_token(name, owner=owner)

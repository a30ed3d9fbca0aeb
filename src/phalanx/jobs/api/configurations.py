"""Codes, datasets and secrets of a workspace over HTTP; trees of code that a client sends."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.models import NamedConfig
from phalanx.jobs.protocol import SecretName
from phalanx.jobs.spec import Code, Dataset

routes = APIRouter(responses=RESPONSES, prefix="/workspaces/{workspace}", tags=["configurations"])

_TREE_LIMIT = 256 << 20
"""Most bytes of an archive of code."""


class SecretValue(BaseModel):
    """The value of a secret; it is never given back."""

    model_config = ConfigDict(extra="forbid")

    value: str = Field(min_length=1, max_length=65536)


class Tree(BaseModel):
    """A tree of code that was sent; `code.digest` of a spec names it."""

    digest: str


@routes.get("/codes")
def codes(caller: Caller, workspace: str) -> list[NamedConfig]:
    """Return the code configurations of a workspace."""
    return caller.codes(workspace)


@routes.put("/codes/{name}")
def put_code(caller: Caller, workspace: str, name: str, code: Code) -> NamedConfig:
    """Keep where code comes from under a name."""
    return caller.put_code(workspace, name, code)


@routes.delete("/codes/{name}", status_code=204)
def remove_code(caller: Caller, workspace: str, name: str) -> None:
    """Remove a code configuration."""
    caller.remove_code(workspace, name)


@routes.get("/datasets")
def datasets(caller: Caller, workspace: str) -> list[NamedConfig]:
    """Return the dataset configurations of a workspace."""
    return caller.datasets(workspace)


@routes.put("/datasets")
def put_dataset(caller: Caller, workspace: str, dataset: Dataset) -> NamedConfig:
    """Keep where a dataset lies under its name."""
    return caller.put_dataset(workspace, dataset)


@routes.delete("/datasets/{name}", status_code=204)
def remove_dataset(caller: Caller, workspace: str, name: str) -> None:
    """Remove a dataset configuration."""
    caller.remove_dataset(workspace, name)


@routes.get("/secrets")
def secrets(caller: Caller, workspace: str) -> list[SecretName]:
    """Return the names of the secrets of a workspace."""
    return caller.secrets(workspace)


@routes.put("/secrets/{name}")
def put_secret(
    caller: Caller, workspace: str, name: Annotated[str, InPath(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], body: SecretValue
) -> SecretName:
    """Keep a value under a name."""
    return caller.put_secret(workspace, name, body.value)


@routes.delete("/secrets/{name}", status_code=204)
def remove_secret(caller: Caller, workspace: str, name: str) -> None:
    """Remove a secret."""
    caller.remove_secret(workspace, name)


@routes.post(
    "/trees",
    status_code=201,
    openapi_extra={
        "requestBody": {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def put_tree(request: Request, caller: Caller, workspace: str) -> Tree:
    """Keep a tree of code: the body is a tar.gz archive of regular files, at most 256 MiB."""
    with tempfile.TemporaryDirectory(prefix="phalanx-tree-") as folder:
        archive = Path(folder) / "tree.tar.gz"
        with archive.open("wb") as file:
            async for piece in request.stream():
                file.write(piece)
                if file.tell() > _TREE_LIMIT:
                    raise HTTPException(413, f"The archive has more than {_TREE_LIMIT} bytes. Leave out data.")
        return Tree(digest=await run_in_threadpool(caller.put_tree, workspace, archive))

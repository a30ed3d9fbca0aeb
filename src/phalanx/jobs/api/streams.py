"""`stream_log`: streaming endpoints: follow a log (server-sent events), upload a code tree."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.attempt.logs import LogPart
from phalanx.jobs.protocol import AttemptNumber, Jobs

routes = APIRouter(responses=RESPONSES)

_POLL_S = 0.5
LOG_START = 1 << 18
"""Bytes of a log's end that a stream begins with."""

_TREE_LIMIT = 256 << 20
"""Most bytes of an archive of code."""


class Tree(BaseModel):
    """A tree of code that was sent; `code.digest` of a spec names it."""

    digest: str


@routes.get(
    "/jobs/{job}/logs/{rank}/stream", response_class=StreamingResponse, operation_id="stream_log", tags=["jobs"]
)
async def stream(
    request: Request, caller: Caller, job: str, rank: str, attempt: Annotated[AttemptNumber, Query()] = None
) -> StreamingResponse:
    """Send one log as server-sent events while it is written: pieces of text as JSON strings, then the event `end`."""
    first = await run_in_threadpool(caller.log, job, rank=rank, attempt=attempt, offset=-LOG_START)
    return stream_log(request, caller, job, rank, attempt, first)


def stream_log(
    request: Request, caller: Jobs, job: str, rank: str, attempt: int | None, first: LogPart
) -> StreamingResponse:
    """Return a log from `first` on as server-sent events."""
    return StreamingResponse(_events(request, caller, job, rank, attempt, first), media_type="text/event-stream")


async def _events(
    request: Request, caller: Jobs, job: str, rank: str, attempt: int | None, part: LogPart
) -> AsyncIterator[str]:
    # One piece at a time: a reader that is slower than the log holds back the reading of the file, and no memory.
    while not await request.is_disconnected():
        if part.text:
            yield f"data: {json.dumps(part.text)}\n\n"
        elif part.ended:
            yield "event: end\ndata: \n\n"
            return
        else:
            yield ": still here\n\n"
            await asyncio.sleep(_POLL_S)
        part = await run_in_threadpool(caller.log, job, rank=rank, attempt=attempt, offset=part.next)


@routes.post(
    "/workspaces/{workspace}/trees",
    status_code=201,
    operation_id="put_tree",
    tags=["configurations"],
    openapi_extra={
        "requestBody": {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def put_tree(request: Request, caller: Caller, workspace: str) -> Tree:
    """Store a tree of code: the body is a tar.gz archive of regular files, at most 256 MiB."""
    with tempfile.TemporaryDirectory(prefix="phalanx-tree-") as folder:
        archive = Path(folder) / "tree.tar.gz"
        with archive.open("wb") as file:
            async for piece in request.stream():
                file.write(piece)
                if file.tell() > _TREE_LIMIT:
                    raise HTTPException(413, f"The archive has more than {_TREE_LIMIT} bytes. Leave out data.")
        return Tree(digest=await run_in_threadpool(caller.put_tree, workspace, archive))

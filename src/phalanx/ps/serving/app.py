"""`make_table_app`: the HTTP interface to read tables, under /v1."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from phalanx.errors import ConfigError, NotFoundError
from phalanx.ps.serving.row_request import BINARY, read_ids
from phalanx.ps.serving.view import TableView

MOST_BODY_BYTES = 4 << 20
"""Of one request: 524,288 ids as bytes."""

MOST_ANSWER_BYTES = 64 << 20
"""Of the rows of one answer, as float32."""


def make_table_app(view: Callable[[], TableView], token: str | None = None) -> Starlette:
    """Return the application that answers what tables there are, and their rows.

    Args:
        view: Returns the tables of this moment; every answer is of one view.
        token: What requests have to bring as `Authorization: Bearer TOKEN`; nothing if None.
    """
    api = _TableApi(view, token)
    return Starlette(
        routes=[
            Route("/healthz", _healthy),
            Route("/v1/tables", api.tables),
            Route("/v1/tables/{name:path}/rows", api.rows, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _refuse,
            ConfigError: _answer_error(400),
            NotFoundError: _answer_error(404),
        },
    )


class _TableApi:
    def __init__(self, view: Callable[[], TableView], token: str | None) -> None:
        self._view, self._token = view, None if token is None else token.encode()

    async def tables(self, request: Request) -> Response:
        """Answer what tables there are."""
        self._authenticate(request)
        view = self._view()
        about = {"version": view.version, "age_s": view.age_s, "steps": list(view.steps)}
        return _json({**about, "tables": view.describe()})

    async def rows(self, request: Request) -> Response:
        """Answer rows of a table."""
        self._authenticate(request)
        body, view = await _read_body(request), self._view()
        headers = request.headers
        is_binary = BINARY in headers.get("accept", "")
        return await run_in_threadpool(
            _answer_rows, view, request.path_params["name"], body, headers.get("content-type", ""), is_binary
        )

    def _authenticate(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise HTTPException(
                401,
                "This needs the server's token, which did not come: send the header `Authorization: Bearer TOKEN`.",
                {"WWW-Authenticate": "Bearer"},
            )


def _answer_rows(view: TableView, name: str, body: bytes, content_type: str, is_binary: bool) -> Response:
    dim = view.spec(name).dim
    ids = read_ids(body, content_type)
    if len(ids) * dim * 4 > MOST_ANSWER_BYTES:
        most = MOST_ANSWER_BYTES // (dim * 4)
        raise HTTPException(413, f"Asked for {len(ids)} rows of {dim} values; at most {most} are sent. Ask in parts.")
    rows = view.rows(name, ids)
    if not is_binary:
        # JSON has no NaN and no infinity.
        value = {"version": view.version, "age_s": view.age_s, "rows": rows.tolist()}
        return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
    about = {"Phalanx-Version": view.version, "Phalanx-Age": f"{view.age_s:.6f}", "Phalanx-Dim": str(dim)}
    return Response(rows.astype("<f4", copy=False).tobytes(), headers=about, media_type=BINARY)


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(
                413, f"The body is larger than {MOST_BODY_BYTES} bytes, the most that is read. Ask in parts."
            )
    return bytes(body)


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok\n")


def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": "HTTPError", "message": error.detail}, error.status_code, error.headers)


def _answer_error(status: int) -> Callable[[Request, Exception], Response]:
    def answer(_: Request, error: Exception) -> Response:
        return _json({"error": type(error).__name__, "message": str(error)}, status)

    return answer


def _json(value: object, status: int = 200, headers: object = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")  # type: ignore[arg-type]

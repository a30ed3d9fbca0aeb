"""`add_middleware`: rate limits, request size limits, security headers and HEAD requests of the jobs API."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODY_LIMIT = 1 << 20
"""Most bytes of a request's body; trees of code have a limit of their own."""

_TREES = re.compile(r"/api/v1/workspaces/[^/]+/trees")

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

MAX_CALLERS = 10_000
"""Callers that are counted at a time."""


def add_middleware(app: FastAPI, rates: RateLimiter) -> None:
    """Let `app` refuse requests that are too many or too large, add security headers and answer HEAD."""

    @app.middleware("http")
    async def limit(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, rates) or await call(request)
        app.state.requests.add(request.method, response.status_code)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    app.add_middleware(HeadRequests)


def _refusal(request: Request, rates: RateLimiter) -> Response | None:
    # By address, before anything is looked up: guesses at tokens are counted too.
    wait = rates.take(request.client.host if request.client else "")
    if wait:
        message = f"Too many requests from this address; ask again in {wait:.2f} s."
        return JSONResponse({"error": "RateError", "message": message}, 429, {"Retry-After": str(int(wait) + 1)})
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or ("transfer-encoding" in request.headers):
        message = "Say how long the body is: send Content-Length, no Transfer-Encoding."
        return JSONResponse({"error": "HTTPError", "message": message}, 400)
    is_tree = request.method == "POST" and _TREES.fullmatch(request.url.path)
    if int(length) > _BODY_LIMIT and not is_tree:
        message = f"The body has {length} bytes; at most {_BODY_LIMIT} are read."
        return JSONResponse({"error": "HTTPError", "message": message}, 413)
    return None


class RateLimiter:
    """Counts requests by caller.

    Args:
        per_second: Requests a caller may make for ever.
        burst: Requests it may make at once after a pause.
        clock: Seconds that only grow.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> float:
        """Count one request of `caller`; return 0, or the seconds until it may ask again."""
        with self._lock:
            now = self._clock()
            tokens, filled_at = self._tokens.pop(caller, (float(self._burst), now))
            tokens = min(self._burst, tokens + (now - filled_at) * self._per_second)
            wait = 0.0 if tokens >= 1 else (1 - tokens) / self._per_second
            self._tokens[caller] = (tokens if wait else tokens - 1, now)
            # Those who have not asked for longest have a full bucket again, or will soon.
            while len(self._tokens) > MAX_CALLERS:
                self._tokens.popitem(last=False)
            return wait


class HeadRequests:
    """Answers HEAD as GET without the body; a log stream, which does not end, is left out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"].endswith("stream"):
            await self._app(scope, receive, send)
            return

        async def bodiless(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, bodiless)

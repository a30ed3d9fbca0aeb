"""The application: routes, errors, limits and headers put together."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from phalanx.jobs.api import health, streams, verbs
from phalanx.jobs.api.auth import Authenticate
from phalanx.jobs.api.error_handlers import add_errors
from phalanx.jobs.api.heads import HeadRequests
from phalanx.jobs.api.rate_limit import RateLimiter

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


def make_app(authenticate: Authenticate, *, per_second: float = 50, burst: int = 200) -> FastAPI:
    """Return the application that serves the verbs of `Jobs` under /api/v1.

    Args:
        authenticate: From a token to what its holder may ask.
        per_second: Requests each caller may make for ever.
        burst: Requests each caller may make at once.
    """
    app = FastAPI(
        title="Phalanx jobs",
        version=importlib.metadata.version("phalanx"),
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # FastAPI's page of documentation fetches scripts from elsewhere
        redoc_url=None,
    )
    app.state.authenticate = authenticate
    app.state.requests = health.Requests()
    rates = RateLimiter(per_second, burst)

    @app.middleware("http")
    async def limit(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse requests that are too many or too large, and add security headers."""
        answer = _refusal(request, rates) or await call(request)
        app.state.requests.add(request.method, answer.status_code)
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    app.add_middleware(HeadRequests)
    for router in (verbs.build_router(), streams.routes):
        app.include_router(router, prefix="/api/v1")
    app.include_router(health.routes)
    app.add_api_route("/api/v1", _about, tags=["health"])
    add_errors(app)
    return app


def _about() -> dict[str, str]:
    """Say where the description of this interface is, and how to be let in."""
    return {"openapi": "/api/v1/openapi.json", "authorization": "Bearer TOKEN, of `phalanx token add NAME`"}


def _refusal(request: Request, rates: RateLimiter) -> Response | None:
    # By address, before anything is looked up: guesses at tokens are counted too.
    wait = rates.take(request.client.host if request.client else "")
    if wait:
        message = f"Too many requests from this address; ask again in {wait:.2f} s."
        return JSONResponse({"error": "RateError", "message": message}, 429, {"Retry-After": str(int(wait) + 1)})
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or ("transfer-encoding" in request.headers):
        message = "Say how long the body is: send Content-Length, no Transfer-Encoding."
        return JSONResponse({"error": "HTTPError", "message": message}, 400)
    is_tree = request.method == "POST" and _TREES.fullmatch(request.url.path)
    if int(length) > _BODY_LIMIT and not is_tree:
        message = f"The body has {length} bytes; at most {_BODY_LIMIT} are read."
        return JSONResponse({"error": "HTTPError", "message": message}, 413)
    return None

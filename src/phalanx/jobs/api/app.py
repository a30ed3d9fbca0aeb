"""`make_app`: the FastAPI application of the jobs API, under /api/v1."""

from __future__ import annotations

import importlib.metadata

from fastapi import FastAPI

from phalanx.jobs.api import health, streams, verbs
from phalanx.jobs.api.auth import Authenticate
from phalanx.jobs.api.error_handlers import add_errors
from phalanx.jobs.api.middleware import RateLimiter, add_middleware


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
    add_middleware(app, RateLimiter(per_second, burst))
    for router in (verbs.build_router(), streams.routes):
        app.include_router(router, prefix="/api/v1")
    app.include_router(health.routes)
    app.add_api_route("/api/v1", _about, tags=["health"])
    add_errors(app)
    return app


def _about() -> dict[str, str]:
    """Say where the description of this interface is, and how to be let in."""
    return {"openapi": "/api/v1/openapi.json", "authorization": "Bearer TOKEN, of `phalanx token add NAME`"}

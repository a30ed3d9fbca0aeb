"""`authenticate`: authenticate API requests by bearer token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from phalanx.errors import AccessError
from phalanx.jobs.protocol import Jobs

Authenticate = Callable[[str], Jobs]
"""From a token to what its holder may ask; AccessError for one that is not known or has expired."""

_bearer = HTTPBearer(auto_error=False, description="A token made by `phalanx token add`.")


class TokenError(AccessError):
    """No token came with a request, or one that is not valid: the caller must sign in."""


def authenticate(request: Request, token: str) -> Jobs:
    """Return the jobs that the holder of `token` may ask for.

    Raises:
        TokenError: If the token is not valid.
    """
    opened: Authenticate = request.app.state.authenticate
    try:
        return opened(token)
    except AccessError as error:
        raise TokenError(str(error)) from None


def _caller(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Jobs:
    if credentials is None:
        raise TokenError("This needs a token: send the header `Authorization: Bearer TOKEN`.")
    return authenticate(request, credentials.credentials)


Caller = Annotated[Jobs, Depends(_caller)]
"""Of a route: the jobs of the one who calls it."""

"""Generate the HTTP endpoints of `protocol.Jobs` from its routes and signatures.

Every endpoint asks for a token; what its holder may do, the verb itself checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, create_model

from phalanx.jobs.api.auth import Caller
from phalanx.jobs.api.error_handlers import RESPONSES
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.routes import VerbRoute, routes_of


def build_router() -> APIRouter:
    """Return the routes of every verb."""
    router = APIRouter(responses=RESPONSES)
    for route in routes_of(Jobs):
        router.add_api_route(
            route.path,
            _endpoint(route),
            methods=[route.method],
            status_code=route.status,
            response_model=_result_model(route),
            response_class=PlainTextResponse if route.is_text else JSONResponse,
            name=route.operation,
            operation_id=route.operation,
            tags=[route.tag],
            description=(inspect.getdoc(route.verb) or "").split("\n\n")[0],
        )
    return router


def _endpoint(route: VerbRoute) -> Callable[..., Any]:
    """Return the function that calls a verb with what came in a request, with a signature that FastAPI reads."""
    parameters = {name: p for name, p in route.signature.parameters.items() if name != route.body}
    in_body = [] if route.has_query or route.body else [name for name in parameters if not route.in_path(name)]

    def endpoint(caller: Jobs, body: Any = None, **values: Any) -> Any:
        if route.body is not None:
            values[route.body] = body
        values |= {name: getattr(body, name) for name in in_body}
        result = getattr(caller, route.verb.__name__)(**values)
        return result if route.result_key is None else {route.result_key: result}

    signature = [_parameter("caller", Caller)]
    if route.body is not None:
        signature.append(_parameter("body", route.signature.parameters[route.body].annotation))
    elif in_body:
        signature.append(_parameter("body", _body_model(route, in_body)))
    for name, parameter in parameters.items():
        if route.in_path(name):
            signature.append(_parameter(name, Annotated[parameter.annotation, InPath()]))
        elif name not in in_body:
            where = Query(alias=route.names.get(name))
            default = route.defaults.get(name, parameter.default)
            signature.append(_parameter(name, Annotated[parameter.annotation, where], default))
    endpoint.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return endpoint


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _body_model(route: VerbRoute, names: list[str]) -> type[BaseModel]:
    """Return the model of a JSON object of some parameters; other fields are refused."""
    parameters = route.signature.parameters
    fields: dict[str, Any] = {
        name: (
            parameters[name].annotation,
            ... if parameters[name].default is inspect.Parameter.empty else parameters[name].default,
        )
        for name in names
    }
    fields |= {name: (str | None, None) for name in route.unused}
    return create_model(_model_name(route, "Request"), __config__=ConfigDict(extra="forbid"), **fields)


def _result_model(route: VerbRoute) -> Any:
    if route.result_key is None:
        return route.result_type
    fields: dict[str, Any] = {route.result_key: (route.result_type, ...)}
    return create_model(_model_name(route, "Answer"), **fields)


def _model_name(route: VerbRoute, kind: str) -> str:
    return "".join(word.title() for word in route.operation.split("_")) + kind

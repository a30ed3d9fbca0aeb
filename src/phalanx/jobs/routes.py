"""`route`: HTTP method and path of each verb of `protocol.Jobs`, for server and client.

`@route` gives a verb its method and path; parameters and result follow from its signature. Names in braces are parts of
the path; other parameters are the query of GET and DELETE, and fields of a JSON object of POST and PUT. Pure.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class VerbRoute:
    """How a verb travels over HTTP."""

    verb: Callable[..., Any]
    method: str
    path: str
    operation: str
    """Id of the operation in OpenAPI."""

    tag: str = "jobs"
    """Group of the operation in OpenAPI."""

    status: int = 200
    body: str | None = None
    """Parameter that is the body itself; None where the body is an object of parameters."""

    caller_only: tuple[str, ...] = ()
    """Parameters that mean something to the caller's machine alone, and are not sent."""

    unused: tuple[str, ...] = ()
    """Fields of the body that are accepted and do nothing."""

    names: Mapping[str, str] = field(default_factory=dict)
    """What parameters are called in the query, where not as in the verb."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults over HTTP, where not as in the verb."""

    result_key: str | None = None
    """Key of the object in which the result is sent; None where it is sent as it is."""

    is_text: bool = False
    """Whether the result is sent as plain text, not as JSON."""

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The verb's signature with types, without `self` and what is not sent."""
        signature = inspect.signature(self.verb, eval_str=True)
        sent = [p for name, p in signature.parameters.items() if name not in ("self", *self.caller_only)]
        return signature.replace(parameters=sent)

    @property
    def result_type(self) -> Any:
        """Type of the result; None for none."""
        return self.signature.return_annotation

    def in_path(self, name: str) -> bool:
        """Return whether a parameter is a part of the path."""
        return f"{{{name}}}" in self.path

    @property
    def has_query(self) -> bool:
        """Whether parameters that are no part of the path are the query, not the body."""
        return self.method in ("GET", "DELETE")


def route(method: str, path: str, operation: str, **options: Any) -> Callable[[F], F]:
    """Mark a verb with its route; options as the fields of `VerbRoute`. A verb that no subclass overrides is sent."""

    def mark(verb: F) -> F:
        entry = VerbRoute(verb, method, path, operation, **options)

        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def send(self: Any, *arguments: Any, **named: Any) -> Any:
            values = signature.bind(self, *arguments, **named)
            values.apply_defaults()
            return self._send(entry, {name: values.arguments[name] for name in entry.signature.parameters})

        send.route = entry  # type: ignore[attr-defined]
        return cast(F, send)

    return mark


def routes_of(verbs: type) -> list[VerbRoute]:
    """Return the routes of the verbs of a class, in its order."""
    return [verb.route for verb in vars(verbs).values() if hasattr(verb, "route")]

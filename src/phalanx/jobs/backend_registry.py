"""`Backends`: the registry of job backends by name.

A new backend is a class that satisfies `backend.Backend`, a row here, and a section of `spec.TrainingJob` if it has
options of its own. Pure: a backend is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

if TYPE_CHECKING:
    from phalanx.jobs.backend import Backend


@dataclass(frozen=True)
class BackendEntry:
    """A backend of the registry."""

    implementation: str
    """`module:Class`, imported when the backend is first used: what it needs may be missing here."""

    uses_this_machine: bool = False
    """Whether jobs run on this machine, so that the job controller decides when each starts; else the engine does."""

    sees_local_paths: bool = True
    """Whether nodes see the files of this machine, so that paths in a job are checked here."""

    poll_s: float = 5.0
    """Seconds between two looks at an attempt."""

    member_check: str | None = None
    """`module:function` that yields what members of a server may not ask of it, from a job and the server's `Limits`.
    None where they may ask for everything but paths, which `limits` itself checks."""


BACKENDS = {
    # A few system calls a look; elsewhere it is a request to an engine.
    "local": BackendEntry("phalanx.jobs.backends.local:Local", uses_this_machine=True, poll_s=0.5),
    "slurm": BackendEntry("phalanx.jobs.backends.slurm.backend:Slurm"),
    "kubernetes": BackendEntry(
        "phalanx.jobs.backends.kubernetes.backend:Kubernetes",
        sees_local_paths=False,
        member_check="phalanx.jobs.backends.kubernetes.options:check_member",
    ),
}


class Backends(Mapping[str, "Backend"]):
    """Backends by name, each made when it is first used. What one needs may be missing where it is not used."""

    def __init__(self) -> None:
        """Make the mapping; no backend is made yet."""
        self._backends: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        """Return a backend, made at the first call."""
        if name not in self._backends:
            self._backends[name] = load(BACKENDS[name].implementation)()
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(BACKENDS)

    def __len__(self) -> int:
        """Return how many backends there are."""
        return len(BACKENDS)


def load(reference: str) -> Any:
    """Import what `module:name` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_name(name: str) -> str:
    if name not in BACKENDS:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, BACKENDS))})
    return name


BackendName = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "enum": list(BACKENDS)})]

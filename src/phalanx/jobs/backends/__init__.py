"""The engines that run attempts, by the name a spec calls them; each is made when it is first used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.jobs.backend import Backend
from phalanx.jobs.backend_registry import BACKENDS, load


class Backends(Mapping[str, Backend]):
    """Backends by name. One that is never used is not imported, so what it needs may be missing."""

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

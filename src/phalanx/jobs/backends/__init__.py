"""The engines that run attempts, by the name a spec calls them; each is made when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from phalanx.jobs.backend import Backend

_CLASSES = {
    "local": ("local", "Local"),
    "slurm": ("slurm.backend", "Slurm"),
    "kubernetes": ("kubernetes.backend", "Kubernetes"),
}


class Backends(Mapping[str, Backend]):
    """Backends by name. One that is never asked for is not imported, so what it needs may be missing."""

    def __init__(self) -> None:
        """Make the mapping; no backend is made yet."""
        self._made: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        """Return a backend, made at the first call."""
        if name not in self._made:
            module, kind = _CLASSES[name]
            self._made[name] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(_CLASSES)

    def __len__(self) -> int:
        """Return how many backends there are."""
        return len(_CLASSES)

"""`SnapshotTableCheck`: warn about tables that only workers or only the loaded snapshot have, as renamed ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from phalanx.errors import did_you_mean
from phalanx.ps.table.rules import TableSpec

logger = logging.getLogger("phalanx.ps")

WARMUP_STEPS = 10
"""Steps of every worker after which a table that nobody declared counts as not used."""


class SnapshotTableCheck:
    """Compares the tables of a folder with those that workers declare. One thread.

    Args:
        directory: The folder.
        saved: Its tables.
        names: Those that servers were to take from it; all when None.
    """

    def __init__(self, directory: Path, saved: Mapping[str, TableSpec], names: Iterable[str] | None = None) -> None:
        self._directory, self._takes_all = directory, names is None
        self._saved = {name: saved[name] for name in (saved if names is None else names)}
        self._declared: dict[str, TableSpec] = {}
        self._has_ended = False

    def compare(self, declared: Iterable[TableSpec], steps: int) -> None:
        """Warn of new tables that the folder lacks, and after some `steps` of those of it that nobody declared."""
        new = {spec.name: spec for spec in declared if spec.name not in self._declared}
        self._declared |= new
        for name, spec in new.items():
            if self._takes_all and name not in self._saved:
                self._warn(spec, f"starts fresh: {self._directory} has no table of this name", self._saved)
        if steps >= WARMUP_STEPS:
            self.end()

    def end(self) -> None:
        """Warn once of the folder's tables that nobody declared, if workers came."""
        if self._has_ended or not self._declared:
            return
        self._has_ended = True
        for name, spec in self._saved.items():
            if name not in self._declared:
                self._warn(spec, f"of {self._directory} is not used: no worker has one of this name", self._declared)

    def _warn(self, spec: TableSpec, reason: str, others: Mapping[str, TableSpec]) -> None:
        if spec.dense:
            # Numbered by optimizers, so no other name is meant.
            logger.warning(
                "dense table '%s' %s. fleet.load(%r) on the workers loads dense parameters wherever they live.",
                spec.name,
                reason,
                str(self._directory),
            )
            return
        names = sorted(name for name, other in others.items() if not other.dense)
        logger.warning(
            "table '%s' %s, only %s.%s Give tables the names they were saved with.",
            spec.name,
            reason,
            ", ".join(map(repr, names)) or "none",
            did_you_mean(spec.name, names),
        )

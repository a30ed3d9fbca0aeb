"""`TableStore`: protocol of pull and push on tables, local or remote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.arrays import Keys as Keys
from phalanx.ps.table.arrays import Rows as Rows
from phalanx.ps.table.rules import TableSpec

ServerMode = Literal["sync", "async", "bounded"]
"""What a server makes a pull wait for."""


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Rows asked of one table."""

    table: str
    keys: Keys
    """Unique ids, shape (n,); the 64 bits are taken as they are."""


class PendingRows(Protocol):
    """A pull under way."""

    def rows(self) -> list[Rows]:
        """Wait and return one (n, dim) array per `PullSpec`, in its order. The arrays are the caller's."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """A pull that has come."""

    arrays: list[Rows]

    def rows(self) -> list[Rows]:
        """Return the arrays."""
        return self.arrays


@dataclass(frozen=True, slots=True)
class TableReport:
    """Counts of one table, summed over servers since it was made."""

    rows: int
    bytes: int
    pushed: int
    """Rows of accepted pushes."""

    dropped: int
    """Gradients of ids that were not admitted."""

    evicted: int
    pulled: int
    """Ids of pulls since the server started."""

    missed: int
    """Those of them that had no row."""


class TableStore(Protocol):
    """Tables, wherever they are. One thread of one worker uses a store."""

    def declare(self, specs: Sequence[TableSpec]) -> None:
        """Make these tables, or check that they are there with the same specification.

        Raises:
            ConfigError: If a table of this name has another specification; names the field.
        """
        ...

    def pull(self, pull_specs: Sequence[PullSpec], *, step: int = 0) -> PendingRows:
        """Ask for rows. Reading changes nothing: an id without a row reads as what it would start from.

        Args:
            pull_specs: One entry per table.
            step: Pushes this worker has made so far; sync and bounded modes wait by it.
        """
        ...

    def push(
        self, updates: Sequence[TableUpdate], *, step: int = 0, weight: float = 1.0, then: Sequence[PullSpec] = ()
    ) -> PendingRows:
        """Send one step's changes; returns once they are on their way, `flush` waits for the acknowledgement.

        Args:
            updates: Any number of tables, each once; an empty list still ends the step in sync mode.
            step: The number of this push, from 0.
            weight: Rows of the batch the gradients are the mean of; sync mode averages by it.
            then: Rows to read with the answer, as a pull of the next step would find them.

        Returns:
            The rows of `then`.
        """
        ...

    def flush(self) -> None:
        """Wait until every push is acknowledged.

        Raises:
            PhalanxError: If a push was refused; it is not applied, and sent again by the next call that needs it.
        """
        ...

    def leave(self) -> None:
        """Say that this worker pushes no more, so that nobody waits for it."""
        ...

    def report(self) -> dict[str, TableReport]:
        """Return counts by table name."""
        ...

    def shrink(self, table: str) -> int:
        """End a day: decay and drop rows as the specification says. Returns how many rows went."""
        ...

    def lease(self, epoch: int, files: Sequence[str]) -> tuple[str | None, int, int]:
        """Ask for this worker's next file of an epoch; files of a worker that died come to others again.

        Args:
            epoch: Number of the epoch.
            files: All files of the epoch, the same on every worker.

        Returns:
            The file, or None when none is free; the offset to continue from; and how many files are not done.
        """
        ...

    def report_progress(self, epoch: int, file: str, offset: int, *, end: bool = True) -> None:
        """Report how far a leased file was read and trained on; `end` says whether that was all of it."""
        ...

    def save(self, directory: Path, extra: Mapping[str, object], *, mode: str = "full") -> None:
        """Write a snapshot of all tables at one moment; one worker calls it, and the others may continue training.

        Args:
            directory: Folder that this worker and all servers reach.
            extra: What goes with the tables: JSON values and tensors, in dicts, lists and tuples.
            mode: `full`, `delta`, `serving`, `serving_bf16`, `serving_int8` or `text`.
        """
        ...

    def load(self, directory: Path, names: Sequence[str] | None = None) -> dict[str, object]:
        """Replace rows by those of a snapshot, of all tables or of those named; returns `extra` of the save.

        Tables that are declared later get their rows then. Workers meet before and after: it is no step of any mode.
        """
        ...

    def close(self) -> None:
        """Let go of sockets and tables."""
        ...

"""`RowTable`: protocol of an embedding table; `make_table` makes a native or NumPy one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.ps.table.arrays import Columns, Keys, Rows
from phalanx.ps.table.moment import TableMoment
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.row_layout import RowLayout
from phalanx.ps.table.rules import TableSpec
from phalanx.versions import HAS_NATIVE


class RowTable(Protocol):
    """Rows that are made on the first push of an id.

    Keys are int64, shape (n,), unique within one call; all 64 bits count. Arrays are C-contiguous. Who takes arrays
    from elsewhere checks them first, by `check_keys` and `TableUpdate.check`: a table does not. A call that changes the
    table, even by no rows, raises `tick` by one. The native table may be called from any thread.
    """

    spec: TableSpec
    layout: RowLayout

    def pull(self, keys: Keys, out: Rows) -> None:
        """Read rows into `out`, shape (n, dim), and change nothing.

        An id without a row reads as what it would start from, or as zeros where it is not admitted (yet).
        """
        ...

    def push(
        self,
        keys: Keys,
        gradients: Rows,
        lr: float | None = None,
        counts: NDArray[np.uint32] | None = None,
        shows: NDArray[np.float32] | None = None,
        clicks: NDArray[np.float32] | None = None,
    ) -> int:
        """Apply one gradient per id by the table's rule; make rows as the entry policy allows.

        Args:
            keys: Shape (n,).
            gradients: Shape (n, dim).
            lr: Learning rate; the specification's when None.
            counts: How often each id occurred in the batch; once when None. Entry filters count these.
            shows: Added to the rows' show; `counts` when None. Read by the show/click policy alone.
            clicks: Added to the rows' click; 0 when None.

        Returns:
            How many gradients were dropped because their id is not admitted.
        """
        ...

    def add(self, keys: Keys, deltas: Rows) -> None:
        """Add to the values of rows, shape (n, dim). Makes missing rows, whatever the entry policy."""
        ...

    def assign(self, keys: Keys, values: Rows) -> None:
        """Replace the values of rows, shape (n, dim), and keep their state. Makes missing rows."""
        ...

    def require_room(self) -> None:
        """Check that files take the rows for which memory has no room, as every push does first.

        Raises:
            BackendError: If rows take more than `max_bytes` and a file takes none; names its folder.
        """
        ...

    def require_room_to_shrink(self) -> None:
        """Check that files take what a `shrink` writes anew, which it does first.

        Raises:
            BackendError: If rows have show and click, and a file takes none; names its folder.
        """
        ...

    def shrink(self) -> int:
        """End a day, and return how many rows went.

        Decays show and click; drops rows of low score, and rows and waiting counts that were not seen for the days that
        the specification gives.

        Raises:
            BackendError: As `require_room_to_shrink`, before anything changes.
        """
        ...

    @property
    def rows(self) -> int:
        """Ids that have a row."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of memory of rows and index."""
        ...

    @property
    def pushed(self) -> int:
        """Rows that pushes, additions and assignments named since the table was made."""
        ...

    @property
    def dropped(self) -> int:
        """Gradients of ids that were not admitted."""
        ...

    @property
    def evicted(self) -> int:
        """Rows that `max_bytes` cost, with `evict="drop"`."""
        ...

    @property
    def stored(self) -> int:
        """Rows that are in files, not in memory."""
        ...

    @property
    def file_bytes(self) -> int:
        """Bytes of these files."""
        ...

    @property
    def file_reads(self) -> int:
        """Rows that pulls and changes took from them."""
        ...

    @property
    def pulled(self) -> int:
        """Ids of pulls so far."""
        ...

    @property
    def missed(self) -> int:
        """Those of them that had no row."""
        ...

    @property
    def tick(self) -> int:
        """Changes so far, those before a restored snapshot included."""
        ...

    def export(self, shard: int, since: int = 0) -> Columns:
        """Return what a shard holds, ordered by the hash of the id: tables that hold the same read the same.

        A change under way is in part there and counts in `tick`; let none run beside an export that must be exact.

        Args:
            shard: 0 to 1023.
            since: Leave out what did not change after this tick, and name the ids that went since. The result is
                `is_complete` all the same where more went than the shard remembers, and after `clear` and `restore`.
        """
        ...

    def restore(self, shard: int, columns: Columns) -> None:
        """Take over exported columns: in place of the shard's content if they are complete, else over it.

        `tick` continues from the columns' tick, or by one where it is ahead of it. Nothing is evicted until the next
        change.

        Raises:
            DataError: If they are of another shard or have another width.
        """
        ...

    def keys(self, shard: int) -> Keys:
        """Return the ids of a shard that have a row, ordered by hash."""
        ...

    def clear(self) -> None:
        """Drop all rows and waiting counts."""
        ...

    def moment(self, since: int = 0) -> TableMoment:
        """Return the table as it is now, to be read while changes continue; `TableMoment.end` lets go of it.

        Waits for changes under way. Until a shard was read the first change of a row costs a copy of it.

        Args:
            since: Leave out what did not change after this tick; see `export`.
        """
        ...


def make_table(spec: TableSpec) -> RowTable:
    """Return an empty table: the native one, or the reference where the native core is not installed.

    Raises:
        ConfigError: If `max_bytes` does not hold a single row.
    """
    if not HAS_NATIVE:
        return ReferenceTable(spec)
    from phalanx.ps.table.native import NativeTable

    return NativeTable(spec)


def read_rows(table: RowTable, keys: Keys) -> Rows:
    """Return rows of a table as `RowTable.pull` reads them, shape (n, dim)."""
    out = np.empty((len(keys), table.spec.dim), np.float32)
    table.pull(keys, out)
    return out

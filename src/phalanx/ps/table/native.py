"""`NativeTable`: the C++ embedding table with argument checks, and the folder of its rows that leave memory."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path

from phalanx._core import EmbeddingTable
from phalanx.cluster.env.environment import Environment
from phalanx.errors import ConfigError
from phalanx.ps.table.arrays import Columns, Keys, check_columns, check_shard
from phalanx.ps.table.placement import table_salt
from phalanx.ps.table.row_layout import layout_of
from phalanx.ps.table.rules import TableSpec


class NativeTable(EmbeddingTable):
    """See `phalanx.ps.table.table.RowTable`; the calling thread works in `csrc/table.h`, without the GIL."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.layout = spec, layout_of(spec)
        self._salt = table_salt(spec.name)
        super().__init__(spec, self.layout, self._salt, spill_folder() if spec.spills else "")

    def export(self, shard: int, since: int = 0) -> Columns:
        """Return a shard's rows, or those changed after tick `since`."""
        check_shard(shard)
        return Columns(*self.read_shard(shard, since))

    def restore(self, shard: int, columns: Columns) -> None:
        """Put exported columns in place of what the shard holds."""
        check_shard(shard)
        check_columns(self.spec, self._salt, shard, columns, self.layout.width)
        self.restore_shard(shard, *(getattr(columns, field.name) for field in fields(columns)))

    def moment(self, since: int = 0) -> NativeMoment:
        """Return the table as it is now, to be read while changes continue."""
        return NativeMoment(self, since)

    def keys(self, shard: int) -> Keys:
        """Return the ids of a shard that have a row, ordered by hash."""
        check_shard(shard)
        return super().keys(shard)


class NativeMoment:
    """See `phalanx.ps.table.moment.TableMoment`.

    Args:
        table: The table.
        since: Leave out what did not change after this tick.
    """

    def __init__(self, table: NativeTable, since: int) -> None:
        self.spec, self._table = table.spec, table
        self._number = table.begin_moment(since)

    def export(self, shard: int) -> Columns:
        """Return what a shard held, once."""
        check_shard(shard)
        return Columns(*self._table.read_moment(self._number, shard))

    def end(self) -> None:
        """Let go of what was not read."""
        self._table.end_moment(self._number)


def spill_folder() -> str:
    """Return the folder for the files of tables: the one that is set, a server's own, or one for temporary files.

    Raises:
        ConfigError: If it is not there and cannot be made.
    """
    settings = Environment(os.environ)
    folder = settings.text("PHALANX_SPILL_DIR") or settings.text("PHALANX_SERVER_DIR")
    if folder is None:
        return tempfile.gettempdir()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Tables with max_bytes keep rows in {folder}, which cannot be made: {error.strerror}. "
            "Set PHALANX_SPILL_DIR to a folder on a disk with room."
        ) from error
    return folder

"""`RowLayout`: columns of a row: values, optimizer state, show and click counts."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.ps.table.rules import ShowClick, TableSpec

INDEX_BYTES = 32
"""Most bytes that the index takes for one id: 16 in an index that is half full."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns of a row, in their order."""

    dim: int
    """Values."""

    state: int
    """Columns of optimizer state: `dim` of each kind that a value has, then what a row has once."""

    has_statistics: bool
    """Whether the last two columns are show and click."""

    value_bytes: int
    """Bytes of one value in memory; everything else takes 4."""

    @property
    def width(self) -> int:
        """Columns of a row when it is exported: values, state, statistics, all float32."""
        return self.dim + self.state + 2 * self.has_statistics

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        values = -(-self.dim * self.value_bytes // 4) * 4
        return values + 4 * (self.state + 2 * self.has_statistics)


def layout_of(spec: TableSpec) -> RowLayout:
    """Return the layout of a table's rows.

    Raises:
        ConfigError: If `max_bytes` does not hold a single row.
    """
    layout = RowLayout(
        dim=spec.dim,
        state=spec.rule.state_columns(spec.dim),
        has_statistics=isinstance(spec.entry, ShowClick),
        value_bytes=4 if spec.dtype == "float32" else 2,
    )
    cost = layout.row_bytes + INDEX_BYTES
    if spec.max_bytes is not None and spec.max_bytes < cost:
        raise ConfigError(
            f"Asked for a table '{spec.name}' of at most {spec.max_bytes} bytes, but one row takes {cost}. "
            "Set max_bytes to what the rows of one server may take, or leave it out."
        )
    return layout

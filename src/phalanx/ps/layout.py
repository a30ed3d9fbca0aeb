"""What a row consists of: `[values | optimizer state | show, click]`, and what it costs in memory."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.ps.rules import FTRL, SGD, Adagrad, Adam, Momentum, RowWiseAdagrad, Rule, ShowClick, TableSpec

INDEX_BYTES = 32
"""Most bytes that the index takes for one id: 16 in an index that is half full."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a row, in their order."""

    dim: int
    """Values."""

    per_element: int
    """Optimizer state per value; the first `dim` state columns are the first kind, and so on."""

    has_steps: bool
    """Whether one column counts the updates of the row; it follows the other state."""

    per_row: int
    """Optimizer state per row, other than the count of updates."""

    has_statistics: bool
    """Whether the last two columns are show and click."""

    value_bytes: int
    """Bytes of one value in memory; everything else takes 4."""

    @property
    def state(self) -> int:
        """Columns of optimizer state."""
        return self.dim * self.per_element + self.per_row + self.has_steps

    @property
    def width(self) -> int:
        """Columns of a row when it is exported: values, state, statistics, all float32."""
        return self.dim + self.state + 2 * self.has_statistics

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        values = -(-self.dim * self.value_bytes // 4) * 4
        return values + 4 * (self.state + 2 * self.has_statistics)

    @property
    def row_cost(self) -> int:
        """What a row counts against `max_bytes`: its bytes and its part of the index."""
        return self.row_bytes + INDEX_BYTES


def layout_of(spec: TableSpec) -> Layout:
    """Return the layout of a table's rows.

    Raises:
        ConfigError: If `max_bytes` does not hold a single row.
    """
    layout = Layout(
        dim=spec.dim,
        per_element=_per_element(spec.rule),
        has_steps=_counts_steps(spec.rule),
        per_row=int(isinstance(spec.rule, RowWiseAdagrad)),
        has_statistics=isinstance(spec.entry, ShowClick),
        value_bytes=4 if spec.dtype == "float32" else 2,
    )
    if spec.max_bytes is not None and spec.max_bytes < layout.row_cost:
        raise ConfigError(
            f"Asked for a table '{spec.name}' of at most {spec.max_bytes} bytes, but one row takes {layout.row_cost}. "
            "Set max_bytes to what the rows of one server may take, or leave it out."
        )
    return layout


def _per_element(rule: Rule) -> int:
    if isinstance(rule, SGD | RowWiseAdagrad):
        return 0
    return 2 if isinstance(rule, Adam | FTRL) else 1


def _counts_steps(rule: Rule) -> bool:
    """Whether the rule asks how often the row was updated."""
    if isinstance(rule, Adam):
        return True
    if isinstance(rule, Adagrad):
        return rule.lr_decay != 0
    return isinstance(rule, Momentum) and rule.dampening != 0

"""Both tables, for tests that hold them to the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import RowTable
from phalanx.versions import HAS_NATIVE


def native_table(spec: TableSpec) -> RowTable:
    """Return the native table."""
    from phalanx.ps.table.native import NativeTable

    return NativeTable(spec)


TABLES = [
    pytest.param(ReferenceTable, id="reference"),
    pytest.param(
        native_table,
        id="native",
        marks=pytest.mark.skipif(not HAS_NATIVE, reason="the native core is not installed"),
    ),
]


def pulled(table: RowTable, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows of ids, shape (n, dim)."""
    out = np.full((len(keys), table.spec.dim), np.nan, np.float32)
    table.pull(keys, out)
    return out

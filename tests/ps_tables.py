"""Both tables, for tests that hold them to the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from phalanx.ps.table.initializers import nearest_bfloat16
from phalanx.ps.table.reference import ReferenceTable
from phalanx.ps.table.rules import FileDtype, TableSpec
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


def in_file(values: NDArray[np.float32], dtype: FileDtype) -> NDArray[np.float32]:
    """Return values of rows, shape (n, dim), as they read once they have been in a file; see `csrc/table_codec.h`."""
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return nearest_bfloat16(values)
    finite = np.isfinite(values)
    most = np.where(finite, np.abs(values), np.float32(0)).max(axis=1, keepdims=True)
    scale = ((most / np.float32(126)).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    codes = np.rint(np.where(finite, values, np.float32(0)) / scale)
    return np.where(finite, codes * scale, values)


def pulled(table: RowTable, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows of ids, shape (n, dim)."""
    out = np.full((len(keys), table.spec.dim), np.nan, np.float32)
    table.pull(keys, out)
    return out

"""Arrays are checked once, where the error can name the table; what reaches a table then fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.table import make_table
from phalanx.ps.table.update_rules import FTRL, SGD
from phalanx.versions import HAS_NATIVE

PLAIN = TableSpec("t", 4, SGD(1.0))
KEYS = np.array([0, -1, 1, 2**63 - 1, -(2**63)], np.int64)


def ones(n: int, dim: int = 4) -> np.ndarray:
    return np.ones((n, dim), np.float32)


MISFITS: dict[str, tuple[TableUpdate, str]] = {
    "width": (
        TableUpdate("t", KEYS, ones(5, 3)),
        r"gradient rows of type float32 and shape \(5, 3\) for 5 keys.*rows of 4",
    ),
    "type": (TableUpdate("t", KEYS, np.ones((5, 4)), "delta"), "type float64"),  # type: ignore[arg-type]
    "keys": (TableUpdate("t", KEYS.astype(np.int32), ones(5)), r"keys of type int32.*Give int64"),  # type: ignore[arg-type]
    "gaps": (TableUpdate("t", KEYS, np.ones((5, 8), np.float32)[:, ::2], "assign"), "gaps in memory"),
    "counts": (
        TableUpdate("t", KEYS, ones(5), counts=np.ones(4, np.uint32)),
        r"counts of type uint32 and shape \(4,\) for 5 keys. Give uint32 of shape \(5,\)",
    ),
    "rate": (TableUpdate("t", KEYS, ones(5), lr=-1.0), r"rate -1.*at least 0"),
    "kind": (TableUpdate("t", KEYS, ones(5), "divide"), "kind 'divide'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_an_update_that_does_not_fit_its_table_is_an_error(misfit: str) -> None:
    update, why = MISFITS[misfit]
    with pytest.raises(ConfigError, match=rf"table 't'.*{why}"):
        update.check(PLAIN)


def test_ftrl_needs_a_learning_rate() -> None:
    with pytest.raises(ConfigError, match="rate 0, by which FTRL divides"):
        TableUpdate("t", KEYS, ones(5), lr=0.0).check(replace(PLAIN, rule=FTRL(0.1)))


@pytest.mark.skipif(not HAS_NATIVE, reason="needs the native core")
def test_the_native_table_takes_no_arrays_that_it_would_read_past() -> None:
    table = make_table(PLAIN)
    for change, rows in (
        (table.push, ones(5, 3)),
        (table.add, ones(4)),
        (table.assign, ones(6)),
        (table.pull, ones(4)),
    ):
        with pytest.raises(ValueError, match=r"rows are not \(keys, dim\)"):
            change(KEYS, rows)
    with pytest.raises(ValueError, match="one value for each key"):
        table.push(KEYS, ones(5), counts=np.ones(4, np.uint32))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        table.pull(KEYS.astype(np.int32), ones(5))  # type: ignore[arg-type]
    assert table.tick == 0

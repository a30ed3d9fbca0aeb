"""Which tables only the workers, or only the folder that servers started from, have."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.ps.server.snapshots.snapshot_check import WARMUP_STEPS, SnapshotTableCheck
from phalanx.ps.table.rules import TableSpec
from ps_requests import SPEC

pytestmark = pytest.mark.usefixtures("phalanx_propagates")

DAY1 = Path("/models/day1")


def tables(*names: str) -> dict[str, TableSpec]:
    return {name: replace(SPEC, name=name, dense=2 if "/" in name else None) for name in names}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return said


def test_the_same_tables_are_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    matching = SnapshotTableCheck(DAY1, tables("user", "item", "dense/0"))
    matching.compare(tables("user").values(), 0)
    matching.compare(tables("user", "item", "dense/0").values(), WARMUP_STEPS)
    matching.end()
    assert warnings(caplog) == []


def test_a_renamed_table_is_named_on_both_sides_and_once(caplog: pytest.LogCaptureFixture) -> None:
    matching = SnapshotTableCheck(DAY1, tables("users", "item"))
    for steps in (0, WARMUP_STEPS - 1):
        matching.compare(tables("user", "item").values(), steps)
    (said,) = warnings(caplog)
    assert said.startswith("table 'user' starts fresh: /models/day1 has no table of this name, only 'item', 'users'.")
    assert said.endswith("Did you mean 'users'? Give tables the names they were saved with.")
    matching.compare(tables("user", "item").values(), WARMUP_STEPS)
    matching.end()
    (said,) = warnings(caplog)
    assert said.startswith("table 'users' of /models/day1 is not used: no worker has one of this name, only 'item',")
    assert said.endswith("Did you mean 'user'? Give tables the names they were saved with.")


def test_a_run_of_few_steps_hears_it_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    matching = SnapshotTableCheck(DAY1, tables("user"))
    matching.end()
    assert warnings(caplog) == [], "no worker came"
    matching.compare(tables("dense/0").values(), 1)
    matching.end()
    dense, user = warnings(caplog)
    assert "table 'user' of /models/day1 is not used: no worker has one of this name, only none." in user
    assert "dense table 'dense/0' starts fresh" in dense
    assert "fleet.load('/models/day1') on the workers loads dense parameters" in dense


def test_of_tables_that_were_asked_for_by_name_only_those_count(caplog: pytest.LogCaptureFixture) -> None:
    matching = SnapshotTableCheck(DAY1, tables("user", "item"), ["user"])
    matching.compare(tables("shop").values(), WARMUP_STEPS)
    (said,) = warnings(caplog)
    assert "table 'user' of /models/day1 is not used" in said

"""`phalanx serve-table` as a process: a snapshot that is saved again while it is read, addresses that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launching import wait_until
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import Constant, TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.table.update_rules import SGD

pytestmark = pytest.mark.dist

SPEC = TableSpec(name="items", dim=2, rule=SGD(lr=1.0), init=Constant(0.0))


@contextmanager
def serve_table(log: Path, *arguments: object) -> Iterator[str]:
    """Run the command; gives its address."""
    command = [sys.executable, "-m", "phalanx", "serve-table", *map(str, arguments)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)

    def address() -> str | None:
        assert process.poll() is None, log.read_text()
        return next((word for word in log.read_text().split() if word.endswith("/v1/tables.")), None)

    try:
        yield str(wait_until(address)).removesuffix("/v1/tables.")
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


def post(address: str, ids: list[int], table: str = "items") -> Any:
    body = json.dumps({"ids": ids}).encode()
    with urllib.request.urlopen(f"{address}/v1/tables/{table}/rows", body) as answer:
        return json.load(answer)


def save(table: RowTable, folder: Path) -> None:
    save_local(SnapshotParticipant({"items": table}, range(SHARDS)), folder, {})


def test_readers_get_one_snapshot_or_the_newer_one(tmp_path: Path) -> None:
    table, ids = make_table(SPEC), np.arange(1000)
    table.assign(ids, np.ones((1000, 2), np.float32))
    save(table, tmp_path / "saved")
    with serve_table(tmp_path / "log", tmp_path / "saved") as address:
        first = post(address, [1, 2000])
        assert first["rows"] == [[1.0, 1.0], [0.0, 0.0]]
        table.assign(ids, np.full((1000, 2), 2, np.float32))
        save(table, tmp_path / "saved")

        def newer() -> Any:
            answer = post(address, ids.tolist())
            rows = np.array(answer["rows"])
            assert (rows == (1 if answer["version"] == first["version"] else 2)).all()
            return answer if answer["version"] != first["version"] else None

        assert wait_until(newer)["age_s"] >= 0


def test_an_address_that_others_reach_needs_a_certificate_and_a_token(tmp_path: Path) -> None:
    save(make_table(SPEC), tmp_path)
    command = [sys.executable, "-m", "phalanx", "serve-table", str(tmp_path), "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "--host 0.0.0.0 can be reached from other machines" in ended.stderr
    assert "Give --certificate FILE.pem" in ended.stderr
    (tmp_path / "any.pem").write_text("")
    ended = subprocess.run(
        [*command, "--certificate", tmp_path / "any.pem"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "no token protects the tables. Give --token-file FILE" in ended.stderr

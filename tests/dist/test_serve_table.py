"""`phalanx serve-table` as a process: of a snapshot that is saved again, and of a job whose servers are killed."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certificates import make_certificate
from launching import wait_until
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import Constant, Normal, TableSpec
from phalanx.ps.table.table import RowTable, make_table
from phalanx.ps.table.update_rules import SGD, Adagrad
from ps_servers import SECRET, servers

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


def test_others_read_over_https_with_the_token(tmp_path: Path) -> None:
    save(make_table(SPEC), tmp_path / "saved")
    make_certificate(tmp_path / "both.pem")
    (tmp_path / "token").write_text("secret\n")
    place = ("--host", "0.0.0.0", "--certificate", tmp_path / "both.pem", "--token-file", tmp_path / "token")
    trust = ssl.create_default_context(cafile=str(tmp_path / "both.pem"))
    with serve_table(tmp_path / "log", tmp_path / "saved", *place) as address:
        url = address.replace("0.0.0.0", "localhost") + "/v1/tables"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, context=trust)
        request = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, context=trust) as answer:
            assert json.load(answer)["tables"][0]["name"] == "items"


# --- a job that trains ------------------------------------------------------------------------------------------------

RULED = TableSpec(name="ruled", dim=4, rule=Adagrad(lr=0.1), init=Normal(std=1.0), seed=5)
IDS = np.arange(-100, 300)


def read_binary(address: str, table: str) -> tuple[np.ndarray, str]:
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    request = urllib.request.Request(f"{address}/v1/tables/{table}/rows", IDS.tobytes(), headers)
    with urllib.request.urlopen(request) as answer:
        rows = np.frombuffer(answer.read(), np.float32).reshape(len(IDS), int(answer.headers["Phalanx-Dim"]))
        return rows, answer.headers["Phalanx-Version"]


def pull(store: RemoteStore, step: int) -> np.ndarray:
    return store.pull([PullSpec("ruled", IDS)], step=step).rows()[0].copy()


def has_rows(address: str, expected: np.ndarray) -> bool:
    return read_binary(address, "ruled")[0].tobytes() == expected.tobytes()


def test_rows_follow_a_job_whose_servers_are_killed_and_that_ends(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    state = tmp_path / "state"
    state.mkdir()
    with servers(2, state, {"PHALANX_SERVER_RETRY_S": "60"}, state=True) as made:
        store = RemoteStore(
            made.endpoints, secret=SECRET, worker=0, workers=1, mode="async", timeout_s=60.0, retry_s=60.0
        )
        store.declare([RULED])
        with serve_table(tmp_path / "log", state, "--follow") as address:
            for step in range(60):
                ids = generator.choice(IDS, 100, replace=False)
                gradients = generator.normal(size=(100, 4)).astype(np.float32)
                store.push([TableUpdate("ruled", ids, gradients)], step=step)
                if step % 20 == 10:
                    made[step // 20 % 2].kill()
                    made[step // 20 % 2].start()
                if step % 6 == 5:
                    expected = pull(store, step + 1)
                    wait_until(lambda expected=expected: has_rows(address, expected), timeout_s=30)
            store.leave()
            store.close()
            for server in made:
                assert server.end() == 0
            with urllib.request.urlopen(f"{address}/v1/tables") as answer:
                first = json.load(answer)
            assert first["steps"] == [60]
            assert has_rows(address, expected)
            with urllib.request.urlopen(f"{address}/v1/tables") as answer:
                later = json.load(answer)
            assert later["version"] == first["version"]
            assert later["age_s"] > first["age_s"]
    # A server of tables that starts after the job has its rows too.
    with serve_table(tmp_path / "log", state, "--follow") as address:
        assert has_rows(address, expected)


def test_a_job_without_logs_cannot_be_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "serve-table", str(tmp_path), "--follow"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "phalanx: No parameter server keeps its log in" in ended.stderr
    assert "Start the job with --server-dir DIR or --max-restarts" in ended.stderr

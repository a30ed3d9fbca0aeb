"""Tables that are read over HTTP: rows as training pulls them, mistakes that are named, snapshots that are replaced."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from phalanx.errors import ConfigError
from phalanx.ps.serving import app as table_app
from phalanx.ps.serving.app import make_table_app
from phalanx.ps.serving.row_request import BINARY, read_ids
from phalanx.ps.serving.snapshot_replica import SnapshotReplica
from phalanx.ps.serving.view import TableView
from phalanx.ps.snapshot.manifest import MANIFEST
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.table.placement import SHARDS, owner_of, shard_of, table_salt
from phalanx.ps.table.rules import CountFilter, Normal, TableSpec
from phalanx.ps.table.table import RowTable, make_table, read_rows
from phalanx.ps.table.update_rules import SGD, Adagrad
from phalanx.ps.text_ids import hash_ids

ADS = TableSpec(name="ads", dim=4, rule=Adagrad(lr=0.1), init=Normal(std=0.1), seed=3)
USERS = TableSpec(name="a/user s", dim=3, rule=SGD(lr=0.1), entry=CountFilter(2))
IDS = np.array([0, -1, 2**63 - 1, -(2**63), 7, 7, 99], np.int64)


def push(tables: dict[str, RowTable], value: float) -> None:
    for table in tables.values():
        table.push(np.unique(IDS[:-1]), np.full((5, table.spec.dim), value, np.float32))


@pytest.fixture
def tables() -> dict[str, RowTable]:
    made = {spec.name: make_table(spec) for spec in (ADS, USERS)}
    push(made, 1.0)
    return made


def save(tables: dict[str, RowTable], folder: Path, mode: str = "full") -> None:
    save_local(SnapshotParticipant(tables, range(SHARDS)), folder, {}, mode)


@pytest.fixture
def replica(tables: dict[str, RowTable], tmp_path: Path) -> Iterator[SnapshotReplica]:
    save(tables, tmp_path / "saved")
    made = SnapshotReplica(tmp_path / "saved", poll_s=3600)
    yield made
    made.close()


class Client:
    """Asks the application, without a socket."""

    def __init__(self, replica: SnapshotReplica, token: str | None = None) -> None:
        self._transport = httpx.ASGITransport(make_table_app(replica.view, token))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        import asyncio

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://tables") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def post(self, name: str, **options: Any) -> httpx.Response:
        return self.ask("POST", f"/v1/tables/{name}/rows", **options)


def test_json_gives_rows_as_training_pulls_them(replica: SnapshotReplica, tables: dict[str, RowTable]) -> None:
    for name, table in tables.items():
        ids = [*map(int, IDS[:3]), *map(str, IDS[3:])]
        answer = Client(replica).post(name, json={"ids": ids})
        assert answer.status_code == 200, answer.text
        value = answer.json()
        np.testing.assert_array_equal(np.array(value["rows"], np.float32), read_rows(table, IDS))
        assert value["version"] == replica.view().version
        assert value["age_s"] >= 0


def test_bytes_give_the_same_rows(replica: SnapshotReplica, tables: dict[str, RowTable]) -> None:
    headers = {"content-type": BINARY, "accept": BINARY}
    answer = Client(replica).post("ads", content=IDS.astype("<i8").tobytes(), headers=headers)
    rows = np.frombuffer(answer.content, "<f4").reshape(-1, int(answer.headers["phalanx-dim"]))
    np.testing.assert_array_equal(rows, read_rows(tables["ads"], IDS))
    assert answer.headers["phalanx-version"] == replica.view().version
    assert float(answer.headers["phalanx-age"]) >= 0


def test_texts_are_hashed_as_readers_hash_them() -> None:
    ids = read_ids(b'{"texts": ["red", "\xc3\xa9"], "salt": "colour", "hash_space": 1000}', "application/json")
    np.testing.assert_array_equal(ids, hash_ids(["red", "é"], "colour", hash_space=1000).numpy())


def test_tables_are_listed(replica: SnapshotReplica) -> None:
    value = Client(replica).ask("GET", "/v1/tables").json()
    # A count filter of 2 has admitted nobody yet.
    assert value["tables"] == [{"name": "ads", "dim": 4, "rows": 5}, {"name": "a/user s", "dim": 3, "rows": 0}]
    assert value["version"] == replica.view().version
    assert Client(replica).ask("GET", "/healthz").text == "ok\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The body is no JSON"),
        (b"[1]", "The body is a list"),
        (b"{}", "an object of nothing"),
        (b'{"id": [1]}', "an object of 'id', which asks for no ids. Send"),
        (b'{"ids": [1], "texts": ["a"]}', "asks for no ids"),
        (b'{"ids": [1, 2.0]}', r"ids\[1\] is '2.0', which is no 64-bit signed integer"),
        (b'{"ids": [true]}', r"ids\[0\] is 'True'"),
        (b'{"ids": ["9223372036854775808"]}', r"ids\[0\] is '9223372036854775808'"),
        (b'{"ids": [-9223372036854775809]}', "no 64-bit signed integer"),
        (b'{"texts": [5], "salt": "a"}', "text 0 is 5"),
        (b'{"texts": ["a"]}', "asks for no ids"),
        (b'{"texts": ["a"], "salt": "a", "hash_space": 0}', "hash_space"),
        (b'{"texts": ["a"], "salt": "a", "hash_space": "9"}', "hash_space is '9', which is no integer"),
    ],
)
def test_a_body_that_asks_for_no_ids_is_named(replica: SnapshotReplica, body: bytes, message: str) -> None:
    answer = Client(replica).post("ads", content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "ConfigError")
    with pytest.raises(ConfigError, match=message):
        read_ids(body, "application/json")


def test_bytes_that_are_no_whole_ids_are_an_error(replica: SnapshotReplica) -> None:
    answer = Client(replica).post("ads", content=b"12345", headers={"content-type": BINARY})
    assert answer.status_code == 400
    assert "has 5 bytes, which are no whole ids" in answer.json()["message"]


def test_a_table_that_is_not_there_is_404_with_the_nearest_name(replica: SnapshotReplica) -> None:
    answer = Client(replica).post("adds", json={"ids": [1]})
    assert answer.status_code == 404
    assert "There is no table 'adds'; tables: ['a/user s', 'ads']. Did you mean 'ads'?" in answer.json()["message"]
    assert Client(replica).ask("GET", "/v2").status_code == 404


def test_too_much_is_413(replica: SnapshotReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_app, "MOST_ANSWER_BYTES", 48)
    assert Client(replica).post("ads", json={"ids": [1, 2, 3]}).status_code == 200
    answer = Client(replica).post("ads", json={"ids": [1, 2, 3, 4]})
    assert answer.status_code == 413
    assert answer.json()["message"] == "Asked for 4 rows of 4 values; at most 3 are sent. Ask in parts."
    monkeypatch.setattr(table_app, "MOST_BODY_BYTES", 100)
    answer = Client(replica).post("ads", json={"ids": [1] * 100})
    assert answer.status_code == 413
    assert "larger than 100 bytes" in answer.json()["message"]


def test_with_a_token_nobody_reads_without_it(replica: SnapshotReplica) -> None:
    client = Client(replica, "secret")
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}):
        for answer in (
            client.ask("GET", "/v1/tables", headers=headers),
            client.post("ads", json={"ids": [1]}, headers=headers),
        ):
            assert answer.status_code == 401
            assert "Authorization: Bearer TOKEN" in answer.json()["message"]
    assert client.post("ads", json={"ids": [1]}, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_number_that_json_cannot_write_is_null(tmp_path: Path) -> None:
    table = make_table(ADS)
    table.assign(np.array([1]), np.array([[np.nan, np.inf, 1.0, -np.inf]], np.float32))
    save({"ads": table}, tmp_path)
    replica = SnapshotReplica(tmp_path, poll_s=3600)
    assert Client(replica).post("ads", json={"ids": [1]}).json()["rows"] == [[None, None, 1.0, None]]
    replica.close()


def test_parts_of_servers_are_merged(tables: dict[str, RowTable]) -> None:
    ids = np.arange(-50, 50)
    whole = make_table(ADS)
    whole.assign(ids, np.arange(400, dtype=np.float32).reshape(100, 4))
    parts = []
    owners = owner_of(shard_of(ids, table_salt("ads")), 3)
    for server in range(3):
        part = make_table(ADS)
        part.assign(ids[owners == server], read_rows(whole, ids[owners == server]))
        parts.append({"ads": part, **({"users": tables["a/user s"]} if server else {})})
    view = TableView(parts, "v", 0.0)
    asked = np.arange(-60, 60)
    np.testing.assert_array_equal(view.rows("ads", asked), read_rows(whole, asked))
    assert view.describe() == [{"name": "ads", "dim": 4, "rows": 100}]


# --- snapshots that are saved again ---------------------------------------------------------------------------------


def test_a_newer_snapshot_takes_the_place_of_the_one_that_is_read(
    replica: SnapshotReplica, tables: dict[str, RowTable], tmp_path: Path
) -> None:
    before = replica.view()
    expected_before = read_rows(tables["ads"], IDS)
    replica.refresh()
    assert replica.view() is before
    push(tables, 2.0)
    save(tables, tmp_path / "saved")
    replica.refresh()
    after = replica.view()
    assert after.version != before.version
    np.testing.assert_array_equal(after.rows("ads", IDS), read_rows(tables["ads"], IDS))
    # Who still reads the older one reads all of it.
    np.testing.assert_array_equal(before.rows("ads", IDS), expected_before)


@pytest.mark.parametrize("mode", ["delta", "serving"])
def test_every_mode_is_served(tables: dict[str, RowTable], tmp_path: Path, mode: str) -> None:
    holder = SnapshotParticipant(tables, range(SHARDS))
    save_local(holder, tmp_path / "base", {})
    push(tables, 2.0)
    save_local(holder, tmp_path / "other", {}, mode)
    replica = SnapshotReplica(tmp_path / "other", poll_s=3600)
    for name, table in tables.items():
        np.testing.assert_array_equal(replica.view().rows(name, IDS), read_rows(table, IDS))
    replica.close()


def test_a_newer_snapshot_that_is_broken_leaves_the_older_one(
    replica: SnapshotReplica, tables: dict[str, RowTable], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = replica.view()
    save(tables, tmp_path / "saved")
    for path in (tmp_path / "saved").glob("shard-*"):
        path.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "phalanx.ps"):
        replica.refresh()
        replica.refresh()
    assert replica.view() is before
    (record,) = caplog.records
    assert f"save {before.version} stays: the newer one cannot be read." in record.getMessage()
    save(tables, tmp_path / "saved")
    replica.refresh()
    assert replica.view() is not before


def test_a_snapshot_is_as_old_as_its_manifest(tables: dict[str, RowTable], tmp_path: Path) -> None:
    save(tables, tmp_path)
    os.utime(tmp_path / MANIFEST, (1000, 1000))
    replica = SnapshotReplica(tmp_path, poll_s=3600)
    assert replica.view().as_of == 1000
    assert replica.view().age_s > 1e9
    replica.close()


def test_a_folder_without_a_snapshot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no snapshot in"):
        SnapshotReplica(tmp_path)

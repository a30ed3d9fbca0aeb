"""A copy of a server's tables that follows its log: the same bits, across bases, restarts, loads and other jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launching import wait_until
from phalanx.errors import ConfigError, DataError
from phalanx.ps.server.presence import ServerPresence, is_running
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.serving import servers_replica
from phalanx.ps.serving.server_replica import ServerReplica
from phalanx.ps.serving.servers_replica import ServersReplica, find_servers
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import CountFilter, Normal, TableSpec
from phalanx.ps.table.table import make_table, read_rows
from phalanx.ps.table.update_rules import Adagrad
from phalanx.ps.wire.client.server_layout import ServerLayout
from ps_requests import SPEC, FakeWorker, gradient, keys

RULED = TableSpec(name="ruled", dim=2, rule=Adagrad(lr=0.1), init=Normal(std=1.0), entry=CountFilter(2), seed=1)
IDS = keys(1, 2, 3, -7)


class Running:
    """A server in this process, with its state in a folder."""

    def __init__(self, folder: Path, job: str = "job", source: Path | None = None) -> None:
        self.service = Service()
        snapshots = SnapshotService(self.service)
        if source is not None:
            snapshots.add_source(source, None)
        self.recovery = Recovery(self.service, snapshots, folder)
        self.recovery.recover(job)
        self.worker = FakeWorker(self.service)
        self.step = 0

    def declare(self, *specs: TableSpec, mode: str = "async", workers: int = 1) -> None:
        self.worker.declare(*specs, mode=mode, workers=workers)

    def push(self, *ids: int, table: str = "items", value: float = 1.0) -> None:
        self.worker.push(gradient(ids, value, table=table), step=self.step)
        self.step += 1

    def stop(self) -> None:
        self.service.stop()
        self.recovery.close()


def rows(replica: ServerReplica, table: str = "items") -> np.ndarray:
    return read_rows(replica.tables[table], IDS)


def pulled(server: Running, table: str = "items") -> np.ndarray:
    return server.worker.pull(*IDS, step=server.step, table=table).rows[0]


def check_same(replica: ServerReplica, server: Running, tables: Sequence[str] = ("items",)) -> None:
    replica.poll()
    for table in tables:
        np.testing.assert_array_equal(rows(replica, table), pulled(server, table))


def test_a_push_is_read_after_the_next_poll_with_the_same_bits(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare(SPEC, RULED)
    replica = ServerReplica(tmp_path)
    for step in range(6):
        server.push(1, 3, table="ruled" if step % 2 else "items", value=0.1 * step)
        version = replica.version
        check_same(replica, server, ["items", "ruled"])
        assert replica.version != version
        assert replica.steps == [step + 1]
    server.worker.call("shrink", {"table": "ruled"})
    check_same(replica, server, ["items", "ruled"])
    server.stop()


def test_a_base_does_not_disturb_it_and_one_that_it_missed_is_loaded(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare()
    server.push(1, 2)
    replica, late = ServerReplica(tmp_path), ServerReplica(tmp_path)
    late.poll()
    check_same(replica, server)
    server.recovery.write_base()
    server.push(2, 3)
    check_same(replica, server)
    for _ in range(2):
        server.recovery.write_base()
        server.push(3)
    check_same(replica, server)
    late.poll()
    check_same(late, server)
    check_same(ServerReplica(tmp_path), server)
    server.stop()


def test_pushes_of_an_open_step_are_applied_once(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare(mode="sync", workers=2)
    other = FakeWorker(server.service, 1)
    other.declare(mode="sync", workers=2)
    replica = ServerReplica(tmp_path)
    server.push(1, 2)
    replica.poll()
    assert not rows(replica).any()
    # The base does not hold it; it is written again at the head of the new segment.
    server.recovery.write_base()
    replica.poll()
    other.push(gradient((2, 3), 1.0), step=0)
    check_same(replica, server)
    check_same(ServerReplica(tmp_path), server)
    server.stop()


def test_it_goes_on_when_the_server_is_started_again(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare()
    replica = ServerReplica(tmp_path)
    server.push(1)
    replica.poll()
    server.stop()
    with next(iter(sorted(tmp_path.glob("log-*"), reverse=True))).open("ab") as log:
        log.write(b"PXR1 half a rec")  # what a kill cuts off
    replica.poll()
    assert rows(replica)[0, 0] == -1.0
    again = Running(tmp_path)
    again.step, again.worker.seq = server.step, server.worker.seq
    again.push(1, 2)
    check_same(replica, again)
    assert rows(replica)[0, 0] == -2.0
    again.stop()


def test_rows_that_the_log_does_not_hold_come_with_the_base(tmp_path: Path) -> None:
    table = make_table(SPEC)
    table.assign(IDS, np.full((len(IDS), 2), 5.0, np.float32))
    save_local(SnapshotParticipant({"items": table}, range(SHARDS)), tmp_path / "saved", {})
    server = Running(tmp_path / "0", source=tmp_path / "saved")
    replica = ServerReplica(tmp_path / "0")
    replica.poll()
    assert dict(replica.tables) == {}
    server.declare()
    server.push(1)
    check_same(replica, server)
    assert rows(replica)[0, 0] == 4.0
    server.worker.call("load", {"directory": str(tmp_path / "saved")})
    server.push(2)
    check_same(replica, server)
    assert rows(replica)[:2, 0].tolist() == [5.0, 4.0]
    server.stop()


def test_until_that_base_is_there_the_rows_before_it_are_read(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare()
    server.push(1)
    replica = ServerReplica(tmp_path)
    replica.poll()
    before = replica.as_of
    with server.service.write_freeze.change():
        server.service.mark_unlogged()
    server.push(1)
    replica.poll()
    assert (rows(replica)[0, 0], replica.as_of) == (-1.0, before)
    server.stop()
    # A server that was killed before it wrote the base does so when it is started again.
    again = Running(tmp_path)
    again.step, again.worker.seq = server.step, server.worker.seq
    check_same(replica, again)
    assert rows(replica)[0, 0] == -2.0
    again.stop()


def test_what_is_filled_while_a_base_is_written_gets_a_base_of_its_own(tmp_path: Path) -> None:
    server = Running(tmp_path)
    written: list[bool] = []

    def write_base() -> None:
        written.append(server.service.state.unlogged)
        if len(written) == 1:
            server.service.mark_unlogged()

    server.service.write_base = write_base
    server.service.mark_unlogged()
    server.service.write_owed_base()
    server.service.write_owed_base()
    server.service.write_owed_base()
    assert written == [False, False]
    server.stop()


def test_the_next_job_in_the_folder_is_followed_once_it_has_tables(tmp_path: Path) -> None:
    server = Running(tmp_path / "0")
    server.declare()
    server.push(1)
    replica = ServerReplica(tmp_path / "0")
    replica.poll()
    server.stop()
    other = Running(tmp_path / "0", job="another")
    replica.poll()
    assert rows(replica)[0, 0] == -1.0
    other.declare()
    other.push(2)
    replica.poll()
    check_same(replica, other)
    assert rows(replica)[0, 0] == 0.0
    other.stop()


def test_rows_are_current_while_the_server_runs_and_grow_old_after_it(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare()
    replica = ServersReplica(tmp_path, poll_s=3600)
    (of_server,) = replica._followed._servers
    assert is_running(tmp_path)
    first = replica.view().as_of
    of_server.poll()
    assert replica.view().as_of > first
    server.stop()
    assert not is_running(tmp_path)
    last = replica.view().as_of
    of_server.poll()
    assert replica.view().as_of == last
    replica.close()
    # Of a job that has ended before it began to follow, the time of the last change is known.
    for path in tmp_path.glob("log-*"):
        os.utime(path, (1000, 1000))
    replica = ServersReplica(tmp_path, poll_s=3600)
    assert replica.view().as_of == 1000
    replica.close()


def test_the_old_servers_are_followed_no_more_when_the_new_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Running(tmp_path / "0"), Running(tmp_path / "layout-1" / "0")
    for server in (old, new):
        server.declare()
    new.push(1)
    replica = ServersReplica(tmp_path)
    followers, alive = replica._followed._threads, list[bool]()

    def find_then(directory: Path) -> list[Path]:
        alive.extend(thread.is_alive() for thread in followers)
        return find_servers(directory)

    monkeypatch.setattr(servers_replica, "find_servers", find_then)
    ServerLayout(1, ("a:1",), "layout-1").write(tmp_path / "layout.json")
    wait_until(lambda: replica.view().steps == [1])
    assert alive == [False]
    replica.close()
    for server in (old, new):
        server.stop()


def test_a_log_that_is_damaged_is_an_error_and_rows_stay(tmp_path: Path) -> None:
    server = Running(tmp_path)
    server.declare()
    server.push(1)
    replica = ServerReplica(tmp_path)
    replica.poll()
    with server.service.write_freeze.change():
        server.service.log.append({"op": "push", "client": 1, "seq": 1, "meta": {"changes": [5]}}, [])  # type: ignore[union-attr]
    server.push(1)
    with pytest.raises(DataError, match=r"log in .* is broken after byte \d+ of segment 1"):
        replica.poll()
    replica.restart()
    with pytest.raises(DataError, match="cannot be applied"):
        replica.poll()
    assert rows(replica)[0, 0] == -1.0
    # A base makes it whole.
    server.recovery.write_base()
    replica.restart()
    check_same(replica, server)
    server.stop()


def test_a_folder_without_servers_says_how_a_job_keeps_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No parameter server keeps its log in .*--server-dir DIR or --max-restarts"):
        ServersReplica(tmp_path)


def test_servers_that_are_missing_are_named(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "job").write_text("a")
        ServerPresence(folder, number, 3).close()
    with pytest.raises(ConfigError, match=r"No parameter server keeps its log in .*/2\."):
        find_servers(tmp_path)
    with pytest.raises(ConfigError, match=r"/0 is the folder of one of 3 servers. Give the folder that holds"):
        find_servers(tmp_path / "0")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "job").write_text("b")
    ServerPresence(tmp_path / "2", 2, 3).close()
    with pytest.raises(ConfigError, match=r"/2 is not the folder of server 2 of 3 of the job in"):
        find_servers(tmp_path)
    (tmp_path / "2" / "job").write_text("a")
    assert find_servers(tmp_path) == [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "servers").symlink_to(tmp_path)
    assert find_servers(tmp_path / "log")[2] == tmp_path / "log" / "servers" / "2"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"server": 3, "servers": 3}', b'{"server": -1, "servers": 1}', b"[]"]
)
def test_a_broken_file_of_a_server_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "server.json").write_bytes(content)
    with pytest.raises(DataError, match=r"server\.json .*Start the server again"):
        find_servers(tmp_path)

"""The tables of servers in the hands of other servers, as workers see it: what they had asked is answered by those."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ps_simulator as sim
from launching import wait_until
from phalanx.errors import ConfigError
from phalanx.launch.job.servers import hand_over
from phalanx.launch.job.servers.hand_over import HandOver, HandOverPhase
from phalanx.ps.serving.servers_replica import ServersReplica, find_servers
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.stores.base import PullSpec
from phalanx.ps.stores.local import LocalStore
from phalanx.ps.stores.remote import RemoteStore
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import ShowClick
from phalanx.ps.wire.client.server_layout import ServerLayout
from ps_servers import SECRET, Servers, servers

pytestmark = pytest.mark.dist

RETRY = {"PHALANX_SERVER_RETRY_S": "60"}


def connected(made: Servers, folder: Path, worker: int = 0, workers: int = 1, mode: str = "async") -> RemoteStore:
    about = {"worker": worker, "workers": workers, "mode": mode, "timeout_s": 30.0, "retry_s": 60.0}
    return RemoteStore(made.endpoints, secret=SECRET, layout_file=folder / "layout.json", **about)


class Change:
    """A change of the number of servers, as the launcher makes it."""

    def __init__(self, folder: Path, before: Servers, after: Servers, number: int) -> None:
        self.folder, self.before, self.after, self.number = folder, before, after, number
        about = {"secret": SECRET, "job": "test", "workers": 2, "folder": folder / f"layout-{number}"}
        self.hand_over = HandOver(before.endpoints, after.endpoints, **about)

    def wait(self, phase: HandOverPhase) -> None:
        wait_until(lambda: self.hand_over.phase is phase or self.hand_over.failure)
        assert not self.hand_over.failure

    def read(self) -> None:
        """Let the new servers have the tables."""
        self.wait(HandOverPhase.LOAD)
        for server in self.after:
            server.start()
        self.wait(HandOverPhase.READY)

    def commit(self) -> None:
        layout = ServerLayout(self.number, tuple(self.after.endpoints), f"layout-{self.number}")
        layout.write(self.folder / "layout.json")
        self.hand_over.commit()
        for server in self.before:
            server.kill()
            server._bound.close()
        wait_until(lambda: self.hand_over.is_over)


@contextlib.contextmanager
def changing(folder: Path, before: Servers, count: int, number: int = 1) -> Iterator[Change]:
    with servers(count, folder / f"layout-{number}", RETRY, state=True, started=False) as after:
        yield Change(folder, before, after, number)


def test_what_was_asked_before_is_answered_by_the_new_servers(tmp_path: Path) -> None:
    """A push and a pull behind it are under way, and the push names a pull that only the old servers know."""
    local = LocalStore()
    local.declare([sim.SPEC])
    with servers(2, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        for step in range(3):
            keys = sim.keys_of(0, step)
            for each in (store, local):
                rows = each.pull([PullSpec("ids", keys)], step=step).rows()[0]
                each.push([TableUpdate("ids", keys, np.sin(rows))], step=step)
        keys = sim.keys_of(0, 3)
        rows, local_rows = (each.pull([PullSpec("ids", keys)], step=3).rows()[0] for each in (store, local))
        np.testing.assert_array_equal(rows, local_rows)
        with changing(tmp_path, made, 3) as change:
            change.read()
            then = [PullSpec("ids", sim.EVERY_KEY[::2].copy())]
            pushed = store.push([TableUpdate("ids", keys, np.sin(rows))], step=3, then=then)
            pulled = store.pull([PullSpec("ids", sim.EVERY_KEY)], step=4)
            change.commit()
            local.push([TableUpdate("ids", keys, np.sin(rows))], step=3)
            expected = local.pull([PullSpec("ids", sim.EVERY_KEY)], step=4).rows()[0]
            np.testing.assert_array_equal(pulled.rows()[0], expected)
            np.testing.assert_array_equal(pushed.rows()[0], expected[::2])
            with changing(tmp_path, change.after, 1, number=2) as second:
                second.read()
                second.commit()
                np.testing.assert_array_equal(sim.table_of(store, 4), sim.table_of(local))
                assert store.report()["ids"].pushed == local.report()["ids"].pushed
                store.leave()
                store.close()


def test_leases_days_and_the_counts_of_ids_that_wait_for_a_row_go_along(tmp_path: Path) -> None:
    keys = np.arange(40, dtype=np.int64)
    spec = dataclasses.replace(sim.SPEC, name="clicks", entry=ShowClick())
    local = LocalStore()
    local.declare([spec])
    columns = {"shows": np.ones(40, np.float32), "clicks": (keys % 2).astype(np.float32)}
    with servers(1, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([spec])
        first, _, left = store.lease(0, ["a", "b", "c"])
        batches, _ = store.lease_batches(0, 0, 10, 3, step=0)
        for each in (store, local):
            each.push([TableUpdate("clicks", keys, np.ones((40, sim.DIM), np.float32), **columns)])
            each.shrink("clicks")
        with changing(tmp_path, made, 2) as change:
            change.read()
            change.commit()
            store.report_progress(0, first, 7)
            assert (first, left, store.lease(0, ["a", "b", "c"])[0]) == ("a", 3, "b")
            more, _ = store.lease_batches(0, 0, 10, 3, step=1)
            assert [number for _, number in batches + more] == [0, 1, 2, 3, 4, 5]
            for step in (1, 2):
                for each in (store, local):
                    each.push([TableUpdate("clicks", keys, np.ones((40, sim.DIM), np.float32), **columns)], step=step)
            assert store.shrink("clicks") == local.shrink("clicks") == 20
            rows, expected = (each.pull([PullSpec("clicks", keys)], step=3).rows()[0] for each in (store, local))
            np.testing.assert_array_equal(rows, expected)
            store.leave()
            store.close()


def test_a_save_waits_and_is_one_of_the_new_servers(tmp_path: Path) -> None:
    with servers(2, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        store.push([TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))])
        with changing(tmp_path, made, 3) as change:
            change.wait(HandOverPhase.LOAD)
            saving = threading.Thread(target=store.save, args=(tmp_path / "saved", {}))
            saving.start()
            change.read()
            assert saving.is_alive()
            change.commit()
            saving.join()
            snapshot = open_snapshot(tmp_path / "saved")
            assert (snapshot.manifest.servers, snapshot.manifest.rows) == (3, {"ids": len(sim.EVERY_KEY)})
            store.leave()
            store.close()


def test_a_copy_to_read_follows_the_new_servers(tmp_path: Path) -> None:
    ones = np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32)
    with servers(2, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        store.push([TableUpdate("ids", sim.EVERY_KEY, ones)], step=0)
        with contextlib.closing(ServersReplica(tmp_path)) as replica, changing(tmp_path, made, 3) as change:
            change.read()
            change.commit()
            store.push([TableUpdate("ids", sim.EVERY_KEY, ones)], step=1)
            store.flush()
            for server in ("0", "1"):
                shutil.rmtree(tmp_path / server)
            wait_until(lambda: replica.view().steps == [2])
            view = replica.view()
            assert len(view.parts) == 3
            np.testing.assert_array_equal(view.rows("ids", sim.EVERY_KEY), sim.table_of(store, 2))
            assert find_servers(tmp_path)[2] == tmp_path / "layout-1" / "2"
            store.leave()
            store.close()


def test_a_change_that_is_given_up_leaves_the_servers_as_they_are(tmp_path: Path) -> None:
    with servers(2, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        with changing(tmp_path, made, 3) as change:
            change.wait(HandOverPhase.LOAD)
            store.push([TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))])
            change.hand_over.give_up("no more")
            store.save(tmp_path / "saved", {})
            assert change.hand_over.failure == "no more"
            wait_until(lambda: change.hand_over.is_over)
        assert store.report()["ids"].pushed == len(sim.EVERY_KEY)
        store.leave()
        store.close()


def test_a_new_server_that_does_not_listen_gives_the_change_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_LISTEN_S", 0.2)
    with servers(1, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        with changing(tmp_path, made, 2) as change:
            wait_until(lambda: change.hand_over.is_over)
            assert change.hand_over.failure == "new server 0 did not listen for 0.2 s; read what it printed"
        store.push([], step=0)
        store.leave()
        store.close()


def test_servers_whose_workers_have_left_stay_as_many(tmp_path: Path) -> None:
    with servers(1, tmp_path, RETRY, state=True) as made:
        stores = [connected(made, tmp_path, worker, 2) for worker in range(2)]
        for store in stores:
            store.declare([sim.SPEC])
        # Who has left may still ask, and the servers stay for it.
        stores[0].leave()
        with changing(tmp_path, made, 2) as change:
            change.wait(HandOverPhase.LOAD)
            change.hand_over.give_up("no more")
            wait_until(lambda: change.hand_over.is_over)
        stores[1].leave()
        shutil.rmtree(tmp_path / "layout-1")
        with changing(tmp_path, made, 2) as change:
            wait_until(lambda: change.hand_over.is_over)
            assert "The workers of this job have left" in change.hand_over.failure
        for store in stores:
            store.close()


def _is_stopped(pid: int) -> bool:
    """Return whether no thread of a process runs any more: a signal stops one after the other."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def test_a_server_that_was_frozen_when_a_change_was_given_up_goes_on_when_it_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_ANSWER_S", 0.5)
    with servers(2, tmp_path, RETRY, state=True) as made:
        store = connected(made, tmp_path)
        store.declare([sim.SPEC])
        with changing(tmp_path, made, 3) as change:
            change.wait(HandOverPhase.LOAD)
            os.kill(made[1].pid, signal.SIGSTOP)
            wait_until(lambda: _is_stopped(made[1].pid))
            change.hand_over.give_up("no more")
            time.sleep(2.0)  # its connection is given up
            assert not change.hand_over.is_over
            os.kill(made[1].pid, signal.SIGCONT)
            wait_until(lambda: change.hand_over.is_over)
        store.push([TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))])
        assert store.report()["ids"].pushed == len(sim.EVERY_KEY)
        store.leave()
        store.close()


def test_where_the_job_ends_a_server_that_does_not_answer_is_waited_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_ANSWER_S", 0.5)
    with servers(2, tmp_path, RETRY, state=True) as made, changing(tmp_path, made, 3) as change:
        store = connected(made, tmp_path)
        change.wait(HandOverPhase.LOAD)
        made[1].kill()
        change.hand_over.stop("the job ends")
        wait_until(lambda: change.hand_over.is_over)
        store.close()


def test_workers_that_have_left_or_not_come_yet_hold_no_change_up(tmp_path: Path) -> None:
    with servers(2, tmp_path, RETRY, state=True) as made:
        stores = [connected(made, tmp_path, worker, 2) for worker in range(2)]
        with changing(tmp_path, made, 3) as first:
            first.read()
            first.commit()
            stores[0].declare([sim.SPEC])
            stores[0].push([], step=0)
            stores[0].leave()
            with changing(tmp_path, first.after, 1, number=2) as second:
                second.read()
                second.commit()
                stores[1].declare([sim.SPEC])
                stores[1].push([TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))])
                assert stores[1].report()["ids"].pushed == len(sim.EVERY_KEY)
                stores[1].leave()
                for store in stores:
                    store.close()
                assert second.after[0].end() == 0


def test_what_a_lost_worker_had_sent_and_was_held_back_is_done_on_no_server(tmp_path: Path) -> None:
    update = [TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))]
    with servers(2, tmp_path, RETRY, state=True) as made:
        lost, other = (connected(made, tmp_path, worker, 2) for worker in range(2))
        for store in (lost, other):
            store.declare([sim.SPEC])
        with changing(tmp_path, made, 3) as change:
            change.wait(HandOverPhase.LOAD)
            for store in (lost, other):
                store.push(update, step=0)
            change.hand_over.give_up("worker 0 ended", 0)
            other.flush()
            with pytest.raises(ConfigError, match="whose worker was started again since"):
                lost.flush()
        reports = [connection.call("report", {}).meta for connection in other._connections]
        assert [report["steps"] for report in reports] == [[0, 1], [0, 1]]
        assert other.report()["ids"].pushed == len(sim.EVERY_KEY)
        for store in (lost, other):
            store.close()


def test_in_mode_sync_the_step_under_way_ends_first(tmp_path: Path) -> None:
    with servers(2, tmp_path, RETRY, state=True) as made:
        stores = [connected(made, tmp_path, worker, 2, "sync") for worker in range(2)]
        for store in stores:
            store.declare([sim.SPEC])
        update = [TableUpdate("ids", sim.EVERY_KEY, np.ones((len(sim.EVERY_KEY), sim.DIM), np.float32))]
        stores[0].push(update, step=0)
        stores[0].flush()
        with changing(tmp_path, made, 1) as change:
            time.sleep(0.2)
            assert change.hand_over.phase is HandOverPhase.STOP
            stores[1].push(update, step=0)
            change.read()
            # The next step of both is held back, and done by the new server.
            pushes = [threading.Thread(target=store.push, args=(update,), kwargs={"step": 1}) for store in stores]
            for push in pushes:
                push.start()
            change.commit()
            for push, store in zip(pushes, stores, strict=True):
                push.join()
                store.flush()
            assert stores[0].report()["ids"].pushed == 2 * len(sim.EVERY_KEY)
            rows = [sim.table_of(store, 2) for store in stores]
            np.testing.assert_array_equal(*rows)
            for store in stores:
                store.leave()
                store.close()


def test_servers_that_come_to_no_common_moment_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "PATIENCE_S", 0.1)
    monkeypatch.setattr(hand_over, "_TRY_S", 0.1)
    with servers(2, tmp_path, RETRY, state=True) as made:
        stores = [connected(made, tmp_path, worker, 2, "sync") for worker in range(2)]
        for store in stores:
            store.declare([sim.SPEC])
        stores[0].push([], step=0)
        stores[0].flush()
        with changing(tmp_path, made, 3) as change:
            wait_until(lambda: change.hand_over.failure)
            assert "came to no common moment within 0.1 s: they wait for a push of workers [1]" in (
                change.hand_over.failure
            )
            wait_until(lambda: change.hand_over.is_over)
        stores[1].push([], step=0)
        for store in stores:
            store.leave()
            store.close()

"""Who waits for whom, as counts alone; the gate that lines changes up; leases."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from phalanx.errors import BackendError, ClosedError, ConfigError, PeerLostError, PhalanxError
from phalanx.ps.server.clocks import Clocks, ServerMode, check_worker
from phalanx.ps.server.main import JoinTimeout
from phalanx.ps.server.write_freeze import WriteFreeze
from phalanx.ps.snapshot.moment import LEFT
from phalanx.ps.stores.leases import Leases


class Waiter:
    """A thread in a call that is to wait; `end` says how it came out."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._error = call, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def waits(self) -> bool:
        self._thread.join(0.02)
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except PhalanxError as e:  # handed to the test's thread
            self._error = e


def test_sync_pull_waits_until_its_step_is_applied() -> None:
    clocks = Clocks("sync", 2)
    waiter = Waiter(lambda: clocks.wait(1))
    clocks.push(0)
    assert clocks.complete == 0
    clocks.push(1)
    assert clocks.complete == 1
    assert waiter.waits  # pushed, not in the tables yet
    clocks.apply(1)
    waiter.end()


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("bounded", 1)])
def test_who_waits_is_told_for_whom_and_whether_they_are_there(
    monkeypatch: pytest.MonkeyPatch, mode: ServerMode, bound: int
) -> None:
    monkeypatch.setattr("phalanx.ps.server.clocks.WAIT_REPORT_S", 0.0)
    clocks, told = Clocks(mode, 3, bound), []
    clocks.connect(0)
    clocks.connect(1)
    clocks.push(0)

    def still(waits_for: str, is_here: bool) -> None:
        told.append((waits_for, is_here))
        if len(told) == 1:
            clocks.connect(2)
        elif len(told) == 2:
            clocks.push(2)
        elif len(told) == 3:
            clocks.disconnect(1, now=0.0)
        else:
            clocks.push(1)
            clocks.apply(1)

    clocks.wait(1 + bound, still)
    both, one = "worker 1 (at step 0), worker 2 (at step 0", "worker 1 (at step 0"
    assert told == [
        (f"{both}, not connected)", False),
        (f"{both})", True),
        (f"{one})", True),
        (f"{one}, not connected)", False),
    ]


def test_a_worker_that_leaves_is_waited_for_no_more() -> None:
    clocks = Clocks("sync", 3)
    clocks.push(0)
    clocks.push(1)
    assert clocks.complete == 0
    clocks.leave(2)
    assert clocks.complete == 1
    clocks.leave(0)
    clocks.leave(1)
    assert clocks.live == set()
    assert clocks.complete == 1
    assert clocks.next_step(2) == 0


def test_a_worker_that_joins_again_goes_on_with_the_current_step() -> None:
    clocks = Clocks("sync", 2)
    clocks.leave(1)
    for version in range(1, 4):
        clocks.push(0)
        clocks.apply(version)
    clocks.join(1)
    assert clocks.next_step(1) == 3
    assert clocks.complete == 3


def test_nobody_waits_for_the_steps_that_a_bounded_worker_was_away_for() -> None:
    clocks = Clocks("bounded", 3, bound=1)
    clocks.leave(2)
    for _ in range(5):
        clocks.push(0)
        clocks.push(1)
    clocks.push(1)
    clocks.join(2)
    assert clocks.next_step(2) == 5
    clocks.wait(6)


def test_bounded_pull_waits_for_the_slowest() -> None:
    clocks = Clocks("bounded", 2, bound=2)
    for _ in range(3):
        clocks.push(0)
    clocks.wait(2)
    waiter = Waiter(lambda: clocks.wait(3))
    assert waiter.waits
    clocks.push(1)
    waiter.end()


def test_async_waits_for_nobody() -> None:
    clocks = Clocks("async", 2)
    clocks.wait(1000)


def test_a_lost_worker_ends_every_wait_by_name() -> None:
    clocks = Clocks("sync", 2)
    clocks.push(0)
    waiter = Waiter(lambda: clocks.wait(1))
    clocks.disconnect(1, now=100.0)
    assert clocks.expire(now=100.5, grace_s=1.0) == []
    assert waiter.waits
    assert clocks.expire(now=101.0, grace_s=1.0) == [1]
    with pytest.raises(PeerLostError, match=r"lost worker 1 \(at step 0\).*without a `leave`"):
        waiter.end()
    with pytest.raises(PeerLostError, match="worker 1"):
        clocks.check()


def test_a_worker_that_connects_again_is_not_lost() -> None:
    clocks = Clocks("sync", 2)
    clocks.disconnect(1, now=100.0)
    clocks.connect(1)
    assert clocks.expire(now=200.0, grace_s=1.0) == []
    clocks.leave(0)
    clocks.disconnect(0, now=100.0)
    assert clocks.expire(now=200.0, grace_s=1.0) == []


def test_workers_that_never_came_are_lost_some_time_after_the_last_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("phalanx.ps.server.main.time.monotonic", lambda: now)
    absence, clocks = JoinTimeout(60.0), Clocks("sync", 3)
    now = 150.0
    assert not absence.check(None)
    clocks.connect(0)
    assert not absence.check(clocks)
    waiter = Waiter(lambda: clocks.wait(1))
    now = 205.0
    clocks.connect(2)
    assert not absence.check(clocks)
    now = 264.0
    assert not absence.check(clocks)
    assert waiter.waits
    now = 265.0
    assert absence.check(clocks)
    with pytest.raises(PeerLostError, match=r"and worker 1 did not come in the 60 s since"):
        waiter.end()


def test_a_server_to_which_nobody_comes_ends_and_one_that_all_came_to_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("phalanx.ps.server.main.time.monotonic", lambda: now)
    absence, clocks = JoinTimeout(60.0), Clocks("async", 1)
    clocks.connect(0)
    assert not absence.check(clocks)
    now = 1e6
    assert not absence.check(clocks)
    clocks.disconnect(0, now)  # `expire` is about that
    assert not absence.check(clocks)
    assert not absence.check(None)
    now += 60.0
    with pytest.raises(PeerLostError, match="No worker came"):
        absence.check(None)


def test_stop_ends_waits() -> None:
    clocks = Clocks("sync", 1)
    waiter = Waiter(lambda: clocks.wait(1))
    clocks.stop()
    with pytest.raises(ClosedError, match="stopping"):
        waiter.end()


def test_clocks_come_back_from_json_without_the_open_step() -> None:
    clocks = Clocks("sync", 3)
    clocks.leave(2)
    clocks.push(0)
    clocks.push(1)
    clocks.apply(1)
    clocks.push(0)
    again = Clocks.from_json(clocks.to_json())
    assert again.next_step(0) == 1
    assert again.version == 1
    assert again.live == {0, 1}


@pytest.mark.parametrize("worker", [2, -1, "0"])
def test_a_worker_of_another_job_is_refused(worker: object) -> None:
    with pytest.raises(ConfigError, match="workers 0 to 1"):
        check_worker(worker, 2)


# --- the gate --------------------------------------------------------------------------------------------------------


def test_a_freeze_holds_changes_until_it_is_let_go() -> None:
    gate = WriteFreeze()
    gate.freeze("a", seconds=60)

    def change() -> None:
        with gate.change():
            pass

    waiter = Waiter(change)
    assert waiter.waits
    with gate.while_frozen("a"):
        pass
    gate.resume("a")
    waiter.end()


def test_a_change_that_a_freeze_holds_back_is_told_for_whom_it_waits() -> None:
    gate, told, is_told = WriteFreeze(report_s=0.01), list[tuple[str, bool]](), threading.Event()
    gate.freeze("a", 60, holder="worker 1, which begins a snapshot")

    def report(waits_for: str, is_connected: bool) -> None:
        told.append((waits_for, is_connected))
        if len(told) == 2:
            is_told.set()

    waiter = Waiter(lambda: gate.change(0, 3, report).__enter__())
    assert is_told.wait(10)
    gate.resume("a")
    waiter.end()
    assert set(told) == {("worker 1, which begins a snapshot", True)}


def test_a_freeze_lets_through_what_other_servers_have_already() -> None:
    gate = WriteFreeze()
    gate.freeze("a", 60, steps=[3, LEFT])
    with gate.change(0, 2):
        pass
    with gate.change(1, LEFT - 1):
        pass
    waiter = Waiter(lambda: gate.change(0, 3).__enter__())
    assert waiter.waits
    gate.resume("a")
    waiter.end()


def test_a_freeze_ends_at_its_deadline() -> None:
    now = [0.0]
    gate = WriteFreeze(clock=lambda: now[0])
    gate.freeze("a", seconds=10)
    now[0] = 10.0
    with gate.change():
        pass
    with pytest.raises(BackendError, match=r"moment of snapshot a is over.*Save again"), gate.while_frozen("a"):
        pass


def test_two_snapshots_at_once_are_refused() -> None:
    gate = WriteFreeze()
    gate.freeze("a", 60)
    with pytest.raises(ConfigError, match="while snapshot a begins"):
        gate.freeze("b", 60)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_files_are_leased_once_and_those_of_a_dead_worker_again() -> None:
    leases = Leases()
    files = ["a", "b", "c"]
    assert leases.lease(0, 0, files)["file"] == "a"
    assert leases.lease(1, 0, files)["file"] == "b"
    leases.record_progress(0, "a", 100, end=True)
    leases.record_progress(0, "b", 40, end=False)
    assert leases.lease(0, 0, files)["file"] == "c"
    assert leases.lease(0, 0, files) == {"file": None, "offset": 0, "left": 2}
    leases.release(1)
    assert leases.lease(0, 0, files) == {"file": "b", "offset": 40, "left": 2}


def test_leases_come_back_from_json() -> None:
    leases = Leases()
    leases.lease(0, 3, ["a", "b"])
    leases.record_progress(3, "a", 7, end=False)
    same, fresh = Leases(), Leases()
    same.restore(leases.to_json(), holders=True)
    fresh.restore(leases.to_json(), holders=False)
    assert same.lease(1, 3, ["a", "b"])["file"] == "b"
    assert fresh.lease(1, 3, ["a", "b"]) == {"file": "a", "offset": 7, "left": 2}


def test_workers_must_mean_the_same_files() -> None:
    leases = Leases()
    leases.lease(0, 0, ["a", "b"])
    leases.check(0, ["a", "b"])
    with pytest.raises(ConfigError, match="'c' is in one of them only"):
        leases.check(0, ["a", "b", "c"])
    with pytest.raises(ConfigError, match="another order"):
        leases.check(0, ["b", "a"])
    with pytest.raises(ConfigError, match="does not hold"):
        leases.check_progress(1, 0, "a", 1)

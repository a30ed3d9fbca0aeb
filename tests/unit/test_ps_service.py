"""What a server answers, mode by mode, without sockets."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import BackendError, ClosedError, ConfigError, PeerLostError
from phalanx.ps.server.log import Log
from phalanx.ps.server.main import JoinTimeout, watch
from phalanx.ps.server.service import Service
from phalanx.ps.server.status import StatusFile
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.rules import TableSpec
from phalanx.ps.table.update_rules import SGD, Adagrad
from phalanx.ps.wire.data_frame import DataStatus
from ps_requests import APPLIED, NEED_KEYS, SPEC, Answer, FakeWorker, disk_that_cannot_sync, gradient, keys


def started(mode: str, workers: int, bound: int = 0) -> list[FakeWorker]:
    service = Service()
    fakes = [FakeWorker(service, worker) for worker in range(workers)]
    for fake in fakes:
        fake.declare(mode=mode, workers=workers, bound=bound)
    return fakes


def rows(worker: FakeWorker, *ids: int, step: int = 0) -> list[float]:
    return worker.pull(*ids, step=step).rows[0][:, 0].tolist()


def test_async_applies_each_push_on_arrival() -> None:
    (worker,) = started("async", 1)
    assert worker.push(gradient((1, 2), 1.0), step=0) == APPLIED
    assert rows(worker, 1, 2, 3, step=1) == [-1.0, -1.0, 0.0]
    worker.push(gradient((2,), 1.0, lr=0.5), step=1)
    assert rows(worker, 2, step=2) == [-1.5]
    report = worker.call("report", {}).meta
    assert report["tables"]["items"]["rows"] == 2
    assert report["tables"]["items"]["pushed"] == 3
    assert report["steps"] == [2]


def test_a_push_that_comes_again_is_answered_and_not_applied() -> None:
    (worker,) = started("async", 1)
    first = worker.push(gradient((1,), 1.0), step=0)
    assert worker.push(gradient((1,), 1.0), step=0, seq=worker.seq) == first
    # The same step under another number, as from a worker that was started again.
    assert worker.push(gradient((1,), 1.0), step=0) == Answer(DataStatus.AGAIN, 0, 0, [])
    assert rows(worker, 1, step=1) == [-1.0]


def test_a_push_of_a_process_that_was_replaced_while_it_waited_is_refused() -> None:
    one, two = started("sync", 2)
    again = FakeWorker(two.service, 1, client=900)
    two.push(gradient((1,), 1.0), step=0)
    errors: list[ConfigError] = []

    def push_the_next_step() -> None:
        try:
            two.push(gradient((1,), 1.0), step=1)
        except ConfigError as e:  # handed to the test's thread
            errors.append(e)

    waiting = threading.Thread(target=push_the_next_step)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    again.declare(mode="sync", workers=2)
    one.push(gradient((1,), 1.0), step=0)
    waiting.join(10)
    (error,) = errors
    assert "whose worker was started again since. A worker declares its tables first; end the older" in str(error)
    for worker in (one, again):
        worker.push(gradient((1,), 1.0), step=1)
    assert rows(one, 1, step=2) == [-2.0]
    assert not one.service.stopped.is_set()


def test_a_server_whose_disk_failed_answers_that_and_ends(tmp_path: Path) -> None:
    (worker,) = started("async", 1)
    service = worker.service
    service.log = Log(tmp_path, "disk")
    failed = r"could not be flushed to disk: .*Replace the disk"
    with disk_that_cannot_sync(tmp_path), pytest.raises(BackendError, match=failed):
        worker.push(gradient((1,), 1.0), step=0)
    with pytest.raises(ClosedError, match="is stopping"):
        worker.push(gradient((1,), 1.0), step=1)
    with pytest.raises(BackendError, match="could not be flushed to disk"):
        watch(service, None, 0.0, None, JoinTimeout(math.inf), StatusFile(service, None))


def test_a_step_that_was_skipped_is_an_error() -> None:
    (worker,) = started("async", 1)
    with pytest.raises(ConfigError, match="Worker 0 pushes step 1, but its step 0 did not come"):
        worker.push(gradient((1,), 1.0), step=1)


def test_sync_averages_by_weight_and_applies_once() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1, 2), 1.0), step=0, weight=3)
    assert rows(one, 1, step=0) == [0.0]
    two.push(gradient((2, 3), 1.0), step=0, weight=1)
    assert rows(one, 1, 2, 3, step=1) == [-0.75, -1.0, -0.25]


def test_sync_pull_is_answered_when_the_step_is_complete() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1,), 1.0), step=0)
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.extend(rows(one, 1, step=1)))
    thread.start()
    two.push(step=0)
    thread.join(10)
    assert got == [-0.5]


def test_sync_rows_asked_with_a_push_come_when_the_step_is_complete() -> None:
    one, two = started("sync", 2)
    got: list[float] = []

    def push_and_read(step: int = 0, table: str = "items") -> Answer:
        return one.push(gradient((1,), 1.0), step=step, then=[(table, keys(1, 2))], seq=2 + step)

    thread = threading.Thread(target=lambda: got.extend(push_and_read().rows[0][:, 0]))
    thread.start()
    two.push(gradient((2,), 1.0), step=0)
    thread.join(10)
    assert got == [-0.5, -0.5]
    again = push_and_read()
    assert (again.status, again.dropped, again.rows[0][:, 0].tolist()) == (DataStatus.DONE, 0, got)
    assert one.service.state.require_clocks().steps == [1, 1]
    with pytest.raises(ConfigError, match="no table with the salt"):
        push_and_read(step=1, table="nothing")
    assert one.service.state.require_clocks().steps == [1, 1]


def test_sync_does_not_depend_on_the_order_of_arrival() -> None:
    def final(order: list[int]) -> bytes:
        fakes = started("sync", 3)
        values = [0.1, 0.7, 1e-8]
        for step in range(3):
            for worker in order:
                fakes[worker].push(gradient((7,), values[worker]), step=step, weight=worker + 1)
        return fakes[0].pull(7, step=3).rows[0].tobytes()

    assert final([0, 1, 2]) == final([2, 0, 1]) == final([1, 2, 0])


def test_a_worker_out_of_data_leaves_and_the_others_go_on() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1,), 1.0), step=0)
    two.call("leave", {})
    assert rows(one, 1, step=1) == [-1.0]
    one.push(gradient((1,), 1.0), step=1)
    assert rows(one, 1, step=2) == [-2.0]


def test_a_batch_without_rows_touches_nothing() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1,), 1.0), step=0, weight=4)
    two.push(gradient((2,), float("nan")), step=0, weight=0)
    assert rows(one, 1, 2, step=1) == [-1.0, 0.0]


def test_first_values_in_sync_are_one_push_of_everybody() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1, 2), 5.0, kind="assign"), step=0)
    two.push(step=0)
    assert rows(two, 1, 2, step=1) == [5.0, 5.0]


def test_deltas_are_added() -> None:
    (worker,) = started("async", 1)
    worker.push(gradient((1,), 2.0, kind="delta"), step=0)
    assert rows(worker, 1, step=1) == [2.0]


def test_a_push_names_its_pull_instead_of_keys() -> None:
    (worker,) = started("async", 1)
    pulled = worker.pull(4, 5, keep=True)
    assert worker.push_pulled(pulled.number, 1.0, 2) == APPLIED
    assert rows(worker, 4, 5, step=1) == [-1.0, -1.0]
    # The push freed the keys; the next push of that pull has to bring them.
    assert worker.push_pulled(pulled.number, 1.0, 2, step=1) == NEED_KEYS


def test_pushes_behind_one_that_needs_keys_wait_for_it() -> None:
    (worker,) = started("sync", 1)
    assert worker.push_pulled(1, 1.0, 1, step=0, seq=10) == NEED_KEYS
    assert worker.push(gradient((2,), 1.0), step=1, seq=12) == NEED_KEYS
    assert worker.pull(1, step=2) == Answer(DataStatus.NEED_PUSH, 0, 0, [])
    worker.push(gradient((1,), 1.0), step=0, seq=10)
    worker.push(gradient((2,), 1.0), step=1, seq=12)
    assert rows(worker, 1, 2, step=2) == [-1.0, -1.0]


def test_kept_pulls_are_bounded() -> None:
    (worker,) = started("async", 1)
    first = worker.pull(1, keep=True).number
    for _ in range(16):
        worker.pull(1, keep=True)
    assert worker.push_pulled(first, 1.0, 1) == NEED_KEYS


def test_a_lost_worker_is_named_to_the_others() -> None:
    one, two = started("sync", 2)
    service = one.service
    service.connected(two.client)
    service.connected(two.client)  # connected again before the old connection's end was seen
    service.disconnected(two.client)
    assert service.state.clocks is not None
    assert service.state.clocks.expire(1e18, 1.0) == []
    service.disconnected(two.client)
    assert service.state.clocks.expire(1e18, 1.0) == [1]
    with pytest.raises(PeerLostError, match="lost worker 1"):
        one.push(gradient((1,), 1.0), step=0)


def test_a_worker_started_again_takes_its_own_place() -> None:
    one, two = started("sync", 2)
    one.push(gradient((1,), 1.0), step=0)
    again = FakeWorker(one.service, 0, client=999)
    assert again.declare(mode="sync", workers=2)["step"] == 1
    with pytest.raises(ConfigError, match="started again since"):
        one.push(gradient((1,), 1.0), step=1)
    two.push(gradient((1,), 1.0), step=0)
    assert rows(again, 1, step=1) == [-1.0]


def test_tables_of_one_name_must_agree_field_by_field() -> None:
    (worker,) = started("async", 1)
    with pytest.raises(ConfigError, match=r"'items'.*dim=2.*dim=4"):
        worker.declare(TableSpec(name="items", dim=4, rule=SGD(lr=1.0)))
    with pytest.raises(ConfigError, match=r"rule=SGD.*rule=Adagrad"):
        worker.declare(TableSpec(name="items", dim=2, rule=Adagrad(lr=1.0), init=SPEC.init))


def test_workers_must_agree_on_the_mode() -> None:
    service = Service()
    FakeWorker(service, 0).declare(mode="sync", workers=2)
    with pytest.raises(ConfigError, match=r"asks for mode='async'.*run with mode='sync'"):
        FakeWorker(service, 1).declare(mode="async", workers=2)
    with pytest.raises(ConfigError, match=r"asks for workers=3.*run with workers=2"):
        FakeWorker(service, 1).declare(mode="sync", workers=3)
    with pytest.raises(ConfigError, match="modes: sync, async, bounded"):
        FakeWorker(Service(), 0).declare(mode="geo")


def test_bad_requests_change_nothing() -> None:
    (worker,) = started("async", 1)
    with pytest.raises(ConfigError, match=r"no table with the salt \d+; tables: \['items'\]. Declare it"):
        worker.push(gradient((1,), 1.0, table="item"), step=0)
    with pytest.raises(ConfigError, match="no table with the salt"):
        worker.pull(1, table="other")
    with pytest.raises(ConfigError, match="weight nan"):
        worker.push(gradient((1,), 1.0), step=0, weight=float("nan"))
    with pytest.raises(ConfigError, match=r"rows of type float32 and shape \(1, 3\) for 1 keys.*shape \(1, 2\)"):
        worker.push(TableUpdate("items", keys(1), np.ones((1, 3), np.float32)), step=0)
    with pytest.raises(ConfigError, match="'shrink' is malformed"):
        worker.call("shrink", {})
    with pytest.raises(ConfigError, match=r"no operation 'shrin'\. Did you mean 'shrink'"):
        worker.call("shrin", {})
    with pytest.raises(ConfigError, match="declared no tables here"):
        FakeWorker(worker.service, 1).push(step=0)
    assert worker.call("report", {}).meta["steps"] == [0]
    worker.push(gradient((1,), 1.0), step=0)


def test_leases_go_through_the_service() -> None:
    one, two = started("async", 2)
    ask = {"epoch": 0, "files": ["a", "b"]}
    assert one.call("lease", ask).meta["file"] == "a"
    assert two.call("lease", ask).meta["file"] == "b"
    two.call("leave", {})
    one.call("done", {"epoch": 0, "file": "a", "offset": 10})
    assert one.call("lease", ask).meta["file"] == "b"
    with pytest.raises(ConfigError, match="does not hold"):
        one.call("done", {"epoch": 0, "file": "z", "offset": 1})
    for op, wrong in (
        ("lease", {"epoch": [], "files": ["a"]}),
        ("lease", {"epoch": 1, "files": 7}),
        ("lease", {"epoch": 1, "files": [{}]}),
        ("done", {"epoch": 0, "file": "b", "offset": "end"}),
        ("done", {"epoch": 0, "file": "b"}),
    ):
        with pytest.raises(ConfigError, match=r"of a lease must be|is malformed"):
            one.call(op, wrong)
    assert one.call("done", {"epoch": 0, "file": "b", "offset": 1}).meta == {}, "the server continues"


def test_bounded_lets_a_worker_run_ahead_by_the_bound() -> None:
    one, two = started("bounded", 2, bound=1)
    one.push(gradient((1,), 1.0), step=0)
    assert rows(one, 1, step=1) == [-1.0]
    one.push(gradient((1,), 1.0), step=1)
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.extend(rows(one, 1, step=2)))
    thread.start()
    two.push(gradient((1,), 1.0), step=0)
    thread.join(10)
    assert got == [-3.0]


def test_a_pull_may_name_a_table_twice() -> None:
    (worker,) = started("async", 1)
    worker.push(gradient((1,), 1.0), step=0)
    reply = worker.pull_all([("items", keys(1)), ("items", keys(2, 1))], step=1, keep=True)
    assert [a[:, 0].tolist() for a in reply.rows] == [[-1.0], [0.0, -1.0]]
    assert reply.number == 0


def test_pulls_do_not_make_rows() -> None:
    (worker,) = started("async", 1)
    np.testing.assert_array_equal(worker.pull(1, 2).rows[0], 0)
    assert worker.call("report", {}).meta["tables"]["items"]["rows"] == 0


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_worker_that_trains_nothing_goes_along_with_any_mode(comes_first: bool) -> None:
    service = Service()
    idle, busy = FakeWorker(service, 0), FakeWorker(service, 1)
    for worker in (idle, busy) if comes_first else (busy, idle):
        if worker is busy:
            busy.declare(mode="sync", workers=2)
        else:
            meta = {"specs": [], "mode": None, "bound": 0, "workers": 2, "worker": 0}
            idle.call("declare", meta)
            idle.call("leave", {})
    busy.push(gradient((1,), 2.0))
    assert rows(busy, 1, step=1) == [-2.0]
    assert service.state.clocks is not None
    assert (service.state.clocks.mode, service.state.clocks.live) == ("sync", {1})


def fence(service: Service, worker: int, client: int) -> tuple[FakeWorker, int]:
    """Return who speaks for a lost worker from now on, and the pushes that the service has of it."""
    proxy = FakeWorker(service, worker, client=client)
    return proxy, proxy.call("fence", {"worker": worker, "workers": 2}).meta["pushes"]


@pytest.mark.parametrize(("counts", "row"), [(1, -2.0), (0, -1.0)])
def test_the_open_step_waits_until_it_is_known_whether_a_lost_workers_push_counts(counts: int, row: float) -> None:
    one, two = started("sync", 2)
    two.push(gradient((1,), 3.0), step=0)
    assert fence(one.service, 1, 900)[1] == 1
    with pytest.raises(ConfigError, match="whose worker was started again since"):
        two.push(gradient((1,), 3.0), step=1)
    one.push(gradient((1,), 1.0), step=0)
    clocks = one.service.state.require_clocks()
    assert clocks.version == 0
    # Whoever asks anew, for the answer was lost, is told the same.
    proxy, pushes = fence(one.service, 1, 901)
    assert (pushes, clocks.version) == (1, 0)
    assert proxy.call("leave", {"pushes": counts}).meta == {"pushes": counts}
    assert (rows(one, 1, step=1), clocks.version, clocks.live) == ([row], 1, {0})
    assert fence(one.service, 1, 902)[0].call("leave", {"pushes": 0}).meta == {"pushes": counts}


def test_a_push_that_is_in_the_tables_stays_there_and_a_worker_unknown_so_far_may_be_signed_off() -> None:
    one, _ = started("async", 2)
    one.push(gradient((1,), 1.0), step=0)
    assert fence(one.service, 0, 900)[0].call("leave", {"pushes": 0}).meta == {"pushes": 1}
    assert fence(Service(), 1, 900)[0].call("leave", {"pushes": 0}).meta == {"pushes": 0}

"""The log: what is answered is there after a crash, what was cut off is not, and damage is found."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import BackendError, ConfigError, DataError
from phalanx.ps.server.log import Log, replay, segments
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.snapshot.records import pack, read_records
from ps_requests import NEED_KEYS, FakeWorker, disk_that_cannot_sync, gradient


def numbers(directory: Path, first: int = 0) -> list[int]:
    return [record.meta["n"] for record in replay(directory, first)]


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_records_come_back_in_order_over_segments(tmp_path: Path, durability: str) -> None:
    log = Log(tmp_path, durability)  # type: ignore[arg-type]
    arrays = [np.arange(3, dtype=np.int64), np.empty((0, 4), np.float32), np.float32([[1, 2]])]
    for n in range(3):
        log.sync(log.append({"n": n}, arrays))
    second = log.rotate()
    log.sync(log.append({"n": 3}, []))
    log.close()
    assert numbers(tmp_path) == [0, 1, 2, 3]
    assert numbers(tmp_path, second) == [3]
    (first, *_) = replay(tmp_path, 0)
    for found, given in zip(first.arrays, arrays, strict=True):
        np.testing.assert_array_equal(found, given)
        assert found.dtype == given.dtype


def test_forget_deletes_what_a_base_holds(tmp_path: Path) -> None:
    log = Log(tmp_path, "process")
    log.append({"n": 0}, [])
    second = log.rotate()
    log.append({"n": 1}, [])
    log.forget(second)
    assert numbers(tmp_path) == [1]
    assert log.bytes == sum(path.stat().st_size for path in segments(tmp_path).values())
    log.close()


def test_many_threads_share_an_fsync(tmp_path: Path) -> None:
    log = Log(tmp_path, "disk")
    positions = [log.append({"n": n}, []) for n in range(10)]
    before = log.native.syncs
    for position in positions:
        log.sync(position)
    assert log.native.syncs == before + 1
    log.close()


def test_an_fsync_that_fails_is_never_taken_back(tmp_path: Path) -> None:
    log = Log(tmp_path, "disk")
    position = log.append({"n": 0}, [])
    with disk_that_cannot_sync(tmp_path), pytest.raises(BackendError, match=r"could not be flushed.*Replace the disk"):
        log.sync(position)
    with pytest.raises(BackendError, match="could not be flushed"):
        log.sync(position)


def test_an_fsync_that_fails_at_the_end_of_a_segment_is_not_taken_back_either(tmp_path: Path) -> None:
    log = Log(tmp_path, "disk")
    position = log.append({"n": 0}, [])
    with disk_that_cannot_sync(tmp_path), pytest.raises(BackendError, match="could not be flushed"):
        log.rotate()
    with pytest.raises(BackendError, match="could not be flushed"):
        log.sync(position)


@pytest.mark.parametrize("left", [1, 27, 28, 40])
def test_a_record_cut_off_at_the_end_is_removed_and_said(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    log = Log(tmp_path, "process")
    log.append({"n": 0}, [])
    whole = log.append({"n": 1}, [np.zeros(100, np.float32)])
    log.close()
    (path,) = segments(tmp_path).values()
    (first, _) = read_records(path)
    os.truncate(path, first.end + left)
    assert numbers(tmp_path) == [0]
    assert f"ends inside the record that begins at byte {first.end}" in caplog.text
    assert path.stat().st_size == first.end < whole
    assert numbers(tmp_path) == [0]


def test_damage_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    log = Log(tmp_path, "process")
    for n in range(3):
        log.append({"n": n}, [np.zeros(10, np.float32)])
    log.close()
    (path,) = segments(tmp_path).values()
    data = bytearray(path.read_bytes())
    second = next(r.end for r in read_records(path))
    data[second + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path} is broken at byte {second}: its checksum"):
        numbers(tmp_path)
    data[second + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path} is broken at byte {second}: there is no record's header"):
        numbers(tmp_path)


def test_a_torn_segment_before_the_last_is_damage(tmp_path: Path) -> None:
    log = Log(tmp_path, "process")
    log.append({"n": 0}, [])
    log.rotate()
    log.close()
    path = next(iter(segments(tmp_path).values()))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataError, match="ends inside the record"):
        numbers(tmp_path)


@contextmanager
def small_files() -> Iterator[None]:
    """Files of this process cannot grow beyond 4 KiB, as on a full disk.

    Not a fixture: pytest writes its dots before it ends one, and its output may be a longer file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_the_record_and_keeps_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path, "process")
    log.append({"n": 0}, [])
    full = rf"log in {tmp_path}, which has \d+ bytes free: File too large.*push again"
    with small_files(), pytest.raises(BackendError, match=full):
        log.append({"n": 1}, [np.zeros(10_000, np.float32)])
    log.append({"n": 2}, [])
    log.close()
    assert numbers(tmp_path) == [0, 2]


# --- a service with a log ---------------------------------------------------------------------------------------------


def served(directory: Path, workers: int = 1, mode: str = "async") -> tuple[Service, list[FakeWorker]]:
    """Return a service as a restart finds it, and its workers, which number their requests on."""
    service = Service()
    recovery = Recovery(service, SnapshotService(service), directory)
    recovery.recover("a job")
    fakes = [FakeWorker(service, worker) for worker in range(workers)]
    if service.state.clocks is None:
        for fake in fakes:
            fake.declare(mode=mode, workers=workers)
    else:
        for fake in fakes:
            known = service.state.clients.get(fake.client)
            fake.seq = known.last if known else 0
    return service, fakes


def test_a_restart_has_every_answered_push_once(tmp_path: Path) -> None:
    _, (worker,) = served(tmp_path)
    worker.push(gradient((1, 2), 1.0), step=0)
    pulled = worker.pull(2, 3, step=1, keep=True)
    first = worker.push_pulled(pulled.number, 1.0, 2, step=1)
    _, (again,) = served(tmp_path)
    assert again.pull(1, 2, 3, step=2).rows[0][:, 0].tolist() == [-1.0, -2.0, -1.0]
    # What was answered but not heard comes again with its number.
    assert again.push_pulled(pulled.number, 1.0, 2, step=1, seq=worker.seq) == first
    assert again.pull(1, 2, 3, step=2).rows[0][:, 0].tolist() == [-1.0, -2.0, -1.0]
    # Pulls before the restart are forgotten: their keys are asked for.
    assert again.push_pulled(pulled.number, 1.0, 2, step=2) == NEED_KEYS
    assert again.call("report", {}).meta["tables"]["items"]["pushed"] == 4


def test_a_restart_has_the_rows_for_which_there_would_be_no_room_now(tmp_path: Path) -> None:
    _, (worker,) = served(tmp_path)
    worker.push(gradient((1, 2), 1.0), step=0)
    service = Service()
    service.budget = 1
    Recovery(service, SnapshotService(service), tmp_path).recover("a job")
    assert service.state.tables.tables["items"].rows == 2


def test_a_restart_has_the_pushes_of_the_open_step(tmp_path: Path) -> None:
    _, (one, _) = served(tmp_path, 2, "sync")
    one.push(gradient((1,), 1.0), step=0, weight=3)
    _, (one, two) = served(tmp_path, 2, "sync")
    two.push(gradient((1,), 5.0), step=0, weight=1)
    assert one.pull(1, step=1).rows[0][0, 0] == -2.0


def test_pushes_of_the_open_step_outlive_their_process_and_leave_its_answers_alone(tmp_path: Path) -> None:
    service = Service()
    recovery = Recovery(service, SnapshotService(service), tmp_path)
    recovery.recover("a job")
    one, two = FakeWorker(service, 0), FakeWorker(service, 1)
    for worker in (one, two):
        worker.declare(mode="sync", workers=2)
    one.push(gradient((1,), 1.0), step=0)
    anew = FakeWorker(service, 0, client=7)
    anew.declare(mode="sync", workers=2)
    leased = anew.call("lease", {"epoch": 0, "files": ["a", "b"]}).meta
    # The base has the state, and the log behind it the pushes that are in no table.
    recovery.write_base()
    service = Service()
    Recovery(service, SnapshotService(service), tmp_path).recover("a job")
    anew.service = two.service = service
    assert anew.call("lease", {"epoch": 0, "files": ["a", "b"]}, seq=anew.seq).meta == leased
    two.push(gradient((1,), 5.0), step=0)
    assert anew.pull(1, step=1).rows[0][0, 0] == -3.0


def test_a_restart_has_what_was_withheld_and_dropped_of_a_lost_worker(tmp_path: Path) -> None:
    service, (one, two) = served(tmp_path, 2, "sync")
    two.push(gradient((1,), 5.0), step=0)
    proxy = FakeWorker(service, 1, client=900)
    assert proxy.call("fence", {"worker": 1, "workers": 2}).meta == {"pushes": 1, "first": 0}
    service, (one, _) = served(tmp_path, 2, "sync")
    one.push(gradient((1,), 1.0), step=0)
    assert service.state.require_clocks().version == 0
    proxy.service = service
    assert proxy.call("leave", {"pushes": 0}).meta == {"pushes": 0}
    for again in (service, served(tmp_path, 2, "sync")[0]):
        one.service = again
        assert one.pull(1, step=1).rows[0][0, 0] == -1.0


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(("counts", "row"), [(0, -1.0), (1, -3.0)])
def test_a_push_stays_withheld_where_the_log_is_rotated_before_it_is_settled(
    tmp_path: Path, counts: int, row: float, is_finished: bool
) -> None:
    service = Service()
    recovery = Recovery(service, SnapshotService(service), tmp_path)
    recovery.recover("a job")
    one, two = FakeWorker(service, 0), FakeWorker(service, 1)
    for worker in (one, two):
        worker.declare(mode="sync", workers=2)
    two.push(gradient((1,), 5.0), step=0)
    proxy = FakeWorker(service, 1, client=900)
    proxy.call("fence", {"worker": 1, "workers": 2})
    if is_finished:
        recovery.write_base()
    else:  # the log has the push twice: a server that ends now starts from the base before
        recovery._begin()
    assert proxy.call("leave", {"pushes": counts}).meta == {"pushes": counts}
    service = Service()
    Recovery(service, SnapshotService(service), tmp_path).recover("a job")
    one.service = service
    one.push(gradient((1,), 1.0), step=0)
    assert service.state.require_clocks().next_step(1) == counts
    assert one.pull(1, step=1).rows[0][0, 0] == row


def test_a_process_that_comes_drops_what_is_withheld_of_the_one_before(tmp_path: Path) -> None:
    service, (one, two) = served(tmp_path, 2, "sync")
    two.push(gradient((1,), 5.0), step=0)
    FakeWorker(service, 1, client=900).call("fence", {"worker": 1, "workers": 2})  # and the attempt ends
    service, (one, _) = served(tmp_path, 2, "sync")
    anew = FakeWorker(service, 1, client=901)
    anew.declare(mode="sync", workers=2)
    one.push(gradient((1,), 1.0), step=0)
    anew.push(gradient((1,), 2.0), step=0)
    assert one.pull(1, step=1).rows[0][0, 0] == -1.5


def test_a_restart_has_leaves_shrinks_and_leases(tmp_path: Path) -> None:
    _, (one, two) = served(tmp_path, 2)
    two.call("leave", {})
    one.call("lease", {"epoch": 0, "files": ["a", "b"]})
    one.call("done", {"epoch": 0, "file": "a", "offset": 9, "end": False})
    assert one.call("shrink", {"table": "items"}).meta == {"rows": 0}
    service, (one, two) = served(tmp_path, 2)
    assert service.state.clocks is not None
    assert service.state.clocks.live == {0}
    # Worker 0 started anew: what it held is free again, from where it had come to.
    anew = FakeWorker(service, 0, client=7)
    anew.declare(workers=2)
    assert anew.call("lease", {"epoch": 0, "files": ["a", "b"]}).meta["offset"] == 9


def test_a_full_disk_refuses_the_push_and_training_goes_on_after(tmp_path: Path) -> None:
    service, (worker,) = served(tmp_path)
    many = tuple(range(1000))
    with small_files(), pytest.raises(BackendError, match="make room there and push again"):
        worker.push(gradient(many, 1.0), step=0)
    assert worker.pull(1, step=0).rows[0][0, 0] == 0
    worker.push(gradient(many, 1.0), step=0)
    assert worker.pull(1, step=1).rows[0][0, 0] == -1
    assert service.state.clocks is not None
    _, (again,) = served(tmp_path)
    assert again.pull(1, step=1).rows[0][0, 0] == -1


def test_the_state_of_another_job_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    _, (worker,) = served(tmp_path / "0")
    worker.push(gradient((1,), 1.0), step=0)
    service = Service()
    assert not Recovery(service, SnapshotService(service), tmp_path / "0").recover("another job")
    assert service.state.clocks is None
    assert "state of another job; it is now in" in caplog.text
    assert (tmp_path / "0.previous" / "job").read_text() == "a job"


def test_a_refused_request_is_not_in_the_log(tmp_path: Path) -> None:
    _, (worker,) = served(tmp_path)
    with pytest.raises(ConfigError):
        worker.push(gradient((1,), 1.0, lr=-1.0), step=0)
    with pytest.raises(ConfigError):
        worker.call("shrink", {"table": "other"})
    assert [r.meta["op"] for r in replay(tmp_path, 0)] == ["declare"]


def test_a_record_is_its_header_json_and_arrays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(pack({"a": 1}, [np.arange(2, dtype=np.uint32)])) * 2)
    assert [(r.meta, r.arrays[0].tolist()) for r in read_records(path)] == [({"a": 1}, [0, 1])] * 2
    assert list(read_records(path, lambda meta: False)) == []

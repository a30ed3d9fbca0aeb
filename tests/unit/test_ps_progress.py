"""How far a long work of a server is, in words, and how long a client asks for a server that is away."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ClosedError, DataError, InternalError
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.snapshot.save import save
from phalanx.ps.wire import progress as progress_module
from phalanx.ps.wire.client.dial import Patience
from phalanx.ps.wire.message import RpcReply, RpcRequest
from phalanx.ps.wire.progress import Startup, WorkProgress, WorkReporter
from ps_requests import SPEC, FakeWorker, gradient


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    return clock


def test_progress_says_its_share_its_time_and_what_is_left(now: list[float]) -> None:
    progress = WorkProgress("recovers")
    now[0] += 2
    assert progress.describe() == "recovers: after 2 s"
    progress.expect(68_000_000, "rows")
    assert progress.describe() == "recovers: 0 % of 68,000,000 rows after 2 s"
    now[0] += 25
    progress.add(27_200_000)
    assert progress.describe() == "recovers: 40 % of 68,000,000 rows after 27 s, about 38 s to go"
    progress.expect(4096, "bytes of the log")
    now[0] += 1
    assert progress.describe() == "recovers: 0 % of 4,096 bytes of the log after 28 s"
    progress.add(5000)  # more than was expected: the log's end was guessed
    assert progress.describe() == "recovers: 100 % of 4,096 bytes of the log after 28 s"


def test_a_report_says_whether_the_work_went_on(now: list[float]) -> None:
    reports: list[bool] = []
    reporter = WorkReporter(lambda does, has_moved: reports.append(has_moved), every_s=5.0)
    progress = WorkProgress("recovers", reporter.report_if_due)
    for seconds, count in ((1, 1), (4, 1), (5, 0), (5, 1), (1, 1)):
        now[0] += seconds
        progress.add(count)
    assert reports == [True, False, True]


def test_a_start_fails_with_the_error_of_its_block() -> None:
    startup = Startup(WorkProgress("recovers"))
    assert not startup.wait(0)
    with pytest.raises(DataError), startup:
        raise DataError("The log is broken.")
    assert startup.wait(0)
    assert isinstance(startup.failure, DataError)
    startup = Startup(WorkProgress("recovers"))
    with pytest.raises(OSError, match="away"), startup:
        raise OSError("away")
    assert isinstance(startup.failure, InternalError)
    assert "OSError('away')" in str(startup.failure)
    assert Startup.immediate().wait(0)


def test_patience_counts_from_the_last_progress() -> None:
    patience = Patience(60.0)
    assert patience.begin(0.0) == 60.0
    assert patience.begin(5.0) == 60.0
    patience.renew(50.0)
    assert patience.begin(70.0) == 110.0
    patience.end()
    assert patience.begin(200.0) == 260.0


def test_patience_with_failed_starts_has_an_end() -> None:
    patience = Patience(60.0)
    patience.begin(0.0)
    patience.limit(30.0)
    for moment in (40.0, 80.0):
        patience.renew(moment)
        patience.limit(moment)
    assert patience.begin(80.0) == 90.0
    patience.end()
    patience.begin(100.0)
    patience.renew(110.0)
    assert patience.begin(120.0) == 170.0


class NotedProgress(WorkProgress):
    """Keeps the parts of a work, and how much of each was done."""

    def __init__(self) -> None:
        super().__init__("recovers")
        self.parts: list[list[object]] = []

    def expect(self, total: int, unit: str) -> None:
        self.parts.append([unit, total, 0])
        super().expect(total, unit)

    def add(self, count: int) -> None:
        super().add(count)
        self.parts[-1][2] = self.done


def recovered(directory: Path) -> tuple[Service, Recovery, NotedProgress]:
    service = Service()
    service.state.progress = progress = NotedProgress()
    recovery = Recovery(service, SnapshotService(service), directory)
    recovery.recover("a job")
    return service, recovery, progress


def test_a_recovery_counts_the_rows_of_its_base_and_the_bytes_of_its_log(tmp_path: Path) -> None:
    service, recovery, _ = recovered(tmp_path)
    worker = FakeWorker(service)
    worker.declare()
    worker.push(gradient(tuple(range(500)), 1.0), step=0)
    recovery.write_base()
    worker.push(gradient((1, 2), 1.0), step=1)
    log = max(tmp_path.glob("log-*")).stat().st_size
    _, _, progress = recovered(tmp_path)
    assert progress.parts == [["rows", 500, 500], ["bytes of the log", log, log]]


class GoneWorker(FakeWorker):
    """Hears how far its server is, and is gone then."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.reports: list[str] = []

    def call(self, op: str, meta: dict[str, Any], arrays: Any = (), *, seq: int | None = None) -> RpcReply:
        self.seq += 1
        request = RpcRequest(op, meta, [], self.client, self.seq, "worker 0", report_work=self._hear)
        return self.service.handle(request)

    def _hear(self, does: str, has_moved: bool) -> None:
        self.reports.append(does)
        raise ClosedError("worker 0 went.")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A snapshot of 500 rows."""
    service, _, _ = recovered(tmp_path / "0")
    worker = FakeWorker(service)
    worker.declare()
    worker.push(gradient(tuple(range(500)), 1.0), step=0)
    save([worker], tmp_path / "saved", {})
    return tmp_path / "saved"


@pytest.mark.parametrize("op", ["declare", "load"])
def test_a_load_tells_its_client_how_far_it_is_and_goes_on_without_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr("phalanx.ps.server.load_turn.WORK_REPORT_S", 0.0)
    service = Service()
    snapshots, worker = SnapshotService(service), GoneWorker(service)
    if op == "declare":
        snapshots.add_source(saved, None)
    worker.declare()
    if op == "load":
        worker.call("load", {"directory": str(saved)})
    assert any(report.startswith("loads: 100 % of 500 rows of table items after ") for report in worker.reports)
    assert service.state.tables.tables["items"].rows == 500


def test_a_client_that_waits_for_its_turn_hears_how_far_the_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.ps.server.load_turn.WORK_REPORT_S", 0.01)
    service, heard = Service(), threading.Event()
    request = RpcRequest("declare", {}, [], 100, 1, "worker 0")
    about = {"mode": "async", "bound": 0, "workers": 2, "worker": 1, "specs": [SPEC.to_json()]}
    other = RpcRequest("declare", about, [], 101, 1, "worker 1", report_work=lambda does, has_moved: heard.set())
    with ThreadPoolExecutor(1) as pool:
        with service.load_turn.take(request):
            declared = pool.submit(service.handle, other)
            assert heard.wait(20)
            assert not declared.done()
        assert declared.result(20).meta["tables"] == ["items"]

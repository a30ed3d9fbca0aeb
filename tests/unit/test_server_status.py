"""What a parameter server reports of itself, and how people and Prometheus read it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.launch.reports.server_status import JobStatuses, prometheus_lines, read_statuses, server_lines
from phalanx.ps.server import status as status_module
from phalanx.ps.server.service import Service
from phalanx.ps.server.status import StatusFile, rates, server_status
from ps_requests import FakeWorker, gradient

SAMPLE = re.compile(r'[a-z_]+\{job="[^\n]*",server="\d+"(,table="[^\n]*")?\} \d+(\.\d+)?(e[+-]\d+)?')


@pytest.fixture
def service() -> Service:
    service = Service(server=1, servers=2)
    service.budget = 1 << 30
    worker = FakeWorker(service)
    worker.declare()
    worker.push(gradient((1, 2), 1.0))
    worker.pull(1, 2, 3, 4, step=1)
    return service


@pytest.fixture
def path(service: Service, tmp_path: Path) -> Path:
    path = tmp_path / "status.server.1.json"
    StatusFile(service, str(path)).tick()
    return path


def test_a_server_reports_what_it_holds_and_answers(path: Path) -> None:
    (status,) = read_statuses([path])
    assert (status.server, status.lag, status.budget) == (1, 0, 1 << 30)
    assert status.tables["items"]["rows"] == status.tables["items"]["pushed"] == 2
    assert (status.tables["items"]["pulled"], status.tables["items"]["missed"]) == (4, 2)
    assert (status.requests["pull_requests"], status.requests["pull_keys"]) == (1, 4)
    assert (status.requests["push_requests"], status.requests["push_keys"]) == (1, 2)
    assert (status.requests["active"], status.requests["waiting"]) == (0, 0)
    assert list(path.parent.iterdir()) == [path]


def test_the_first_report_comes_at_once_and_the_next_two_seconds_later(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: clock[0])
    path = tmp_path / "status.server.1.json"
    reporter, written = StatusFile(service, str(path)), []
    for clock[0] in (10.25, 11.0, 12.0, 12.25):
        reporter.tick()
        written.append(path.exists())
        path.unlink(missing_ok=True)
    assert written == [True, False, False, True]


def test_a_worker_whose_pushes_are_held_back_is_not_awaited() -> None:
    service = Service()
    slow, fast = FakeWorker(service, 0), FakeWorker(service, 1)
    for worker in (slow, fast):
        worker.declare(mode="bounded", bound=2, workers=2)
    for step in range(2):
        fast.push(gradient((1,), 1.0), step=step)
    waiting = service.engine.counts() | {"waiting": 1}
    assert server_status(service, waiting)["awaited"] == [(0, 0)]
    service.write_freeze.freeze("a", 60, steps=[1, 2])
    assert server_status(service, waiting)["awaited"] == [(0, 0)]
    service.write_freeze.freeze("a", 60)
    assert server_status(service, waiting)["awaited"] == []
    service.write_freeze.resume("a")
    assert server_status(service, waiting)["awaited"] == [(0, 0)]


def test_rates_are_those_between_two_reports() -> None:
    names = ("pull_requests", "push_requests", "pull_keys", "push_keys", "pull_seconds", "push_seconds", "wait_seconds")
    before = dict.fromkeys(names, 5.0)
    now = before | {
        "pull_requests": 25.0,
        "push_requests": 15.0,
        "pull_keys": 205.0,
        "pull_seconds": 8.0,
        "wait_seconds": 6.5,
    }
    found = rates(before, now, 2.0)
    assert (found["pulls_per_s"], found["pushes_per_s"], found["pulled_ids_per_s"]) == (10.0, 5.0, 100.0)
    assert found["ms_per_request"] == pytest.approx(1000 * 1.5 / 30)
    assert rates(now, now, 2.0)["ms_per_request"] == 0.0


def test_lines_have_a_row_for_each_server_and_each_table(path: Path) -> None:
    (status,) = read_statuses([path])
    other = status.model_copy(update={"server": 0, "lag": 3})
    head, first, second, columns, table = server_lines([other, status])
    assert head.split()[:4] == ["server", "rows", "memory", "budget"]
    assert (first.split()[0], first.split()[-1], second.split()[0]) == ("0", "3", "1")
    assert columns.split()[0] == "table"
    assert table.split()[:2] == ["items", "4"]
    assert "50.0 %" in table
    assert max(map(len, (head, first, second, columns, table))) <= 118
    assert server_lines([]) == []


def test_prometheus_reads_every_number_once(path: Path) -> None:
    statuses = read_statuses([path])
    lines = list(prometheus_lines([JobStatuses('a "job"', statuses), JobStatuses("b", [])]))
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    assert len(samples) == len(set(samples)) == len([line for line in lines if line.startswith("# TYPE")])
    assert 'phalanx_table_rows{job="a \\"job\\"",server="1",table="items"} 2' in samples
    assert 'phalanx_table_pulled_total{job="a \\"job\\"",server="1",table="items"} 4' in samples
    assert 'phalanx_server_push_requests_total{job="a \\"job\\"",server="1"} 1' in samples
    assert list(prometheus_lines([JobStatuses("b", [])])) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"server": -1}', "[" * 9999])
def test_what_is_no_report_is_left_out(text: str, path: Path) -> None:
    other = path.with_name("status.server.0.json")
    other.write_text(text)
    assert [status.server for status in read_statuses([other, path, path.with_name("none")])] == [1]


def test_counts_that_a_script_wrote_are_numbers_or_no_report(path: Path) -> None:
    report = json.loads(path.read_text())
    report["tables"]["items"]["rows"] = "<b>2</b>"
    path.write_text(json.dumps(report))
    assert read_statuses([path]) == []


def test_a_server_that_nobody_asks_writes_nothing(service: Service, tmp_path: Path) -> None:
    StatusFile(service, None).tick()
    StatusFile(service, str(tmp_path / "gone" / "status.json")).tick()
    assert list(tmp_path.iterdir()) == []

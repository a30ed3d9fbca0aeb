"""`ServerScaling` starts other servers, and puts them in place of those there are once they have the tables."""

from __future__ import annotations

import errno
import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.servers import hand_over
from phalanx.launch.job.servers.hand_over import HandOverPhase
from phalanx.launch.job.servers.scaling import publish_servers
from phalanx.launch.request import machine
from phalanx.ps.server.moved_state import difference, state_of
from phalanx.ps.wire.client.server_layout import LayoutFile
from server_changes import FakeHandOver, Job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hand_over, "HandOver", FakeHandOver)
    made = Job(tmp_path)
    yield made
    made.close()


def test_new_servers_start_when_their_tables_are_written_and_take_the_place_when_they_have_them(job: Job) -> None:
    old = job.starter.layout
    assert job.scale(3) == "2 servers -> 3 servers"
    change = FakeHandOver.last
    job.commands.poll()
    assert not job.started
    change.phase = HandOverPhase.LOAD
    job.commands.poll()
    assert [process.id for process in job.started] == ["server.0.1", "server.1.1", "server.2.1"]
    assert [process.endpoint for process in job.started] == change.after
    assert job.starter.layout is old
    change.phase = HandOverPhase.READY
    job.commands.poll()
    assert change.is_committed
    assert job.sent == [(["server.0", "server.1"], signal.SIGKILL)]
    assert job.starter.layout.endpoints["server"] == tuple(change.after)
    assert job.starter.layout.local[3:] == old.local[2:]
    assert job.starter.facts.server_dir == f"{job.folder}/servers/layout-1"
    assert sorted(job.starter.endpoints) == ["server.0.1", "server.1.1", "server.2.1", "worker.0"]
    assert LayoutFile(job.folder / "servers" / "layout.json", ()).read() == (1, tuple(change.after))
    # Their state goes when they have ended.
    (job.folder / "status.server.1.json").touch()
    job.commands.poll()
    assert job.commands.answer({"servers": "scaling"}) == "the old servers end"
    assert (job.folder / "servers" / "0").exists()
    for process in old.local[:2]:
        assert job.commands.is_spare(process, "was killed by SIGKILL", failed=True)
    outcome = job.outcome()
    assert (outcome["before"], outcome["servers"]) == (2, 3)
    assert sorted(path.name for path in (job.folder / "servers").iterdir()) == ["layout-1", "layout.json"]
    assert not (job.folder / "status.server.1.json").exists()
    assert job.said[-1] == ""
    assert job.said[0] == "2 servers -> 3 servers: the servers finish the pushes under way"
    event = json.loads((job.folder / "events.launcher.0.jsonl").read_text())
    assert (event["kind"], event["before"], event["servers"]) == ("servers", 2, 3)


@pytest.mark.parametrize("who", ["old server", "new server", "worker"])
def test_a_process_that_ends_before_the_commit_gives_the_change_up(job: Job, who: str) -> None:
    job.scale(3)
    FakeHandOver.last.phase = HandOverPhase.LOAD
    job.commands.poll()
    old, worker = job.starter.layout.local[0], job.starter.layout.local[2]
    process = {"old server": old, "new server": job.started[1], "worker": worker}[who]
    # Others than new servers are started again as ever.
    assert job.commands.is_spare(process, "ended with exit code 3", failed=True) == (who == "new server")
    FakeHandOver.last.phase = HandOverPhase.READY
    job.commands.poll()
    assert not FakeHandOver.last.is_committed
    assert FakeHandOver.last.lost_worker == (0 if who == "worker" else None)
    left = [new for new in job.started if new is not process]
    assert job.sent == [([new.id for new in left], signal.SIGKILL)]
    for new in left:
        assert job.commands.is_spare(new, "was killed by SIGKILL", failed=True)
    names = {"old server": "server 0", "new server": "new server 1", "worker": "rank 0"}
    assert job.outcome() == {
        "before": 2,
        "servers": 2,
        "error": f"{names[who]} ended with exit code 3; read {process.log_file}",
    }
    assert not FakeHandOver.last.folder.exists()
    assert (job.folder / "servers" / "0").exists()
    assert job.scale(1) == "2 servers -> 1 servers"


def test_a_layout_that_cannot_be_written_gives_the_change_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.scale(1)
    FakeHandOver.last.phase = HandOverPhase.LOAD
    job.commands.poll()
    FakeHandOver.last.phase = HandOverPhase.READY
    (job.folder / "servers" / "layout.json").mkdir()
    job.commands.poll()
    assert not FakeHandOver.last.is_committed
    assert job.commands.is_spare(job.started[0], "was killed by SIGKILL", failed=True)
    assert "layout.json cannot be written (Is a directory). Check the space and" in job.outcome()["error"]


def test_a_job_that_ends_in_the_middle_ends_new_servers_at_once_and_keeps_none_of_their_files(job: Job) -> None:
    job.scale(3)
    FakeHandOver.last.phase = HandOverPhase.LOAD
    job.commands.poll()
    job.commands.stop()
    assert job.sent == [(["server.0.1", "server.1.1", "server.2.1"], signal.SIGKILL)]
    assert FakeHandOver.last.failure == "the job ends"
    assert FakeHandOver.last.folder.exists()
    job.commands.delete_rest()
    assert sorted(path.name for path in (job.folder / "servers").iterdir()) == ["0", "1"]


def test_a_launcher_without_room_for_more_files_refuses_and_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(machine, "bind", fail)
        with pytest.raises(LaunchError, match=r"3 servers cannot be started beside those there are \(.*Too many open"):
            job.scale(3)
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda _: (64, 64))
        with pytest.raises(LaunchError, match=r"3 servers beside 2 need \d+ open files, and the launcher may have 64"):
            job.scale(3)
    assert job.scale(3) == "2 servers -> 3 servers"


def test_what_cannot_be_is_refused_with_the_reason(job: Job) -> None:
    for count in (0, 1025, True, "3", None):
        with pytest.raises(LaunchError, match=f"{count!r} servers were asked for. Give a number from 1 to 1024"):
            job.scale(count)
    with pytest.raises(LaunchError, match="The job has 2 servers already"):
        job.scale(2)
    job.commands.answer({"servers": "restart"})
    with pytest.raises(LaunchError, match="being started again: 2 of 2 wait"):
        job.scale(3)
    job.has_workers = False
    job.commands.poll()
    with pytest.raises(LaunchError, match="The workers of this job have left"):
        job.scale(3)
    job.has_workers = True
    job.scale(3)
    with pytest.raises(LaunchError, match="is being changed: the servers finish the pushes under way"):
        job.scale(1)
    with pytest.raises(LaunchError, match="is being changed: the servers finish the pushes under way"):
        job.commands.answer({"servers": "restart"})


def test_servers_on_listed_addresses_or_several_hosts_stay_as_many(tmp_path: Path) -> None:
    job = Job(tmp_path, server_layout_file="")
    with pytest.raises(LaunchError, match=r"where all processes are on one host.*not with --servers"):
        job.scale(3)
    job.close()


def test_what_an_earlier_job_left_is_kept_and_its_layout_is_not_read(job: Job) -> None:
    left = job.folder / "servers" / "layout-1"
    left.mkdir()
    (left / "theirs").touch()
    (job.folder / "servers" / "layout.json").write_text("{}")
    publish_servers(job.starter.layout, job.starter.facts)
    assert LayoutFile(job.folder / "servers" / "layout.json", ("a:1",)).read() == (0, ("a:1",))
    job.scale(3)
    assert (job.folder / "servers" / "layout-1.previous" / "theirs").exists()


def test_a_job_whose_servers_stay_as_many_deletes_the_layout_of_an_earlier_one(tmp_path: Path) -> None:
    job = Job(tmp_path, server_layout_file="")
    layout = tmp_path / "servers" / "layout.json"
    layout.write_text("{}")
    publish_servers(job.starter.layout, job.starter.facts)
    assert not layout.exists()
    job.close()


# --- the states of servers ------------------------------------------------------------------------------------------


def state(server: int, **about: Any) -> dict[str, Any]:
    is_first = server == 0
    return {
        "specs": [{"name": "ids"}],
        "counts": {"ids": [10 + server, 1, server]},
        "clients": [{"client": 7, "worker": 0, "last": 5 + server, "reply": {"dropped": 3}}],
        "clocks": {"mode": "async", "pushed": [4], "live": [0]},
        "leases": {"0": {"offsets": {"a": 1}}} if is_first else {},
        "batch_leases": {"epochs": [[0, 0, 4, 2]], "returned": [], "leased": {}} if is_first else {},
        "days": 1,
        "first_pushes": {"0": 2 + server},
        "withheld": [],
        "unanswered": 0,
        "saving": {"fulls": {"5f3a9c1e": {}}, "sources": [["/saved", ["ids"]]]},
    } | about


def test_the_first_new_server_has_the_leases_and_the_sums_of_counts() -> None:
    states = [state(0), state(1)]
    first, second = (state_of(server, states) for server in range(2))
    assert first["counts"] == {"ids": [21, 2, 1]}
    assert (first["leases"], first["batch_leases"]) == (states[0]["leases"], states[0]["batch_leases"])
    assert (second["counts"], second["leases"], second["batch_leases"]["epochs"]) == ({}, {}, [])
    for of_new in (first, second):
        assert of_new["clients"] == [{"client": 7, "worker": 0, "last": 0, "reply": {}}]
        assert of_new["clocks"] == states[0]["clocks"]
        assert of_new["first_pushes"] == {"0": 3}
        assert of_new["saving"] == {"fulls": {}, "sources": [["/saved", ["ids"]]]}


@pytest.mark.parametrize(
    ("about", "part"),
    [
        ({}, ""),
        ({"clocks": {"mode": "async", "pushed": [5], "live": [0]}}, "the workers' pushes"),
        ({"specs": [{"name": "ids"}, {"name": "more"}]}, "the tables"),
        ({"clients": []}, "the workers' processes"),
        ({"days": 2}, "the days of tables that have ended"),
        ({"saving": {"fulls": {}, "sources": []}}, "the snapshots that fill tables"),
        ({"withheld": [0]}, "a lost worker, of whom they are being told"),
        ({"unanswered": 1}, "a change that is done and not answered yet"),
    ],
)
def test_servers_that_were_asked_something_only_some_have_done_are_at_no_common_moment(
    about: dict[str, Any], part: str
) -> None:
    assert difference([state(0), state(1, **about)]) == part

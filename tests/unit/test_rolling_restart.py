"""`RollingRestart` asks one server at a time to end, and the next one when that reports again."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.job.servers.rolling_restart import RESTART_SIGNAL, RollingRestart

SERVERS = [SimpleNamespace(id=f"server.{rank}", role="server", title=f"server {rank}") for rank in range(2)]


class Job:
    """A host with two servers, which notes what is sent to them."""

    def __init__(self, folder: Path, *, patience_s: float = 60.0, max_restarts: int = 1) -> None:
        self.folder, self.sent = folder, []
        layout = SimpleNamespace(local=[*SERVERS, SimpleNamespace(id="worker.0", role="worker", title="worker 0")])
        facts = SimpleNamespace(log_dir=str(folder), server_dir="servers", max_restarts=max_restarts)
        self.has_workers = True
        self.restart = RollingRestart(
            layout,
            facts,
            lambda ids, number, is_group=True: self.sent.append((*ids, number, *(() if is_group else ["alone"]))),
            patience_s,
            has_workers=lambda: self.has_workers,
        )

    def report(self, server: int, at: float) -> None:
        (self.folder / f"status.server.{server}.json").write_text(json.dumps({"time": at}))

    def progress(self) -> str:
        self.restart.poll()
        return self.restart.answer({"servers": "progress"})


def test_the_next_server_ends_when_the_one_before_reports_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(0, time.time() - 1)  # of the process that is about to end
    assert job.progress() == ""
    assert job.sent == []
    assert job.restart.answer({"servers": "restart"}) == "server 0, server 1"
    assert job.progress() == "server 0 writes its state, 1 of 2 wait"
    assert not job.restart.take_end(SERVERS[1], failed=True)
    assert job.restart.take_end(SERVERS[0], failed=True)
    # It fails while it recovers: that is no end that was asked for.
    assert not job.restart.take_end(SERVERS[0], failed=True)
    assert job.progress() == "server 0 recovers, 1 of 2 wait"
    os.truncate(tmp_path / "status.server.0.json", 3)  # half a report is none
    assert job.progress() == "server 0 recovers, 1 of 2 wait"
    with pytest.raises(LaunchError, match="being started again: server 0 recovers, 1 of 2 wait"):
        job.restart.answer({"servers": "restart"})
    job.report(0, time.time() + 1)
    assert job.progress() == "1 of 2 wait"
    assert job.progress() == "server 1 writes its state, 0 of 2 wait"
    assert job.restart.take_end(SERVERS[1], failed=True)
    job.report(1, time.time() + 1)
    assert job.progress() == ""
    assert job.restart.answer({"servers": "restarted"}) == "server 0, server 1"
    assert job.sent == [("server.0", RESTART_SIGNAL, "alone"), ("server.1", RESTART_SIGNAL, "alone")]


def test_a_server_that_does_not_end_in_time_is_killed_once(tmp_path: Path) -> None:
    job = Job(tmp_path, patience_s=0.0)
    job.restart.answer({"servers": "restart"})
    for _ in range(3):
        job.progress()
    assert job.sent == [("server.0", RESTART_SIGNAL, "alone"), ("server.0", signal.SIGKILL)]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("recovers", [False, True])
def test_no_server_is_started_again_once_one_has_ended_well(tmp_path: Path, server: object, recovers: bool) -> None:
    job = Job(tmp_path)
    job.restart.answer({"servers": "restart"})
    assert job.progress() == "server 0 writes its state, 1 of 2 wait"
    if recovers:
        assert job.restart.take_end(SERVERS[0], failed=True)
    assert not job.restart.take_end(server, failed=False)
    assert job.progress() == ""
    assert job.restart.answer({"servers": "restarted"}) == ""
    assert job.sent == [("server.0", RESTART_SIGNAL, "alone")]
    with pytest.raises(LaunchError, match="have left, and its servers end"):
        job.restart.answer({"servers": "restart"})


def test_no_server_is_asked_or_killed_once_the_workers_have_left(tmp_path: Path) -> None:
    job = Job(tmp_path, patience_s=0.0)
    job.restart.answer({"servers": "restart"})
    job.has_workers = False
    assert job.progress() == ""
    job.has_workers = True
    job.restart.answer({"servers": "restart"})
    job.restart.poll()
    job.has_workers = False
    assert job.progress() == ""
    assert job.sent == [("server.0", RESTART_SIGNAL, "alone")]
    with pytest.raises(LaunchError, match="have left, and its servers end"):
        job.restart.answer({"servers": "restart"})


def test_servers_that_keep_nothing_are_not_restarted(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Start it with --max-restarts 1"):
        Job(tmp_path, max_restarts=0).restart.answer({"servers": "restart"})


def test_an_unknown_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match="Known: servers, with restart, progress, restarted, scale, scaling or scaled"
    ):
        Job(tmp_path).restart.answer({"servers": "stop"})

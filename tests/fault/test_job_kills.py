"""Controllers that are killed, over real databases and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import job_stand_in
import postgres as postgresql
from phalanx.jobs.backends.local import Local
from phalanx.jobs.control.controller import LEASE, LEASE_S, JobController
from phalanx.jobs.models import Job, JobState
from phalanx.jobs.paths import attempt_folder
from phalanx.jobs.scheduling.queue import Amount
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase
from phalanx.jobs.store.database import now

pytestmark = pytest.mark.fault

JOB = Amount(40)

CONTROLLER = """
import logging, os, random, signal, sys, threading, time
from pathlib import Path
from phalanx.jobs.backends.local import Local
from phalanx.jobs.control.controller import JobController, run_controller
from phalanx.jobs.scheduling.queue import Amount
from phalanx.jobs.store import JobDatabase

home, cpu, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def controller():
    machine = Amount(cpu, 0, 0)
    local = Local(machine, gpus=(), node=("/bin/sh", script))
    with JobDatabase(None, home) as store:
        jobs = JobController(store, {"local": local}, home, machine=machine)
        run_controller(home, jobs, threading.Event(), until_idle=False)

"""

SERVER = """
import os, random, signal, sys, time
from pathlib import Path
import phalanx.jobs.api.app, phalanx.jobs.api.serve, phalanx.jobs.service.service, phalanx.jobs.store
import phalanx.ui.console
from phalanx.cli.serve import _serve
from phalanx.jobs import backend_registry
from phalanx.jobs.backends import local
from phalanx.jobs.scheduling.queue import Amount

home, cpu, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["PHALANX_HOME"] = str(home)

def controller():
    machine = Amount(cpu, 0, 0)
    local.this_machine = lambda: machine
    backend_registry.Backends = lambda: {"local": local.Local(machine, gpus=(), node=("/bin/sh", script))}
    _serve({"host": "127.0.0.1", "port": 0, "certificate": None, "key": None}, open_browser=None)

"""
"""What `phalanx serve` runs, on a machine and with nodes that a test made up."""

NURSERY = """
moments = random.Random(7)

def begun():
    jobs = home / "jobs"
    return len(os.listdir(jobs)) if jobs.exists() else 0

for _ in range(int(sys.argv[4])):
    pid = os.fork()
    if pid == 0:
        controller()
    goal = begun() + moments.randrange(8)
    while begun() < goal:
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
"""
"""After CONTROLLER or SERVER: imports once, then kills many of them, each while it starts jobs or just after."""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home in memory: a process that is killed loses nothing that it wrote to a file, and syncs cost nothing here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def _ended(store: JobDatabase) -> dict[str, Job]:
    return {job.id: job for job in store.jobs.find() if job.state.is_terminal}


@pytest.fixture
def store_on(home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every store that is opened without an address be on this kind of database."""

    def choose(kind: str) -> None:
        if kind == "postgresql":
            monkeypatch.setenv("PHALANX_STORE", postgresql.url(request.getfixturevalue("postgres"), home.name))
        else:
            monkeypatch.delenv("PHALANX_STORE", raising=False)

    return choose


@pytest.mark.parametrize(
    ("database", "killed", "running", "queued", "kills"),
    [("sqlite", SERVER, 50, 1000, 20), ("sqlite", CONTROLLER, 10, 200, 6), ("postgresql", CONTROLLER, 10, 200, 6)],
    ids=["servers on sqlite", "controllers on sqlite", "controllers on postgresql"],
)
def test_killed_controllers_lose_no_job_and_run_none_twice(
    database: str, killed: str, running: int, queued: int, kills: int, home: Path, store_on: Callable[[str], None]
) -> None:
    store_on(database)
    node = job_stand_in.node(home)
    machine = Amount(JOB.cpu * running)
    spec = TrainingJob.model_validate({"name": "j", "command": "nap 1", "resources": {"cpu": JOB.cpu / 1000}})
    with JobDatabase(None, home) as store:
        assert store.database.shown_url.startswith(database)
        made = [store.jobs.create(spec, owner=f"user-{number % 7}").id for number in range(running + queued)]
        command = [sys.executable, "-c", killed + NURSERY, str(home), str(machine.cpu), node[1], str(kills)]
        subprocess.run(command, check=True, timeout=120)
        jobs = {job.id: job for job in store.jobs.find()}
        assert set(jobs) == set(made)
        begun = [id for id, job in jobs.items() if job.attempt]
        assert running <= len(begun) < queued
        for id in made:
            store.jobs.stop(id, "stopped by the test")
        _finish(store, home, node, machine)
        for id, job in _ended(store).items():
            folder = attempt_folder(home, id, 1)
            starts = (folder / "ran-0").read_text().count("started") if (folder / "ran-0").exists() else 0
            assert job.state is not JobState.FAILED, (job.failure, job.reason)
            assert starts == 1 if job.state is JobState.SUCCEEDED else starts <= 1
            assert len(store.jobs.attempts(id)) == job.attempt <= 1
        assert set(_ended(store)) == set(made)


def test_of_two_homes_on_one_database_one_keeps_until_it_is_killed(home: Path, store_on: Callable[[str], None]) -> None:
    store_on("postgresql")
    node = job_stand_in.node(home)
    machine, ahead = Amount(4000), timedelta()

    def spec(command: str) -> TrainingJob:
        return TrainingJob.model_validate({"name": "j", "command": command})

    def controller(store: JobDatabase) -> JobController:
        return JobController(store, {"local": Local(machine, gpus=(), node=node)}, store.home, machine=machine)

    def until(check: Callable[[], bool], controller: JobController | None = None) -> None:
        deadline = time.monotonic() + 30
        while not check():
            assert time.monotonic() < deadline
            time.sleep(min(0.05, controller.step() if controller else 1))

    with JobDatabase(None, home / "a") as first, JobDatabase(None, home / "b", clock=lambda: now() + ahead) as second:
        job = first.jobs.create(spec("nap 60"), owner="ann").id
        one = subprocess.Popen([sys.executable, "-c", f"{CONTROLLER}\ncontroller()", str(first.home), "4000", node[1]])
        other = controller(second)
        try:
            until(lambda: first.jobs.get(job).state is JobState.RUNNING)
            waits = [other.step()]
        finally:
            one.kill()
            one.wait()
        waits.append(other.step())
        assert waits == [LEASE_S / 3] * 2
        assert second.leases.holder(LEASE) == f"{os.uname().nodename}:{first.home}"
        ahead = timedelta(seconds=LEASE_S + 1)
        new = second.jobs.create(spec("true"), owner="ann").id
        until(lambda: second.jobs.get(new).state is JobState.SUCCEEDED, other)
        # What runs elsewhere is neither lost nor started here; its own home continues with it.
        found = second.jobs.get(job)
        assert (found.state, found.attempt) == (JobState.RUNNING, 1)
        assert "was started from another home" in found.reason
        assert not attempt_folder(second.home, job, 1).exists()
        other.release()
        first.jobs.stop(job, "stopped by ann")
        until(lambda: first.jobs.get(job).state is JobState.STOPPED, controller(first))
        assert (attempt_folder(first.home, job, 1) / "ran-0").read_text().count("started") == 1


def _finish(store: JobDatabase, home: Path, node: tuple[str, ...], machine: Amount) -> None:
    """Let one more controller see all jobs to their end."""
    controller = JobController(store, {"local": Local(machine, gpus=(), node=node)}, home, machine=machine)
    deadline = time.monotonic() + 60
    while pause := controller.step():
        if controller.is_idle:
            break
        assert time.monotonic() < deadline
        time.sleep(min(0.1, pause))
    controller.release()

"""Keepers that are killed, over a real store and real processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import job_stand_in
from phalanx.jobs.backends.local import Local
from phalanx.jobs.keeper import Keeper
from phalanx.jobs.layout import attempt_folder
from phalanx.jobs.queue import Amount
from phalanx.jobs.records import Job
from phalanx.jobs.spec import TrainingJob
from phalanx.jobs.states import State
from phalanx.jobs.store import Store

pytestmark = pytest.mark.fault

RUNNING, QUEUED = 50, 1000
MACHINE = Amount(40 * RUNNING, 0, 0)

NURSERY = """
import logging, os, random, signal, sys, threading, time
from pathlib import Path
from phalanx.jobs.backends.local import Local
from phalanx.jobs.keeper import Keeper, keep
from phalanx.jobs.queue import Amount
from phalanx.jobs.store import Store

home, cpu, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
moments = random.Random(7)

def keeper():
    machine = Amount(cpu, 0, 0)
    local = Local(machine, cards=(), node=("/bin/sh", script))
    with Store(None, home) as store:
        keep(home, Keeper(store, {"local": local}, home, machine=machine), threading.Event(), until_idle=False)

def begun():
    jobs = home / "jobs"
    return len(os.listdir(jobs)) if jobs.exists() else 0

for _ in range(20):
    pid = os.fork()
    if pid == 0:
        keeper()
    goal = begun() + moments.randrange(8)
    while begun() < goal:
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
"""
"""Imports once, then kills twenty keepers, each while it starts jobs or just after."""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home in memory: a process that is killed loses nothing that it wrote to a file, and syncs cost nothing here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def _ended(store: Store) -> dict[str, Job]:
    return {job.id: job for job in store.jobs() if job.state.terminal}


def test_twenty_killed_keepers_lose_no_job_and_run_none_twice(home: Path) -> None:
    node = job_stand_in.node(home)
    spec = TrainingJob.model_validate({"name": "j", "command": "nap 1", "resources": {"cpu": 0.04}})
    with Store(None, home) as store:
        made = [store.create_job(spec, owner=f"user-{number % 7}").id for number in range(RUNNING + QUEUED)]
        subprocess.run([sys.executable, "-c", NURSERY, home, str(MACHINE.cpu), node[1]], check=True, timeout=120)
        jobs = {job.id: job for job in store.jobs()}
        assert set(jobs) == set(made)
        begun = [id for id, job in jobs.items() if job.attempt]
        assert RUNNING <= len(begun) < QUEUED
        for id in made:
            store.stop(id, "stopped by the test")
        _finish(store, home, node)
        for id, job in _ended(store).items():
            folder = attempt_folder(home, id, 1)
            starts = (folder / "ran-0").read_text().count("started") if (folder / "ran-0").exists() else 0
            assert job.state is not State.FAILED, (job.failure, job.reason)
            assert starts == 1 if job.state is State.SUCCEEDED else starts <= 1
            assert len(store.attempts(id)) == job.attempt <= 1
        assert set(_ended(store)) == set(made)


def _finish(store: Store, home: Path, node: tuple[str, ...]) -> None:
    """Let one more keeper see all jobs to their end."""
    keeper = Keeper(store, {"local": Local(MACHINE, cards=(), node=node)}, home, machine=MACHINE)
    deadline = time.monotonic() + 60
    while len(_ended(store)) < RUNNING + QUEUED:
        assert time.monotonic() < deadline
        time.sleep(min(0.1, keeper.step()))
    keeper.release()

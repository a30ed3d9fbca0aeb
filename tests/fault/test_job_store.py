"""Writers of the store that are killed: what they acknowledged is there, and the next one continues."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import postgres as postgresql
from phalanx.jobs.models import JobState
from phalanx.jobs.store import JobDatabase

pytestmark = pytest.mark.fault

WRITER = """
import sys
from pathlib import Path
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.models import JobState
from phalanx.jobs.store import JobDatabase

with JobDatabase(sys.argv[1], Path(sys.argv[2])) as store:
    while True:
        job = store.jobs.create(TrainingJob(name="job", command="python train.py"), owner="ann")
        print("queued", job.id, flush=True)
        store.jobs.begin_attempt(job.id)
        store.jobs.change(job.id, JobState.RUNNING)
        print("running", job.id, flush=True)
        store.jobs.change(job.id, JobState.SUCCEEDED)
        print("succeeded", job.id, flush=True)
"""


def acknowledged(url: str, home: Path, lines: int) -> dict[str, JobState]:
    """Let a writer write, kill it after so many lines, and return the last state it told of each job."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url, str(home)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        told += list(writer.stdout)
    writer.wait()
    whole = [line.split() for line in told if line.endswith("\n")]
    return {job: JobState(state) for state, job in whole}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_a_killed_writer_acknowledged_is_there(kind, tmp_path, request):
    url = f"sqlite:///{tmp_path}/jobs.db"
    if kind == "postgresql":
        url = postgresql.url(request.getfixturevalue("postgres"), "killed")
    rounds = random.Random(7)
    told: dict[str, JobState] = {}
    for _ in range(2):
        told |= acknowledged(url, tmp_path, rounds.randint(5, 40))
    order = [JobState.QUEUED, JobState.RUNNING, JobState.SUCCEEDED]
    with JobDatabase(url, tmp_path) as store:
        kept = {job.id: job for job in store.jobs.find()}
        assert told.keys() <= kept.keys()
        for job, state in told.items():
            assert order.index(kept[job].state) >= order.index(state)
        for job in kept.values():
            # State and history were written together or not at all.
            changes = [event.data["to"] for event in store.jobs.events(job.id) if event.kind == "state"]
            assert changes == [*order][: len(changes)]
            assert changes[-1] == job.state

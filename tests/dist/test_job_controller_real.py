"""Jobs of several kinds at once, kept on this machine with real nodes, launchers and ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from job_nodes import DDP
from phalanx.jobs.backend_registry import Backends
from phalanx.jobs.backends.local import MARK
from phalanx.jobs.control.controller import JobController
from phalanx.jobs.models import Actor, Cause, Job, JobState
from phalanx.jobs.scheduling.queue import Amount
from phalanx.jobs.service.service import JobService
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase

pytestmark = pytest.mark.dist

SCRIPTS = {
    "train.py": DDP,
    "memory.py": "raise MemoryError('too much')\n",
    "silent.py": "import time\ntime.sleep(300)\n",
    "saves.py": (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', os.environ['TOKEN'], flush=True)\n"
        "time.sleep(300)\n"
    ),
}
JOBS: dict[str, dict[str, Any]] = {
    "two-hosts": {"command": "python train.py", "resources": {"nodes": 2, "cpu": 0.5}},
    "memory": {"command": "python memory.py", "retries": {"max": 3}},
    "silent": {"command": "python silent.py", "launch": "env", "grace": "1s", "retries": {"hang_after": "2s"}},
    "stopped": {"command": "python saves.py", "launch": "env", "secrets": ["TOKEN"]},
}


def left_of(home: Path) -> list[str]:
    """Command lines of processes that belong to an attempt in `home`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={home}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
        except OSError:  # It has ended, or is another user's.
            continue
    return found


def test_jobs_succeed_fail_hang_and_stop_on_this_machine(tmp_path: Path) -> None:
    home, code, engines = tmp_path / "home", tmp_path / "code", Backends()
    code.mkdir()
    for name, text in SCRIPTS.items():
        (code / name).write_text(text)
    with JobDatabase(None, home) as store:
        service = JobService(store, engines, Actor("ann", owner=True), wake=lambda _: None)
        controller = JobController(store, engines, home, machine=Amount(8000, 2**20, 0))
        service.put_secret("default", "TOKEN", "s3cret-value")
        ids = {}
        for name, said in JOBS.items():
            spec = TrainingJob.model_validate({"name": name, "code": {"path": str(code)}, **said})
            ids[name] = service.submit(spec, base=code).id

        def job(name: str) -> Job:
            return service.job(ids[name])

        deadline = time.monotonic() + 100
        while not all(job(name).state.is_terminal for name in JOBS):
            assert time.monotonic() < deadline, [job(name) for name in JOBS]
            time.sleep(controller.step())
            if job("stopped").state is JobState.RUNNING and "up" in service.log(ids["stopped"]).text:
                service.stop(ids["stopped"])
        controller.release()

        assert job("two-hosts").state is JobState.SUCCEEDED, job("two-hosts")
        assert [service.log(ids["two-hosts"], rank=rank).text for rank in "01"] == ["RESULT 0 2 2\n", "RESULT 1 2 2\n"]
        failures = {name: job(name).failure for name in ("memory", "silent")}
        assert {name: failure and failure.cause for name, failure in failures.items()} == {
            "memory": Cause.OOM,
            "silent": Cause.HANG,
        }
        assert len(service.attempts(ids["memory"])) == 1
        assert (job("stopped").state, job("stopped").reason) == (JobState.STOPPED, "stopped by ann")
        assert service.log(ids["stopped"]).text == "up ***\nsaved\n"
    assert left_of(home) == []

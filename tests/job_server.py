"""The server of jobs in this process, on a store of its own: for tests of the HTTP interface and the console."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from phalanx.jobs import paths
from phalanx.jobs.api.app import make_app
from phalanx.jobs.api.serve import ListenOptions, address_of, bind
from phalanx.jobs.backend_registry import Backends
from phalanx.jobs.models import Actor, Failure, Job, JobState, MemberRole
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.service.service import JobService
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import JobDatabase
from phalanx.ui.console import add_console

OWNER = Actor("keeper-of-the-house", owner=True)


@dataclass
class JobServer:
    """A server that runs. No controller does: jobs are what a test makes them."""

    url: str
    store: JobDatabase
    home: Path

    def token(self, name: str, role: MemberRole | None = None, workspace: str = "default") -> str:
        """Return a token of `name`, made a member of `workspace` if a role is given."""
        if role is not None:
            self.store.workspaces.put_member(workspace, name, role)
        return self.store.tokens.create("test", Actor(name)).text

    def owner_token(self) -> str:
        """Return a token of the store's owner."""
        return self.store.tokens.create(f"owner-{time.monotonic_ns()}", OWNER).text

    def queue(self, name: str, owner: str = "ada", workspace: str = "default", **said: object) -> Job:
        """Put a job into the store as it is, without the checks of submission."""
        spec = TrainingJob.model_validate(
            {"name": name, "command": "python train.py", "workspace": workspace, "code": {"digest": "0" * 64}} | said
        )
        return self.store.jobs.create(spec, owner=owner)

    def start(self, job: Job) -> Path:
        """Take a job to running; return its attempt's folder, which has one for logs."""
        attempt = self.store.jobs.begin_attempt(job.id)
        folder = paths.attempt_folder(self.home, job.id, attempt.number)
        paths.logs(folder).mkdir(parents=True)
        self.store.jobs.change(job.id, JobState.RUNNING)
        return folder

    def end(self, job: Job, failure: Failure | None = None) -> None:
        """Let a running job end."""
        self.store.jobs.change(job.id, JobState.FAILED if failure else JobState.SUCCEEDED, failure=failure)


def report(folder: Path, rank: int, steps: int, loss: float = 2.0, **more: object) -> None:
    """Write the run events that a rank of a training would."""
    with (paths.logs(folder) / f"events.worker.{rank}.jsonl").open("a") as file:
        for step in range(steps):
            event = {
                "time": 0.1 * step,
                "step": step,
                "loss": loss / (1 + step),
                "samples_per_s": 1000.0 + 7 * rank,
            } | more
            file.write(json.dumps(event) + "\n")


@contextmanager
def job_server(home: Path, *, per_second: float = 10_000, burst: int = 10_000) -> Iterator[JobServer]:
    """Run a server until the block ends."""
    place = ListenOptions(port=0)
    with JobDatabase(None, home) as store, bind(place) as bound:

        def enter(token: str) -> Jobs:
            return JobService(store, Backends(), store.tokens.actor_of(token), wake=lambda _: None)

        bound.listen()  # a client that is faster than the server waits instead of being refused
        app = make_app(enter, per_second=per_second, burst=burst)
        add_console(app)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
        thread.start()
        try:
            yield JobServer(address_of(bound, place), store, home)
        finally:
            server.should_exit = True
            thread.join()

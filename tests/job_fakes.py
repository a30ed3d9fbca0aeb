"""A backend that starts nothing, and who asks, for tests of the service and of what stands on it."""

from __future__ import annotations

from phalanx.errors import SpecError
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.models import Actor
from phalanx.jobs.spec.training_job import TrainingJob

OWNER = Actor("root", owner=True)

VALUE = "hunter2-of-the-test"
"""Of a secret: must be found nowhere."""


class FakeBackend:
    """Takes jobs of one node, and starts nothing."""

    name = "local"

    def check(self, spec: TrainingJob) -> None:
        if spec.resources.nodes > 1:
            raise SpecError("resources.nodes: 2 nodes are asked, there is 1")

    def render(self, submission: Submission, *, full: bool = False) -> str:
        return f"{submission.spec.command} {submission.secrets}"

    def submit(self, submission: Submission) -> str:
        return "handle"

    def status(self, submission: Submission, handle: str) -> Status:
        return Status(Phase.RUNNING)

    def collect(self, submission: Submission, handle: str) -> None: ...
    def stop(self, submission: Submission, handle: str, grace_s: float) -> None: ...
    def cleanup(self, submission: Submission, handle: str) -> None: ...

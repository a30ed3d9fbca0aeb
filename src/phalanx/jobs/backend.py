"""`Backend`: the interface of job backends (local, Slurm, Kubernetes): submit, status, stop, cleanup."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from phalanx.jobs.models import Failure
from phalanx.jobs.spec.training_job import TrainingJob


class Phase(StrEnum):
    """What a backend knows of an attempt. `GONE` is what it no longer knows: finished long ago, or lost."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class Status:
    """An attempt as its backend sees it; `reason` in the backend's own words, as "Resources" or "ImagePullBackOff"."""

    phase: Phase
    reason: str = ""
    nodes: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Submission:
    """One attempt at a job, as it is submitted to a backend.

    Attributes:
        job: The job's id; a backend marks what it starts with `job` and `attempt`, so that it finds it again.
        attempt: Number of the attempt, from 1.
        spec: The resolved spec: commits instead of refs, datasets in full.
        folder: The attempt's own folder (`jobs/paths.py`), which on Slurm all nodes see.
        secrets: Values by name. They go into no file that outlives the attempt, no command line and no manifest.
    """

    job: str
    attempt: int
    spec: TrainingJob
    folder: Path
    secrets: dict[str, str]


class Backend(Protocol):
    """An engine that runs attempts. Every call may be repeated: doing twice what was done once changes nothing.

    `handle` is what `submit` returned; empty if the controller died before it noted that and the job was stopped
    meanwhile. The backend then looks for the attempt by its marks, and returns `GONE` if there is none.
    """

    name: str

    def check(self, spec: TrainingJob) -> None:
        """Raise SpecError if this engine could never run `spec`: too large, an option it lacks, not reachable."""

    def render(self, submission: Submission, *, full: bool = False) -> str:
        """Return what `submit` would submit, as text: a command, a batch script or a manifest.

        Args:
            submission: The attempt.
            full: Whether everything is in it, so that the engine takes it; else what a person reads.
        """

    def submit(self, submission: Submission) -> str:
        """Start the attempt, or find it if it was started before; return the engine's name for it."""

    def status(self, submission: Submission, handle: str) -> Status:
        """Return where the attempt is."""

    def collect(self, submission: Submission, handle: str) -> None:
        """Bring new log text into the attempt's folder; nothing to do where nodes write there themselves."""

    def stop(self, submission: Submission, handle: str, grace_s: float) -> None:
        """Ask the attempt to end, and end it `grace_s` seconds later; returns at once."""

    def cleanup(self, submission: Submission, handle: str) -> None:
        """Remove what the engine still holds of an attempt that has ended: secrets, objects, processes."""

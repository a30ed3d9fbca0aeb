# mypy: disable-error-code="empty-body"
"""`Jobs`: the interface of the jobs API, implemented by the service and by the HTTP client.

The command line is written against `Jobs` alone, so it does the same with and without a server. Each verb is described
and given its HTTP route here, once: the server's routes and the client's requests are made of this class. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from phalanx.jobs.attempt.checkpoints import SavedCheckpoint
from phalanx.jobs.attempt.logs import LogPart
from phalanx.jobs.attempt.metrics import Reports
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.models import (
    Actor,
    Attempt,
    Counts,
    Event,
    Job,
    JobState,
    MemberRole,
    NamedConfig,
    ResourceUse,
    Workspace,
)
from phalanx.jobs.routes import VerbRoute, route
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob

AttemptNumber = Annotated[int | None, Field(ge=1, le=2**31)]
Offset = Annotated[int, Field(ge=-(2**53), le=2**53)]
Label = Annotated[str, Field(min_length=1, max_length=100)]
"""Types of parameters; their limits are checked where a request comes in."""


@dataclass(frozen=True)
class SecretName:
    """A secret of a workspace, without its value: no verb gives that back."""

    workspace: str
    name: str
    created: datetime


@dataclass(frozen=True)
class Token:
    """An API token, without its text. `expires` is None for one that stays until it is removed."""

    name: str
    owner: str
    created: datetime
    expires: datetime | None


@dataclass(frozen=True)
class NewToken:
    """A new token. `text` is shown only once; the store has only its hash."""

    token: Token
    text: str


class Jobs:
    """What one actor may ask. Every verb raises NotFoundError for what the actor may not see, as if it were not there.

    AccessError is raised for what the actor sees and has no role for: a viewer reads; a developer submits, stops
    what is theirs, and edits code sources, datasets and secrets; an admin stops anyone's jobs and manages members. The
    owner of the store may do everything, and is alone in making workspaces.
    """

    def _send(self, route: VerbRoute, arguments: dict[str, Any]) -> Any:
        """Carry out a verb that is not overridden, by its route; only clients of a server need this."""
        raise NotImplementedError(route.operation)

    @route("GET", "/whoami", "get_caller", tag="members")
    def whoami(self) -> Actor:
        """Return the caller."""

    # Jobs.

    @route("POST", "/jobs", "submit_job", status=201, caller_only=("base",))
    def submit(
        self,
        spec: TrainingJob,
        *,
        base: Path | None = None,
        request: Annotated[str | None, Field(max_length=200)] = None,
    ) -> Job:
        """Check and resolve `spec` and queue it.

        Args:
            spec: What to train.
            base: Folder that relative paths in `spec` are meant from; None refuses relative paths.
            request: Any text of the caller's. The same actor submitting again with it gets the job it made first.

        Raises:
            SpecError: If the job could never run as it is written; names everything that was found.
        """

    @route("POST", "/jobs/render", "render_job", caller_only=("base",), unused=("request",), result_key="text")
    def render(self, spec: TrainingJob, *, base: Path | None = None, full: bool = False) -> str:
        """Return what would be submitted to a backend for `spec`, after the checks of `submit`; nothing is stored.

        Args:
            spec: What to train.
            base: Folder that relative paths in `spec` are meant from; None refuses relative paths.
            full: Whether packed code and values of secrets are in it, so that `kubectl apply` takes it; else they are
                left out. Values are given to the owner of the store alone, and not over a server.

        Raises:
            AccessError: If `full` would give values of secrets away.
        """

    @route("GET", "/jobs", "list_jobs", names={"states": "state"}, defaults={"limit": 1000})
    def jobs(
        self,
        workspace: str | None = None,
        *,
        states: Sequence[JobState] = (),
        owner: str | None = None,
        limit: Annotated[int | None, Field(ge=1, le=10_000)] = None,
    ) -> list[Job]:
        """Return jobs, newest first; of one workspace or of all the actor is in."""

    @route("GET", "/jobs/{job}", "get_job")
    def job(self, job: str) -> Job:
        """Return one job by its id."""

    @route("GET", "/jobs/{job}/attempts", "list_attempts")
    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job, first to last."""

    @route("GET", "/jobs/{job}/events", "list_events")
    def events(self, job: str, *, after: Annotated[int, Field(ge=0, le=2**31)] = 0) -> list[Event]:
        """Return what happened to a job since event number `after`, in order."""

    @route("POST", "/jobs/{job}/stop", "stop_job")
    def stop(self, job: str) -> Job:
        """Stop a job; one that has ended is returned as it is."""

    @route("POST", "/jobs/{job}/retry", "retry_job", status=201)
    def retry(self, job: str) -> Job:
        """Resubmit a finished job with the same commit and data, as a new job that names it.

        Raises:
            StateError: If the job has not ended.
        """

    @route("GET", "/jobs/{job}/logs", "list_logs")
    def logs_of(self, job: str, *, attempt: AttemptNumber = None) -> list[str]:
        """Return the names of the logs of an attempt, by default the last: "0", "1", ... of ranks first."""

    @route("GET", "/jobs/{job}/logs/{rank}", "read_log")
    def log(
        self,
        job: str,
        *,
        rank: str = "0",
        attempt: AttemptNumber = None,
        offset: Offset = 0,
        limit: Annotated[int, Field(ge=1, le=2**20)] = 65536,
    ) -> LogPart:
        """Return at most `limit` bytes of one log from byte `offset`; a negative offset counts from the end."""

    @route("GET", "/jobs/{job}/reports", "list_reporting_ranks")
    def reporting(self, job: str, *, attempt: AttemptNumber = None) -> list[str]:
        """Return the ranks of an attempt, by default the last, that report their steps: "worker.0", ..."""

    @route("GET", "/jobs/{job}/reports/{rank}", "read_reports")
    def reports(self, job: str, *, rank: str, attempt: AttemptNumber = None, offset: Offset = 0) -> Reports:
        """Return what one rank reported after byte `offset` of its run events: steps, losses, samples a second."""

    @route("GET", "/jobs/{job}/usage", "read_usage")
    def usage(
        self,
        job: str,
        *,
        node: Annotated[int | None, Field(ge=0, le=2**31)] = None,
        attempt: AttemptNumber = None,
        offset: Offset = 0,
    ) -> list[Usage]:
        """Return what the processes of an attempt, by default the last, used: cores, memory, GPUs.

        Args:
            job: Whose.
            node: Of this node alone; None for each in order. One that left no samples has none.
            attempt: Its number.
            offset: Number of the first sample that is wanted; a negative one counts from the end: -1 is the last.
        """

    @route("GET", "/jobs/{job}/checkpoints", "list_checkpoints")
    def checkpoints(self, job: str) -> list[SavedCheckpoint]:
        """Return the checkpoints that a job has saved, newest first; none of a job whose folder is in its pods."""

    @route("GET", "/jobs/{job}/plan", "draw_plan", is_text=True)
    def plan(self, job: str) -> str:
        """Return the picture of the Plan that the last attempt trains by, as SVG; empty if it left none."""

    @route("GET", "/jobs/{job}/hang", "get_hang", is_text=True)
    def hang(self, job: str) -> str:
        """Return why the job is stalled, as its launcher found it; empty while it continues, or has ended."""

    @route("GET", "/jobs/{job}/slow", "get_slow", is_text=True)
    def slow(self, job: str) -> str:
        """Return which ranks are slow and why, a line each: of the last minute, or of an attempt that has ended."""

    @route("GET", "/jobs/{job}/tables", "get_tables", is_text=True)
    def tables(self, job: str) -> str:
        """Return what the parameter servers of a job that runs hold and answer, as text; empty without any."""

    @route("GET", "/table-metrics", "get_table_metrics", is_text=True)
    def table_metrics(self) -> str:
        """Return what the parameter servers of all running jobs that the actor sees count, as Prometheus text."""

    @route("GET", "/machine", "get_machine")
    def machine(self) -> dict[str, ResourceUse]:
        """Return how much of this machine's resources jobs use: cores, bytes of memory, GPUs."""

    @route("GET", "/counts", "count_jobs")
    def counts(self, workspace: str | None = None) -> Counts:
        """Return how many jobs and attempts there are: of one workspace, or of all that the actor sees."""

    # Workspaces.

    @route("GET", "/workspaces", "list_workspaces", tag="members")
    def workspaces(self) -> list[Workspace]:
        """Return the workspaces the actor is in."""

    @route("PUT", "/workspaces/{workspace}", "add_workspace", tag="members")
    def add_workspace(self, workspace: str) -> Workspace:
        """Create a workspace."""

    @route("DELETE", "/workspaces/{workspace}", "remove_workspace", tag="members", status=204)
    def remove_workspace(self, workspace: str) -> None:
        """Remove a workspace with its code sources, datasets, secrets and records of jobs.

        Raises:
            StateError: If a job in it has not ended.
        """

    @route("PUT", "/workspaces/{workspace}/members/{name}", "put_member", tag="members", status=204)
    def put_member(self, workspace: str, name: str, role: MemberRole) -> None:
        """Add a member to a workspace, or change the role of one."""

    @route("DELETE", "/workspaces/{workspace}/members/{name}", "remove_member", tag="members", status=204)
    def remove_member(self, workspace: str, name: str) -> None:
        """Remove a member."""

    def put_tree(self, workspace: str, archive: Path) -> str:
        """Store the code in a tar archive of regular files; return its digest, for `code.digest` of a spec.

        Raises:
            SpecError: If the archive is broken, or holds links, devices or names that lead out of it.
        """

    # Configurations of a workspace. Putting one that exists replaces it; jobs keep what they were submitted with.

    @route("GET", "/workspaces/{workspace}/codes", "list_codes", tag="configurations")
    def codes(self, workspace: str) -> list[NamedConfig]:
        """Return the code sources of a workspace by name."""

    @route("PUT", "/workspaces/{workspace}/codes/{name}", "put_code", tag="configurations", body="code")
    def put_code(self, workspace: str, name: str, code: Code) -> NamedConfig:
        """Register a code source under a name."""

    @route("DELETE", "/workspaces/{workspace}/codes/{name}", "remove_code", tag="configurations", status=204)
    def remove_code(self, workspace: str, name: str) -> None:
        """Remove a code source."""

    @route("GET", "/workspaces/{workspace}/datasets", "list_datasets", tag="configurations")
    def datasets(self, workspace: str) -> list[NamedConfig]:
        """Return the datasets of a workspace by name."""

    @route("PUT", "/workspaces/{workspace}/datasets", "put_dataset", tag="configurations", body="dataset")
    def put_dataset(self, workspace: str, dataset: Dataset) -> NamedConfig:
        """Register a dataset under its name."""

    @route("DELETE", "/workspaces/{workspace}/datasets/{name}", "remove_dataset", tag="configurations", status=204)
    def remove_dataset(self, workspace: str, name: str) -> None:
        """Remove a dataset."""

    @route("GET", "/workspaces/{workspace}/secrets", "list_secrets", tag="configurations")
    def secrets(self, workspace: str) -> list[SecretName]:
        """Return the names of the secrets of a workspace."""

    @route("PUT", "/workspaces/{workspace}/secrets/{name}", "put_secret", tag="configurations")
    def put_secret(
        self,
        workspace: str,
        name: Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")],
        value: Annotated[str, Field(min_length=1, max_length=65536)],
    ) -> SecretName:
        """Store a secret; it is encrypted, and passed to ranks as an environment variable."""

    @route("DELETE", "/workspaces/{workspace}/secrets/{name}", "remove_secret", tag="configurations", status=204)
    def remove_secret(self, workspace: str, name: str) -> None:
        """Remove a secret."""

    # API tokens.

    @route("GET", "/tokens", "list_tokens", tag="members")
    def tokens(self) -> list[Token]:
        """Return the actor's tokens; all of them for the owner of the store."""

    @route("POST", "/tokens", "add_token", tag="members", status=201)
    def add_token(
        self, name: Label, *, owner: Label | None = None, lasts_s: Annotated[float | None, Field(gt=0, le=3.2e9)] = None
    ) -> NewToken:
        """Create a token of the actor, or of `owner`, which only the owner of the store may.

        Args:
            name: What the token is for; names of one owner's tokens differ.
            owner: Whose it is.
            lasts_s: Seconds until it expires; None for never.
        """

    @route("DELETE", "/tokens/{name}", "remove_token", tag="members", status=204)
    def remove_token(self, name: str, *, owner: str | None = None) -> None:
        """Revoke a token."""

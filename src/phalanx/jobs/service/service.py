"""`JobService`: the jobs API on the store, with permission checks."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from phalanx.errors import AccessError, NotFoundError, PlanError, SpecError, StateError
from phalanx.jobs import paths
from phalanx.jobs.attempt import logs, metrics, usage
from phalanx.jobs.attempt.checkpoints import SavedCheckpoint, list_saved
from phalanx.jobs.attempt.logs import LogPart
from phalanx.jobs.attempt.metrics import Reports
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.backend import Backend, Submission
from phalanx.jobs.backend_registry import BACKENDS
from phalanx.jobs.limits import Limits
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
from phalanx.jobs.protocol import Jobs, NewToken, SecretName, Token
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.fields import Name
from phalanx.jobs.spec.training_job import TrainingJob, secrets_of
from phalanx.jobs.store import JobDatabase
from phalanx.jobs.store.jobs import no_job
from phalanx.jobs.store.workspaces import no_workspace

if TYPE_CHECKING:
    from phalanx.launch.reports.server_status import ServerStatus

logger = logging.getLogger("phalanx.jobs")

_ROLES = list(MemberRole)
_NAME: TypeAdapter[str] = TypeAdapter(Name)

WakeController = Callable[[Path], None]
"""Makes sure that a job controller runs for a home."""


class JobService(Jobs):
    """What `actor` may ask of the jobs in a store; the verbs are described in `protocol.Jobs`.

    Cheap to make, so that a server makes one a request. Safe in several threads.

    Args:
        store: Where everything is kept.
        backends: What runs jobs, by the name that a spec calls it.
        actor: Who asks.
        wake: Called with the store's home when there is work for a controller.
        remote: Whether the actor is another user than the one whose process this is. Such a one may name what
            `jobs/limits` allows of this machine; but the owner of the store may name everything.
    """

    def __init__(
        self,
        store: JobDatabase,
        backends: Mapping[str, Backend],
        actor: Actor,
        *,
        wake: WakeController,
        remote: bool = True,
    ) -> None:
        self._store = store
        self._remote = remote
        self._backends = backends
        self._actor = actor
        self._wake = wake

    def whoami(self) -> Actor:
        return self._actor

    # Jobs.

    def submit(self, spec: TrainingJob, *, base: Path | None = None, request: str | None = None) -> Job:
        self._need(spec.workspace, MemberRole.DEVELOPER)
        existing = (
            None if request is None else self._store.jobs.find_by_request(spec.workspace, self._actor.name, request)
        )
        if existing is None:
            resolved = self._resolve(spec, base)
            existing = self._store.jobs.create(resolved, owner=self._actor.name, request=request)
        self._wake(self._store.home)
        return existing

    def render(self, spec: TrainingJob, *, base: Path | None = None, full: bool = False) -> str:
        self._need(spec.workspace, MemberRole.DEVELOPER)
        resolved = self._resolve(spec, base)
        folder = paths.attempt_folder(self._store.home, resolved.name, 1)
        values = dict.fromkeys(resolved.secrets, "******")
        if full and (names := secrets_of(resolved.model_dump())):
            if self._remote or not self._actor.owner:
                raise AccessError(
                    "No server gives values of secrets away. Render it in full without them, and let the pods take "
                    "them from a secret of the cluster (kubernetes.env_from); or render it where the store is."
                )
            values = self._store.secrets.values(resolved.workspace, names)
        return self._backend(resolved).render(Submission(resolved.name, 1, resolved, folder, values), full=full)

    def jobs(
        self,
        workspace: str | None = None,
        *,
        states: Sequence[JobState] = (),
        owner: str | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        return self._store.jobs.find(workspaces=self._visible(workspace), states=states, owner=owner, limit=limit)

    def _visible(self, workspace: str | None) -> list[str] | None:
        """The workspaces that a question is about: one of them, or all that the actor sees; None for all there are."""
        if workspace is not None:
            self._need(workspace, MemberRole.VIEWER)
            return [workspace]
        return None if self._actor.owner else [space.name for space in self.workspaces()]

    def job(self, job: str) -> Job:
        record = self._store.jobs.get(job)
        if self._role(record.workspace) is None:
            raise no_job(job)  # as if it were not there
        return record

    def attempts(self, job: str) -> list[Attempt]:
        return self._store.jobs.attempts(self.job(job).id)

    def events(self, job: str, *, after: int = 0) -> list[Event]:
        return self._store.jobs.events(self.job(job).id, after=after)

    def stop(self, job: str) -> Job:
        record = self.job(job)
        is_own = record.owner == self._actor.name
        self._need(
            record.workspace, MemberRole.DEVELOPER if is_own else MemberRole.ADMIN, f"stop the job of {record.owner}"
        )
        stopped = self._store.jobs.stop(job, f"stopped by {self._actor.name}")
        if not stopped.state.is_terminal:
            self._wake(self._store.home)
        return stopped

    def retry(self, job: str) -> Job:
        record = self.job(job)
        self._need(record.workspace, MemberRole.DEVELOPER)
        if not record.state.is_terminal:
            raise StateError(f"Job {job} is {record.state}. Only a job that has ended can be retried; stop it first.")
        spec = TrainingJob.model_validate(record.spec)
        if (limits := self._limits()) is not None:
            limits.check_again(spec)
        self._backend(spec).check(spec)
        new_job = self._store.jobs.create(spec, owner=self._actor.name, retry_of=job)
        self._wake(self._store.home)
        return new_job

    # What attempts leave behind.

    def logs_of(self, job: str, *, attempt: int | None = None) -> list[str]:
        record = self.job(job)
        return logs.list_logs(self._folder(record, attempt)) if record.attempt else []

    def log(
        self, job: str, *, rank: str = "0", attempt: int | None = None, offset: int = 0, limit: int = 65536
    ) -> LogPart:
        record = self.job(job)
        if not record.attempt:
            return LogPart("", 0, record.state.is_terminal)
        number = record.attempt if attempt is None else attempt
        ended = record.state.is_terminal or self._attempt(job, number).ended is not None
        folder = self._folder(record, number)
        return logs.read(folder, rank, offset, limit, secrets=self._store.secrets.used_by(record), ended=ended)

    def reporting(self, job: str, *, attempt: int | None = None) -> list[str]:
        record = self.job(job)
        return metrics.ranks(self._folder(record, attempt)) if record.attempt else []

    def reports(self, job: str, *, rank: str, attempt: int | None = None, offset: int = 0) -> Reports:
        record = self.job(job)
        return metrics.read(self._folder(record, attempt), rank, offset) if record.attempt else Reports(rank, [], 0)

    def usage(self, job: str, *, node: int | None = None, attempt: int | None = None, offset: int = 0) -> list[Usage]:
        record = self.job(job)
        if not record.attempt:
            return []
        folder = self._folder(record, attempt)
        nodes = range(record.spec["resources"]["nodes"]) if node is None else [node]
        return [usage.read(folder, number, offset) for number in nodes]

    def checkpoints(self, job: str) -> list[SavedCheckpoint]:
        spec = TrainingJob.model_validate(self.job(job).spec)
        if not BACKENDS[spec.backend].sees_local_paths:
            return []  # the folder is in its pods, and what this machine has at the same path is not the job's
        return list_saved(paths.checkpoints(paths.job_folder(self._store.home, job), spec.checkpoint.dir))

    def plan(self, job: str) -> str:
        from phalanx.plan.files import read_run_plan
        from phalanx.plan.report.explain import explain
        from phalanx.plan.report.picture import picture

        record = self.job(job)
        try:
            plan = read_run_plan(paths.launcher_logs(self._folder(record, None), 0)) if record.attempt else None
            return picture(explain(*plan)) if plan is not None else ""
        except (PlanError, ValueError, OSError) as error:
            # Any script may write into its logs' folder; its page is to be seen all the same.
            logger.warning("job %s left a Plan that cannot be drawn: %s", job, error)
            return ""

    def hang(self, job: str) -> str:
        from phalanx.launch.reports.logs import HANG

        record = self.job(job)
        return "" if record.state.is_terminal else self._report_lines(record, HANG)

    def slow(self, job: str) -> str:
        from phalanx.launch.reports.logs import SLOW

        return self._report_lines(self.job(job), SLOW)

    def tables(self, job: str) -> str:
        from phalanx.launch.reports.server_status import server_lines

        record = self.job(job)
        return "" if record.state.is_terminal else "\n".join(server_lines(self._server_statuses(record)))

    def table_metrics(self) -> str:
        from phalanx.launch.reports.server_status import JobStatuses, prometheus_lines

        running = self.jobs(states=(JobState.RUNNING,))
        jobs = [JobStatuses(job.id, self._server_statuses(job)) for job in running]
        return "".join(f"{line}\n" for line in prometheus_lines(jobs))

    def _server_statuses(self, record: Job) -> list[ServerStatus]:
        from phalanx.launch.reports.server_status import read_statuses

        return read_statuses(logs.server_files(self._folder(record, None))) if record.attempt else []

    def _report_lines(self, record: Job, name: str) -> str:
        """Return the lines of a report that the launcher of a job's last attempt wrote; none where there is none."""
        if not record.attempt:
            return ""
        return logs.read_report(self._folder(record, None), name)

    def machine(self) -> dict[str, ResourceUse]:
        from phalanx.jobs.backends.local import this_machine
        from phalanx.jobs.scheduling.queue import needed_amount

        capacity = this_machine()
        live = [
            job
            for job in self._store.jobs.find(states=[state for state in JobState if not state.is_terminal])
            if job.attempt
        ]
        amounts = [
            needed_amount(TrainingJob.model_validate(job.spec), capacity)
            for job in live
            if BACKENDS[job.backend].uses_this_machine
        ]
        unit = {"cpu": 1e-3, "memory": float(2**20), "gpu": 1.0}
        return {
            name: ResourceUse(sum(getattr(need, name) for need in amounts) * factor, getattr(capacity, name) * factor)
            for name, factor in unit.items()
        }

    def counts(self, workspace: str | None = None) -> Counts:
        return self._store.jobs.counts(self._visible(workspace))

    # Workspaces.

    def workspaces(self) -> list[Workspace]:
        return self._store.workspaces.find(None if self._actor.owner else self._actor.name)

    def add_workspace(self, workspace: str) -> Workspace:
        self._need_owner("make workspaces")
        _check_name("a workspace", workspace)
        return self._store.workspaces.create(workspace)

    def remove_workspace(self, workspace: str) -> None:
        self._need_owner("remove workspaces")
        if workspace == TrainingJob.model_fields["workspace"].default:
            raise StateError(f"Workspace {workspace!r} stays: jobs that name no workspace belong to it.")
        for job in self._store.workspaces.remove(workspace):
            shutil.rmtree(paths.job_folder(self._store.home, job), ignore_errors=True)

    def put_member(self, workspace: str, name: str, role: MemberRole) -> None:
        self._need(workspace, MemberRole.ADMIN)
        self._store.workspaces.put_member(workspace, name, role)

    def remove_member(self, workspace: str, name: str) -> None:
        self._need(workspace, MemberRole.ADMIN)
        self._store.workspaces.remove_member(workspace, name)

    def put_tree(self, workspace: str, archive: Path) -> str:
        from phalanx.jobs.sources import archive as trees
        from phalanx.jobs.sources import code

        self._need(workspace, MemberRole.DEVELOPER)
        with tempfile.TemporaryDirectory(dir=self._store.home, prefix="tree-") as name:
            trees.unpack(archive, Path(name))
            return code.store_tree(Path(name), self._store.home)

    # Configurations of a workspace.

    def codes(self, workspace: str) -> list[NamedConfig]:
        self._need(workspace, MemberRole.VIEWER)
        return self._store.configs.find(workspace, "code")

    def put_code(self, workspace: str, name: str, code: Code) -> NamedConfig:
        self._need(workspace, MemberRole.DEVELOPER)
        _check_name("a code configuration", name)
        if code.name is not None or code.commit or code.digest:
            raise SpecError("A code configuration holds git or path; name, commit and digest belong to a job.")
        if (limits := self._limits()) is not None:
            code = limits.code(code)
        return self._store.configs.save(workspace, "code", name, code.model_dump(mode="json"))

    def remove_code(self, workspace: str, name: str) -> None:
        self._need(workspace, MemberRole.DEVELOPER)
        self._store.configs.remove(workspace, "code", name)

    def datasets(self, workspace: str) -> list[NamedConfig]:
        self._need(workspace, MemberRole.VIEWER)
        return self._store.configs.find(workspace, "dataset")

    def put_dataset(self, workspace: str, dataset: Dataset) -> NamedConfig:
        self._need(workspace, MemberRole.DEVELOPER)
        if dataset.kind is None or dataset.uri is None:
            raise SpecError(f"Dataset {dataset.name!r} has no uri. Give its kind and its uri.")
        if (limits := self._limits()) is not None and dataset.kind == "local":
            # Where it is mounted depends on the job that takes it.
            limits.dataset(dataset.model_copy(update={"mount": None}), sees_local_paths=True)
        return self._store.configs.save(workspace, "dataset", dataset.name, dataset.model_dump(mode="json"))

    def remove_dataset(self, workspace: str, name: str) -> None:
        self._need(workspace, MemberRole.DEVELOPER)
        self._store.configs.remove(workspace, "dataset", name)

    def secrets(self, workspace: str) -> list[SecretName]:
        self._need(workspace, MemberRole.VIEWER)
        return self._store.secrets.names(workspace)

    def put_secret(self, workspace: str, name: str, value: str) -> SecretName:
        self._need(workspace, MemberRole.DEVELOPER)
        if not name.isidentifier() or not name.isascii() or not value or "\0" in value:
            raise SpecError(
                f"The secret {name!r} cannot be an environment variable. Its name takes letters, digits and _, "
                "its value is text that is not empty."
            )
        return self._store.secrets.save(workspace, name, value)

    def remove_secret(self, workspace: str, name: str) -> None:
        self._need(workspace, MemberRole.DEVELOPER)
        self._store.secrets.remove(workspace, name)

    # API tokens.

    def tokens(self) -> list[Token]:
        return self._store.tokens.find(None if self._actor.owner else self._actor.name)

    def add_token(self, name: str, *, owner: str | None = None, lasts_s: float | None = None) -> NewToken:
        if owner is None or owner == self._actor.name:
            return self._store.tokens.create(name, self._actor, lasts_s=lasts_s)
        self._need_owner("make tokens for others")
        return self._store.tokens.create(name, Actor(owner), lasts_s=lasts_s)

    def remove_token(self, name: str, *, owner: str | None = None) -> None:
        if owner is not None and owner != self._actor.name:
            self._need_owner("end tokens of others")
        self._store.tokens.remove(name, owner or self._actor.name)

    # Who may do what.

    def _role(self, workspace: str) -> MemberRole | None:
        members = self._store.workspaces.get(workspace).members
        return MemberRole.ADMIN if self._actor.owner else members.get(self._actor.name)

    def _need(self, workspace: str, least: MemberRole, what: str | None = None) -> None:
        role = self._role(workspace)
        if role is None:
            raise no_workspace(workspace)
        if _ROLES.index(role) < _ROLES.index(least):
            name = self._actor.name
            raise AccessError(
                f"{name} has role {role} in workspace {workspace!r}; to {what or 'do that'} requires {least}. "
                f"An admin of it can change that: phalanx workspace member add {name} {least} -w {workspace}."
            )

    def _need_owner(self, what: str) -> None:
        if not self._actor.owner:
            raise AccessError(f"{self._actor.name} may not {what}: only the owner of {self._store.home} may.")

    # What verbs share.

    def _resolve(self, spec: TrainingJob, base: Path | None) -> TrainingJob:
        from phalanx.jobs.service.resolve import WorkspaceConfigs, resolve

        configs = WorkspaceConfigs(self._store, spec.workspace)
        resolved = resolve(spec, configs=configs, home=self._store.home, base=base, limits=self._limits())
        self._backend(resolved).check(resolved)
        return resolved

    def _limits(self) -> Limits | None:
        return Limits.read(self._store.home) if self._remote and not self._actor.owner else None

    def _backend(self, spec: TrainingJob) -> Backend:
        return self._backends[spec.backend]

    def _attempt(self, job: str, number: int) -> Attempt:
        for attempt in self._store.jobs.attempts(job):
            if attempt.number == number:
                return attempt
        raise NotFoundError(f"Job {job} has no attempt {number}. `phalanx job show {job}` lists its attempts.")

    def _folder(self, job: Job, attempt: int | None) -> Path:
        number = job.attempt if attempt is None else self._attempt(job.id, attempt).number
        return paths.attempt_folder(self._store.home, job.id, number)


def _check_name(what: str, name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise SpecError(
            f"{name!r} cannot be the name of {what}. Write small letters, digits and dashes, 40 at most."
        ) from None

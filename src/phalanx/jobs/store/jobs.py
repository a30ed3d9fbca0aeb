"""`JobRecords`: store of jobs, attempts and events; all job state changes are made here.

Why an attempt failed may quote what it printed: values of the job's secrets are removed before anything is stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from phalanx.errors import NotFoundError, StateError
from phalanx.i18n import tr
from phalanx.jobs.models import Attempt, Cause, Counts, Event, Failure, Job, JobState, QueueLength, may_follow
from phalanx.jobs.redact import redact
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.jobs.store import tables
from phalanx.jobs.store.database import Database
from phalanx.jobs.store.secrets import SecretRecords
from phalanx.jobs.store.workspaces import select_workspace

_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
"""Of ids: none is read as another."""

_JOB_COLUMNS = [column for column in tables.jobs.c if column.name != "request"]


class JobRecords:
    """The jobs in a database. `secrets` are those of the same database."""

    def __init__(self, database: Database, secrets: SecretRecords) -> None:
        self._database = database
        self._secrets = secrets

    def create(self, spec: TrainingJob, *, owner: str, request: str | None = None, retry_of: str | None = None) -> Job:
        """Queue a job.

        Args:
            spec: The resolved spec.
            owner: Who submits it.
            request: Any text of the owner's: a second call with it in this workspace returns the first one's job.
            retry_of: Id of the job that this one tries again.

        Raises:
            NotFoundError: If there is no such workspace.
        """
        if request is not None and (existing := self.find_by_request(spec.workspace, owner, request)):
            return existing
        row: dict[str, Any] = {
            "id": f"{spec.name}-{''.join(secrets.choice(_LETTERS) for _ in range(6))}",
            "workspace": spec.workspace,
            "name": spec.name,
            "owner": owner,
            "state": JobState.QUEUED,
            "reason": "",
            "backend": spec.backend,
            "priority": spec.priority,
            "spec": spec.model_dump(mode="json"),
            "created": self._database.now(),
            "attempt": 0,
            "retry_of": retry_of,
            "request": request,
        }
        try:
            with self._database.writes() as connection:
                select_workspace(connection, spec.workspace, lock=True)
                connection.execute(insert(tables.jobs).values(row))
                data = {"to": JobState.QUEUED} | ({"retry_of": retry_of} if retry_of else {})
                self._append(connection, row["id"], "state", f"submitted by {owner}", data)
                _count(connection)
        except IntegrityError:
            if request is not None and (existing := self.find_by_request(spec.workspace, owner, request)):
                return existing  # the same request came twice at once
            raise
        return self.get(row["id"])

    def find_by_request(self, workspace: str, owner: str, request: str) -> Job | None:
        """Return the job that `owner` submitted with this request, if there is one."""
        c = tables.jobs.c
        same_request = and_(c.workspace == workspace, c.owner == owner, c.request == request)
        with self._database.reads() as connection:
            row = connection.execute(select(*_JOB_COLUMNS).where(same_request)).mappings().one_or_none()
        return None if row is None else _job(row)

    def get(self, job: str) -> Job:
        """Return one job by its id.

        Raises:
            NotFoundError: If there is none.
        """
        with self._database.reads() as connection:
            return self._select_job(connection, job)

    def find(
        self,
        *,
        workspaces: Collection[str] | None = None,
        states: Collection[JobState] = (),
        owner: str | None = None,
        ended_after: datetime | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """Return jobs, newest first.

        Args:
            workspaces: Of these only; None for all.
            states: In one of these only; empty for any.
            owner: Of this owner only.
            ended_after: That ended after this moment only.
            limit: At most so many.
        """
        c = tables.jobs.c
        query = select(*_JOB_COLUMNS).order_by(c.created.desc(), c.id.desc()).limit(limit)
        if workspaces is not None:
            query = query.where(c.workspace.in_(workspaces))
        if states:
            query = query.where(c.state.in_(states))
        if owner is not None:
            query = query.where(c.owner == owner)
        if ended_after is not None:
            query = query.where(c.ended > ended_after)
        with self._database.reads() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def counts(self, workspaces: Collection[str] | None = None) -> Counts:
        """Return how many jobs and attempts there are, in some workspaces or in all."""
        c, a = tables.jobs.c, tables.attempts.c
        in_workspaces = [] if workspaces is None else [c.workspace.in_(workspaces)]
        jobs = select(c.state, func.count()).where(*in_workspaces).group_by(c.state)
        attempts = (
            select(a.state, func.count()).join(tables.jobs, a.job == c.id).where(*in_workspaces).group_by(a.state)
        )
        queue = c.spec["queue"].as_string()
        waits = c.state.in_((JobState.QUEUED, JobState.RESTARTING))
        waiting = select(c.backend, queue, func.count()).where(waits, *in_workspaces).group_by(c.backend, queue)
        with self._database.reads() as connection:
            return Counts(
                {state: count for state, count in connection.execute(jobs)},
                {state: count for state, count in connection.execute(attempts)},
                [QueueLength(backend, name, count) for backend, name, count in connection.execute(waiting)],
            )

    def last_change(self) -> int:
        """Return a number that is larger after a job was made or changed its state."""
        with self._database.reads() as connection:
            return int(connection.execute(select(tables.changes.c.number)).scalar_one())

    def change(
        self,
        job: str,
        state: JobState,
        reason: str = "",
        *,
        failure: Failure | None = None,
        started: datetime | None = None,
    ) -> Job:
        """Bring a job into another state; its attempt that has not ended goes along, and an event is appended.

        Args:
            job: Id of the job.
            state: The state to go to. RESTARTING and terminal ones end the attempt, the former as FAILED.
            reason: Why, for people.
            failure: Why the attempt failed.
            started: When its nodes began, for an attempt that nobody saw running.

        Raises:
            NotFoundError: If there is no such job.
            StateError: If that state may not follow the present one.
        """
        with self._database.writes() as connection:
            self._change(connection, self._select_job(connection, job, lock=True), state, reason, failure, started)
            return self._select_job(connection, job)

    def stop(self, job: str, reason: str) -> Job:
        """Bring a job that has not ended into STOPPING, or STOPPED if nothing of it was started; else leave it."""
        with self._database.writes() as connection:
            record = self._select_job(connection, job, lock=True)
            if record.state.is_terminal or record.state is JobState.STOPPING:
                return record
            idle = record.state is JobState.QUEUED and not self._has_live_attempt(connection, record)
            self._change(connection, record, JobState.STOPPED if idle else JobState.STOPPING, reason, None)
            return self._select_job(connection, job)

    def explain(self, reasons: Mapping[str, str]) -> None:
        """Say why jobs are in the state they are in, by id. It is a view of now: no event is appended."""
        if not reasons:
            return
        c = tables.jobs.c
        new_reason = bindparam("said", type_=c.reason.type)
        statement = (
            update(tables.jobs).where(c.id == bindparam("job"), c.reason != new_reason).values(reason=new_reason)
        )
        with self._database.writes() as connection:
            # In order of ids, so that two who explain never wait for each other's rows.
            connection.execute(
                statement, [{"job": job, "said": _storable(text)} for job, text in sorted(reasons.items())]
            )

    def begin_attempt(self, job: str) -> Attempt:
        """Begin the next attempt at a job that is queued or restarting, before it is submitted to the backend.

        Raises:
            StateError: If the job is in another state, or its last attempt has not ended.
        """
        with self._database.writes() as connection:
            record = self._select_job(connection, job, lock=True)
            if record.state not in (JobState.QUEUED, JobState.RESTARTING) or self._has_live_attempt(connection, record):
                raise StateError(
                    f"Job {job} is {record.state} at attempt {record.attempt}: it can have no new attempt now."
                )
            number = record.attempt + 1
            c = tables.attempts.c
            row = {"job": job, "number": number, "state": JobState.QUEUED, "handle": "", "reason": ""}
            connection.execute(insert(tables.attempts).values(created=self._database.now(), **row))
            connection.execute(update(tables.jobs).where(tables.jobs.c.id == job).values(attempt=number))
            self._append(connection, job, "attempt", f"attempt {number}", {"attempt": number})
            inserted = connection.execute(select(tables.attempts).where(c.job == job, c.number == number))
            return _attempt(inserted.mappings().one())

    def set_handle(self, job: str, number: int, handle: str) -> None:
        """Store the backend's name for an attempt."""
        c = tables.attempts.c
        with self._database.writes() as connection:
            connection.execute(update(tables.attempts).where(c.job == job, c.number == number).values(handle=handle))

    def attempts(self, job: str) -> list[Attempt]:
        """Return the attempts of a job, first to last."""
        c = tables.attempts.c
        with self._database.reads() as connection:
            rows = connection.execute(select(tables.attempts).where(c.job == job).order_by(c.number)).mappings()
            return [_attempt(row) for row in rows]

    def append_event(self, job: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Append an event to a job's history."""
        with self._database.writes() as connection:
            record = self._select_job(connection, job, lock=True)
            secret_values = self._secrets.select_used(connection, record.workspace, record.spec)
            self._append(connection, job, kind, redact(message, secret_values), redact(dict(data or {}), secret_values))

    def events(self, job: str, *, after: int = 0) -> list[Event]:
        """Return the events of a job since number `after`, in order."""
        c = tables.events.c
        with self._database.reads() as connection:
            rows = connection.execute(select(tables.events).where(c.job == job, c.number > after).order_by(c.number))
            return [Event(**row) for row in rows.mappings()]

    def _select_job(self, connection: Connection, job: str, *, lock: bool = False) -> Job:
        query = select(*_JOB_COLUMNS).where(tables.jobs.c.id == job)
        row = connection.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        if row is None:
            raise no_job(job)
        return _job(row)

    def _has_live_attempt(self, connection: Connection, job: Job) -> bool:
        c = tables.attempts.c
        live = select(c.number).where(c.job == job.id, c.number == job.attempt, c.ended.is_(None))
        return connection.execute(live).first() is not None

    def _change(
        self,
        connection: Connection,
        job: Job,
        state: JobState,
        reason: str,
        failure: Failure | None,
        started: datetime | None = None,
    ) -> None:
        if not may_follow(job.state, state):
            raise StateError(f"Job {job.id} is {job.state}; it cannot become {state}. It may have moved on meanwhile.")
        now = self._database.now()
        secret_values = self._secrets.select_used(connection, job.workspace, job.spec)
        redacted = None if failure is None else redact(asdict(failure), secret_values)
        reason = _storable(redact(reason, secret_values))
        values: dict[str, Any] = {"state": state, "reason": reason}
        began = started or (now if state is JobState.RUNNING else None)
        if job.started is None:
            values["started"] = began
        if state.is_terminal:
            values |= {"ended": now, "failure": redacted}
        connection.execute(update(tables.jobs).where(tables.jobs.c.id == job.id).values(values))
        self._follow(connection, job, state, reason, redacted, now, began)
        data = {"from": job.state, "to": state, "attempt": job.attempt} | ({"failure": redacted} if redacted else {})
        self._append(connection, job.id, "state", reason, data)
        _count(connection)

    def _follow(
        self,
        connection: Connection,
        job: Job,
        state: JobState,
        reason: str,
        failure: dict[str, Any] | None,
        now: datetime,
        began: datetime | None,
    ) -> None:
        """Let the attempt that has not ended go along with its job."""
        c = tables.attempts.c
        values: dict[str, Any] = {"state": state, "reason": reason, "started": func.coalesce(c.started, began)}
        if state is JobState.RESTARTING or state.is_terminal:
            values |= {"ended": now, "failure": failure}
        if state is JobState.RESTARTING:
            values["state"] = JobState.FAILED
        live = and_(c.job == job.id, c.number == job.attempt, c.ended.is_(None))
        connection.execute(update(tables.attempts).where(live).values(values))

    def _append(self, connection: Connection, job: str, kind: str, message: str, data: Mapping[str, Any]) -> None:
        c = tables.events.c
        last = connection.execute(select(func.max(c.number)).where(c.job == job)).scalar_one() or 0
        row = {
            "job": job,
            "number": last + 1,
            "time": self._database.now(),
            "kind": kind,
            "message": _storable(message),
        }
        connection.execute(insert(tables.events).values(data=dict(data), **row))


def _storable(text: str) -> str:
    """Return a text that came from a script or an engine without what no database takes in a text."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def no_job(job: str) -> NotFoundError:
    """Return the error of a job that is not there, or that who asks may not see."""
    return NotFoundError(tr("There is no job {name!r}. `phalanx job list` shows those there are.", name=job))


def _count(connection: Connection) -> None:
    connection.execute(update(tables.changes).values(number=tables.changes.c.number + 1))


def _job(row: RowMapping) -> Job:
    return Job(**(dict(row) | {"state": JobState(row["state"]), "failure": _failure(row["failure"])}))


def _attempt(row: RowMapping) -> Attempt:
    return Attempt(**(dict(row) | {"state": JobState(row["state"]), "failure": _failure(row["failure"])}))


def _failure(fields: dict[str, Any] | None) -> Failure | None:
    return None if fields is None else Failure(**(fields | {"cause": Cause(fields["cause"])}))

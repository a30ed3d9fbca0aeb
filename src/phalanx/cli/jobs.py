"""The command `phalanx job`: submit, list, stop and retry training jobs."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from phalanx.cli import job_logs, job_tables
from phalanx.cli.job_spec import in_workspace, read_spec, spec_options
from phalanx.cli.output import CommandGroup, jobs, json_flag, show_json, talk, words
from phalanx.cli.workspaces import workspace
from phalanx.i18n import tr
from phalanx.jobs.models import Job, JobState
from phalanx.jobs.protocol import Jobs
from phalanx.launch.cli.flag_types import EITHER_SPELLING

_LATE = 124
"""Exit code of `wait` when its time is up, as of timeout(1)."""

_STOPPED = 130
_LOOK_S = 0.5


@click.group(
    cls=CommandGroup,
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n  phalanx job run --name hello -- python train.py\n  phalanx job list",
)
def job() -> None:
    """Submit and manage training jobs."""


@job.command(
    epilog="\b\nExample:\n"
    "  phalanx job submit job.yaml --nodes 2\n"
    "  phalanx job submit --name hello --procs-per-node 2 -- python train.py"
)
@spec_options
@click.option("--dry-run", is_flag=True, help="Validate and print the generated script or manifest; submit nothing.")
@click.option("--request", help="Idempotency key: resubmitting with the same key returns the existing job.")
@json_flag
def submit(dry_run: bool, request: str | None, as_json: bool, **options: Any) -> None:
    """Validate a job, queue it and print its id.

    Give a YAML or JSON FILE (flags override it), or only flags and a COMMAND after `--`.
    """
    spec, base = read_spec(options)
    with jobs() as service:
        spec = in_workspace(service, spec)
        if dry_run:
            _print_text(service.render(spec, base=base), as_json)
            return
        new_job = service.submit(spec, base=base, request=request)
    _print_queued(new_job, as_json)


@job.command(epilog="\b\nExample:\n  phalanx job render job.yaml --backend slurm")
@spec_options
@click.option("--full", is_flag=True, help="Include packed code and values of secrets, for kubectl apply.")
@json_flag
def render(full: bool, as_json: bool, **options: Any) -> None:
    """Print what would be submitted to the backend: a command, a batch script or a manifest."""
    spec, base = read_spec(options)
    with jobs() as service:
        _print_text(service.render(in_workspace(service, spec), base=base, full=full), as_json)


@job.command(epilog="\b\nExample:\n  phalanx job run --name hello --procs-per-node 2 -- python train.py")
@spec_options
def run(**options: Any) -> None:
    """Submit a job, stream rank 0's log, and exit with the job's exit code. Ctrl-C stops the job."""
    spec, base = read_spec(options)
    with jobs() as service:
        new_job = service.submit(in_workspace(service, spec), base=base)
        _talk_queued(new_job)
        try:
            job_logs.follow(service, new_job.id)
        except KeyboardInterrupt:
            service.stop(new_job.id)
            talk(
                tr(
                    "Asked {job} to stop; waiting for it to save and end. Ctrl-C once more leaves it to that.",
                    job=new_job.id,
                )
            )
        sys.exit(_wait_and_report(service, [new_job.id]))


@job.command("list", epilog="\b\nExample:\n  phalanx job list --state running --owner ann")
@click.option("-w", "--workspace", help="Filter by workspace.")
@click.option(
    "-s",
    "--state",
    "states",
    type=click.Choice([state.value for state in JobState]),
    multiple=True,
    metavar="STATE",
    help=f"Filter by state (repeatable): {', '.join(state.value for state in JobState)}.",
)
@click.option("--owner", help="Filter by owner.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of jobs.")
@json_flag
def list_jobs(workspace: str | None, states: tuple[str, ...], owner: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first, with state and reason."""
    with jobs() as service:
        records = service.jobs(workspace, states=[JobState(name) for name in states], owner=owner, limit=limit + 1)
    if as_json:
        show_json(records[:limit])
        return
    job_tables.print_jobs(records[:limit])
    if len(records) > limit:
        talk(tr("The newest {limit}. `--limit` shows more, `--state` and `--workspace` choose.", limit=limit))


@job.command(epilog="\b\nExample:\n  phalanx job show 12")
@click.argument("job")
@json_flag
def show(job: str, as_json: bool) -> None:
    """Show job details: phases, attempts, failure reason, resources."""
    with jobs() as service:
        record, attempts, events = service.job(job), service.attempts(job), service.events(job)
        usage = service.usage(job, offset=-1)
    if as_json:
        show_json({"job": record, "attempts": attempts, "events": events, "usage": usage})
    else:
        job_tables.print_job(record, attempts, events, usage)


@job.command(epilog="\b\nExample:\n  phalanx job logs 12 --follow\n  phalanx job logs 12 --rank 3")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job ends (across attempts).")
@click.option("--rank", help="Rank (e.g. 3) or log name from --list. Default: the rank that failed, or 0.")
@click.option("--attempt", type=click.IntRange(1), help="Attempt number. Default: the last.")
@click.option("--list", "names_only", is_flag=True, help="List the names of the logs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object on a line for each part of the log.")
def logs(job: str, follow: bool, rank: str | None, attempt: int | None, names_only: bool, as_json: bool) -> None:
    """Print the log of a rank, by default of the one that failed."""
    with jobs() as service:
        if names_only:
            names = service.logs_of(job, attempt=attempt)
            click.echo(json.dumps(names) if as_json else "\n".join(names))
        elif follow:
            try:
                job_logs.follow(service, job, rank=rank or "0", attempt=attempt, as_json=as_json)
            except KeyboardInterrupt:
                talk(
                    tr(
                        "{job} continues: phalanx job logs -f {job} shows it again, phalanx job stop {job} ends it.",
                        job=job,
                    )
                )
                sys.exit(_STOPPED)
        else:
            job_logs.whole(service, job, rank=rank, attempt=attempt, as_json=as_json)


@job.command(epilog="\b\nExample:\n  phalanx job stop 12 13")
@click.argument("jobs_", metavar="JOB...", nargs=-1, required=True)
@json_flag
def stop(jobs_: tuple[str, ...], as_json: bool) -> None:
    """Stop jobs (SIGTERM, then SIGKILL after the grace period)."""
    with jobs() as service:
        stopped = [service.stop(job_id) for job_id in jobs_]
    if as_json:
        show_json(stopped)
        return
    for job_id in stopped:
        talk(tr("{job}: {state}", job=job_id.id, state=words()(job_id.state)))


@job.command(epilog="\b\nExample:\n  phalanx job retry 12")
@click.argument("job")
@json_flag
def retry(job: str, as_json: bool) -> None:
    """Resubmit a finished job with the same commit and data as a new job; print its id."""
    with jobs() as service:
        new_job = service.retry(job)
    _print_queued(new_job, as_json)


@job.command(epilog="\b\nExample:\n  phalanx job wait 12 13 --timeout 600")
@click.argument("jobs_", metavar="JOB...", nargs=-1, required=True)
@click.option("--timeout", type=click.FloatRange(0), help="Maximum seconds to wait; then the exit code is 124.")
@json_flag
def wait(jobs_: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until jobs have ended; exit with the exit code of the first that failed."""
    with jobs() as service:
        sys.exit(_wait_and_report(service, list(jobs_), timeout=timeout, as_json=as_json))


@job.command(epilog="\b\nExample:\n  phalanx job events 12 --json")
@click.argument("job")
@json_flag
def events(job: str, as_json: bool) -> None:
    """Print the events of a job."""
    with jobs() as service:
        history = service.events(job)
    if as_json:
        show_json(history)
    else:
        job_tables.print_events(history)


@job.command(epilog="\b\nExample:\n  phalanx job checkpoints hello-8p8h7h")
@click.argument("job")
@json_flag
def checkpoints(job: str, as_json: bool) -> None:
    """List the checkpoints that a job has saved, newest first."""
    with jobs() as service:
        saved = service.checkpoints(job)
    if as_json:
        show_json(saved)
    else:
        job_tables.print_checkpoints(saved)


job.add_command(workspace)  # as others nest it


def exit_code(job: Job) -> int:
    """Return the exit code of a command that ran a job: 0, 130 for a stopped job, else the failed rank's own."""
    if job.state is JobState.SUCCEEDED:
        return 0
    if job.state is JobState.STOPPED:
        return _STOPPED
    code = 1 if job.failure is None else job.failure.exit_code or 1
    return 128 - code if code < 0 else code


def _print_queued(job: Job, as_json: bool) -> None:
    if as_json:
        show_json(job)
    else:
        click.echo(job.id)
        _talk_queued(job)


def _print_text(text: str, as_json: bool) -> None:
    """Print what would be submitted, as the HTTP API answers it too."""
    if as_json:
        show_json({"text": text})
    else:
        click.echo(text)


def _talk_queued(job: Job) -> None:
    talk(tr("{job} is queued. Watch it: phalanx job logs -f {job}", job=job.id))


def _wait_and_report(service: Jobs, ids: list[str], *, timeout: float | None = None, as_json: bool = False) -> int:
    """Wait, report how each job ended, and return the first exit code that is not 0."""
    until = None if timeout is None else time.monotonic() + timeout
    records = []
    for job_id in ids:
        records.append(_wait_for_end(service, job_id, until))
        if not as_json:
            _report(records[-1], timeout)
        if not records[-1].state.is_terminal:
            break
    if as_json:
        show_json(records)
    if not records[-1].state.is_terminal:
        return _LATE
    return next((code for code in map(exit_code, records) if code), 0)


def _report(record: Job, timeout: float | None) -> None:
    """Say how a job ended, or that it has not."""
    if record.state.is_terminal:
        job_tables.print_ending(record)
        return
    talk(
        tr(
            "{job} has not ended after {timeout} s; it is {state}.",
            job=record.id,
            timeout=f"{timeout:g}",
            state=words()(record.state),
        )
    )


def _wait_for_end(service: Jobs, job: str, until: float | None) -> Job:
    while True:
        record = service.job(job)
        if record.state.is_terminal or (until is not None and time.monotonic() >= until):
            return record
        time.sleep(_LOOK_S)

"""The command `phalanx job`: submit, list, stop and retry training jobs."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from phalanx.cli import job_logs, job_tables
from phalanx.cli.job_spec import in_workspace, read_spec, spec_options
from phalanx.cli.output import EITHER_SPELLING, CommandGroup, jobs, json_flag, show_json, talk, words
from phalanx.cli.workspaces import workspace
from phalanx.i18n import tr
from phalanx.jobs.models import Job, JobState
from phalanx.jobs.protocol import Jobs

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
            click.echo(service.render(spec, base=base))
            return
        new_job = service.submit(spec, base=base, request=request)
    _print_queued(new_job, as_json)


@job.command(epilog="\b\nExample:\n  phalanx job render job.yaml --backend slurm")
@spec_options
@click.option("--full", is_flag=True, help="Include packed code and values of secrets, for kubectl apply.")
def render(full: bool, **options: Any) -> None:
    """Print what would be submitted to the backend: a command, a batch script or a manifest."""
    spec, base = read_spec(options)
    with jobs() as service:
        click.echo(service.render(in_workspace(service, spec), base=base, full=full))


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
        sys.exit(_wait_and_report(service, [new_job.id], None))


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
def logs(job: str, follow: bool, rank: str | None, attempt: int | None, names_only: bool) -> None:
    """Print the log of a rank, by default of the one that failed."""
    with jobs() as service:
        if names_only:
            click.echo("\n".join(service.logs_of(job, attempt=attempt)))
        elif follow:
            try:
                job_logs.follow(service, job, rank=rank or "0", attempt=attempt)
            except KeyboardInterrupt:
                talk(
                    tr(
                        "{job} goes on: phalanx job logs -f {job} shows it again, phalanx job stop {job} ends it.",
                        job=job,
                    )
                )
                sys.exit(_STOPPED)
        else:
            job_logs.whole(service, job, rank=rank, attempt=attempt)


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
def wait(jobs_: tuple[str, ...], timeout: float | None) -> None:
    """Wait until jobs have ended; exit with the exit code of the first that failed."""
    with jobs() as service:
        sys.exit(_wait_and_report(service, list(jobs_), timeout))


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


def _talk_queued(job: Job) -> None:
    talk(tr("{job} is queued. Watch it: phalanx job logs -f {job}", job=job.id))


def _wait_and_report(service: Jobs, ids: list[str], timeout: float | None) -> int:
    """Wait, report how each job ended, and return the first exit code that is not 0."""
    until = None if timeout is None else time.monotonic() + timeout
    codes = []
    for job_id in ids:
        record = _wait_for_end(service, job_id, until)
        if not record.state.is_terminal:
            talk(
                tr(
                    "{job} has not ended after {timeout} s; it is {state}.",
                    job=job_id,
                    timeout=f"{timeout:g}",
                    state=words()(record.state),
                )
            )
            return _LATE
        job_tables.print_ending(record)
        codes.append(exit_code(record))
    return next((code for code in codes if code), 0)


def _wait_for_end(service: Jobs, job: str, until: float | None) -> Job:
    while True:
        record = service.job(job)
        if record.state.is_terminal or (until is not None and time.monotonic() >= until):
            return record
        time.sleep(_LOOK_S)

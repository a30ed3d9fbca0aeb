"""The command `phalanx job`: submit training, watch it, stop it, try it again."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from phalanx.cli import job_logs, job_tables
from phalanx.cli.job_spec import placed, spec_of, spec_options
from phalanx.cli.output import EITHER_SPELLING, Verbs, jobs, json_flag, show_json, talk, words
from phalanx.cli.workspaces import workspace
from phalanx.jobs.models import Job
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.states import State

_LATE = 124
"""Exit code of `wait` when its time is up, as of timeout(1)."""

_STOPPED = 130
_LOOK_S = 0.5


@click.group(cls=Verbs, context_settings=EITHER_SPELLING)
def job() -> None:
    """Submit training, watch it, stop it, try it again."""


@job.command()
@spec_options
@click.option("--dry-run", is_flag=True, help="Check, print what the backend would be handed, submit nothing.")
@click.option("--request", help="Any text; submitting again with it gives the job of the first time.")
@json_flag
def submit(dry_run: bool, request: str | None, as_json: bool, **said: Any) -> None:
    """Check a job and queue it; print its id.

    The job is a FILE in YAML or JSON, changed by flags, or flags and a COMMAND after `--` alone.
    """
    spec, base = spec_of(said)
    with jobs() as found:
        spec = placed(found, spec)
        if dry_run:
            click.echo(found.render(spec, base=base))
            return
        made = found.submit(spec, base=base, request=request)
    if as_json:
        show_json(made)
    else:
        click.echo(made.id)
        talk("job queued", job=made.id)


@job.command()
@spec_options
@click.option("--full", is_flag=True, help="Leave nothing out: packed code and values of secrets, for kubectl apply.")
def render(full: bool, **said: Any) -> None:
    """Print what the backend would be handed for a job: a command, a batch script, a manifest."""
    spec, base = spec_of(said)
    with jobs() as found:
        click.echo(found.render(placed(found, spec), base=base, full=full))


@job.command()
@spec_options
def run(**said: Any) -> None:
    """Submit a job, show the log of rank 0, and end with the job's exit code. Ctrl-C stops the job."""
    spec, base = spec_of(said)
    with jobs() as found:
        made = found.submit(placed(found, spec), base=base)
        talk("job queued", job=made.id)
        try:
            job_logs.follow(found, made.id)
        except KeyboardInterrupt:
            found.stop(made.id)
            talk("job interrupted", job=made.id)
        sys.exit(_wait_and_say(found, [made.id], None))


@job.command("list")
@click.option("-w", "--workspace", help="Of this workspace only.")
@click.option(
    "-s",
    "--state",
    "states",
    type=click.Choice([state.value for state in State]),
    multiple=True,
    help="In this state; repeat it.",
)
@click.option("--owner", help="Of this owner only.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many.")
@json_flag
def list_jobs(workspace: str | None, states: tuple[str, ...], owner: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first, with why they are in their state."""
    with jobs() as found:
        listed = found.jobs(workspace, states=[State(one) for one in states], owner=owner, limit=limit + 1)
    if as_json:
        show_json(listed[:limit])
        return
    job_tables.listed(listed[:limit])
    if len(listed) > limit:
        talk("job more", limit=limit)


@job.command()
@click.argument("job")
@json_flag
def show(job: str, as_json: bool) -> None:
    """Show a job: its phases with their times, its attempts, why it failed, what it runs and uses."""
    with jobs() as found:
        one, attempts, events = found.job(job), found.attempts(job), found.events(job)
        usage = found.usage(job, offset=-1)
    if as_json:
        show_json({"job": one, "attempts": attempts, "events": events, "usage": usage})
    else:
        job_tables.job(one, attempts, events, usage)


@job.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on while the job lives, across its attempts.")
@click.option("--rank", help="Whose log, as 3, or a name that --list shows. Default: the rank that failed, or 0.")
@click.option("--attempt", type=click.IntRange(1), help="Of this attempt. Default: the last.")
@click.option("--list", "names_only", is_flag=True, help="List the names of the logs.")
def logs(job: str, follow: bool, rank: str | None, attempt: int | None, names_only: bool) -> None:
    """Print the log of a rank: of the one that failed, where one did."""
    with jobs() as found:
        if names_only:
            click.echo("\n".join(found.logs_of(job, attempt=attempt)))
        elif follow:
            try:
                job_logs.follow(found, job, rank=rank or "0", attempt=attempt)
            except KeyboardInterrupt:
                talk("job goes on", job=job)
                sys.exit(_STOPPED)
        else:
            job_logs.whole(found, job, rank=rank, attempt=attempt)


@job.command()
@click.argument("jobs_", metavar="JOB...", nargs=-1, required=True)
@json_flag
def stop(jobs_: tuple[str, ...], as_json: bool) -> None:
    """Ask jobs to end: SIGTERM, and SIGKILL after their grace."""
    with jobs() as found:
        stopped = [found.stop(one) for one in jobs_]
    if as_json:
        show_json(stopped)
        return
    for one in stopped:
        talk("job stopping", job=one.id, state=words()(one.state))


@job.command()
@click.argument("job")
@json_flag
def retry(job: str, as_json: bool) -> None:
    """Submit a job that has ended again: the same commit and data, as a new job; print its id."""
    with jobs() as found:
        made = found.retry(job)
    if as_json:
        show_json(made)
    else:
        click.echo(made.id)
        talk("job queued", job=made.id)


@job.command()
@click.argument("jobs_", metavar="JOB...", nargs=-1, required=True)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait at most; then the exit code is 124.")
def wait(jobs_: tuple[str, ...], timeout: float | None) -> None:
    """Wait until jobs have ended; exit with the code of the first of them that failed."""
    with jobs() as found:
        sys.exit(_wait_and_say(found, list(jobs_), timeout))


@job.command()
@click.argument("job")
@json_flag
def events(job: str, as_json: bool) -> None:
    """Print what happened to a job."""
    with jobs() as found:
        listed = found.events(job)
    if as_json:
        show_json(listed)
    else:
        job_tables.events(listed)


job.add_command(workspace)  # as others nest it


def exit_code(job: Job) -> int:
    """Return what a command that ran a job ends with: 0, 130 for a stopped job, else the failed rank's own code."""
    if job.state is State.SUCCEEDED:
        return 0
    if job.state is State.STOPPED:
        return _STOPPED
    code = 1 if job.failure is None else job.failure.exit_code or 1
    return 128 - code if code < 0 else code


def _wait_and_say(found: Jobs, ids: list[str], timeout: float | None) -> int:
    """Wait, say how each ended, return the first exit code that is not 0."""
    until = None if timeout is None else time.monotonic() + timeout
    codes = []
    for one in ids:
        ended = _ended(found, one, until)
        if not ended.state.terminal:
            talk("job late", job=one, timeout=f"{timeout:g}", state=words()(ended.state))
            return _LATE
        job_tables.ending(ended)
        codes.append(exit_code(ended))
    return next((code for code in codes if code), 0)


def _ended(found: Jobs, job: str, until: float | None) -> Job:
    while True:
        one = found.job(job)
        if one.state.terminal or (until is not None and time.monotonic() >= until):
            return one
        time.sleep(_LOOK_S)

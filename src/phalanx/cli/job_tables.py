"""`print_jobs`, `print_job`: format jobs, attempts and events as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click
from rich.markup import escape
from rich.table import Table

from phalanx.cli.output import console, moment, show_table, talk, words
from phalanx.i18n import language, tr
from phalanx.jobs.attempt.checkpoints import SavedCheckpoint
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.models import Attempt, Event, Failure, Job, JobState
from phalanx.ui.formatting import needs, phases, reason_text, span
from phalanx.units import format_bytes, format_gib

_COLOURS = {JobState.RUNNING: "cyan", JobState.SUCCEEDED: "green", JobState.FAILED: "red", JobState.STOPPED: "yellow"}


def print_jobs(jobs: Sequence[Job]) -> None:
    """Print a table of jobs."""
    say = words()
    if not jobs:
        click.echo(f"{say('no jobs')} {say('no jobs help')}", err=True)
        return
    has_several_workspaces = len({job.workspace for job in jobs}) > 1
    headings = [say("job"), say("state"), say("duration"), say("reason")]
    rows = [[job.id, say(job.state), span(job.started or job.created, job.ended), reason_of(job)] for job in jobs]
    if has_several_workspaces:
        headings.insert(1, say("workspace"))
        for row, job in zip(rows, jobs, strict=True):
            row.insert(1, job.workspace)
    show_table(headings, rows)


def print_checkpoints(checkpoints: Sequence[SavedCheckpoint]) -> None:
    """Print a table of what a job has saved."""
    say = words()
    if not checkpoints:
        click.echo(say("no checkpoints"), err=True)
        return
    headings = [say("checkpoint"), say("step"), say("saved"), say("size"), say("state")]
    rows = [
        [
            checkpoint.folder,
            str(checkpoint.step),
            moment(checkpoint.saved),
            format_bytes(checkpoint.bytes),
            f"{say('checkpoint ' + checkpoint.state)} {checkpoint.why}".strip(),
        ]
        for checkpoint in checkpoints
    ]
    show_table(headings, rows)


def reason_of(job: Job) -> str:
    """Return why a job is in its state: the failure's cause and message, else its reason."""
    if job.failure is None:
        return _reason(job.reason)
    return f"{words()('cause ' + job.failure.cause)}: {_reason(job.failure.message)}"


def _reason(text: str) -> str:
    """Return a sentence about a job in the user's language."""
    return reason_text(language())(text)


def print_ending(job: Job) -> None:
    """Say how a job ended."""
    reason = reason_of(job)
    talk(
        tr(
            "{job}: {state}. {reason}" if reason else "{job}: {state}",
            job=job.id,
            state=words()(job.state),
            reason=reason,
        )
    )
    if job.failure is not None:
        talk(tr("All of it: phalanx job show {job}", job=job.id))


def print_job(record: Job, attempts: Sequence[Attempt], events: Sequence[Event], usage: Sequence[Usage]) -> None:
    """Print everything a person asks about a job."""
    say = words()
    facts = Table.grid(padding=(0, 2))
    colour = _COLOURS.get(record.state, "default")
    facts.add_row(say("job"), f"[bold]{escape(record.id)}[/]")
    facts.add_row(say("state"), f"[{colour}]{say(record.state)}[/]  {escape(_reason(record.reason))}")
    facts.add_row(say("workspace"), f"{escape(record.workspace)}, {say('owner').lower()} {escape(record.owner)}")
    for heading, value in _spec_facts(record):
        facts.add_row(heading, escape(value))
    console().print(facts)
    _failure(record.failure)
    _phases(events, record.ended)
    if attempts:
        _attempts(attempts)
    if any(node.samples for node in usage):
        _usage(usage)


def print_events(history: Sequence[Event]) -> None:
    """Print a table of events."""
    say = words()
    rows = [[moment(event.time), event.kind, _event_text(event)] for event in history]
    show_table([say("time"), say("kind"), say("message")], rows)


def _spec_facts(job: Job) -> list[tuple[str, str]]:
    say, spec = words(), job.spec
    code = spec["code"]
    source = f"{code['git']} @ {(code['commit'] or '')[:12]}" if code.get("git") else code.get("path") or code["digest"]
    facts = [
        (tr("Command"), spec["command"]),
        (say("codes"), source),
        (say("datasets"), ", ".join(f"{data['name']} ({data['uri']})" for data in spec["datasets"])),
        (say("backend"), f"{job.backend}, {spec['launch']}"),
        (say("resources"), needs(say)(job)),
        (say("attempt"), f"{job.attempt} / {1 + spec['retries']['max']}"),
        (tr("Retry of"), job.retry_of or ""),
    ]
    return [(heading, value) for heading, value in facts if value]


def _failure(failure: Failure | None) -> None:
    if failure is None:
        return
    say = words()
    where = [
        f"{say(name).lower()} {value}"
        for name, value in (("node", failure.node), ("rank", failure.rank), ("exit code", failure.exit_code))
        if value is not None
    ]
    message = escape(_reason(failure.message))
    console().print(f"\n[red]{say('cause ' + failure.cause)}[/]: {message}  {', '.join(where)}")
    if failure.detail:
        click.echo(failure.detail.rstrip())


def _phases(events: Sequence[Event], ended: datetime | None) -> None:
    say = words()
    spans = phases(events, ended)
    rows = [[moment(phase.since), say(phase.state), phase.lasted, _reason(phase.reason)] for phase in spans]
    show_table([say("time"), say("state"), say("duration"), say("reason")], rows)


def _attempts(attempts: Sequence[Attempt]) -> None:
    say = words()
    rows = [
        [
            attempt.number,
            say(attempt.state),
            moment(attempt.started),
            span(attempt.started, attempt.ended),
            attempt.handle,
            _reason(attempt.reason if attempt.failure is None else attempt.failure.message),
        ]
        for attempt in attempts
    ]
    show_table([say("attempt"), say("state"), say("started"), say("duration"), say("backend"), say("reason")], rows)


def _usage(usage: Sequence[Usage]) -> None:
    """Print the last sample of every node, with the most memory it had."""
    say = words()
    rows = [
        [
            node.node,
            moment(datetime.fromtimestamp(last.time, UTC)),
            f"{last.cpu:.1f}",
            format_gib(last.memory),
            format_gib(last.peak),
            "" if last.gpu is None else f"{last.gpu:.1f}, {format_gib(last.gpu_memory or 0)}",
        ]
        for node in usage
        for last in node.samples
    ]
    names = ("node", "time", "cpu used", "memory", "memory peak", "gpu used")
    show_table([say(name) for name in names], rows)


def _event_text(event: Event) -> str:
    if event.kind != "state":
        return event.message
    return f"{words()(event.data['to'])}: {event.message}" if event.message else words()(event.data["to"])

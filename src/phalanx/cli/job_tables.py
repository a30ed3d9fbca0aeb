"""Jobs, attempts and events as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click
from rich.markup import escape
from rich.table import Table

from phalanx.cli.output import console, moment, show_table, talk, words
from phalanx.cluster.messages import messages
from phalanx.jobs.attempt.usage import Usage
from phalanx.jobs.models import Attempt, Event, Failure, Job
from phalanx.jobs.states import State
from phalanx.ui.formatting import gib, needs, span

_COLOURS = {State.RUNNING: "cyan", State.SUCCEEDED: "green", State.FAILED: "red", State.STOPPED: "yellow"}


def listed(jobs: Sequence[Job]) -> None:
    """Print a table of jobs."""
    say = words()
    if not jobs:
        click.echo(f"{say('no jobs')} {say('no jobs help')}", err=True)
        return
    spaces = len({job.workspace for job in jobs}) > 1
    headings = [say("job"), say("state"), say("duration"), say("reason")]
    rows = [[job.id, say(job.state), span(job.started or job.created, job.ended), why(job)] for job in jobs]
    if spaces:
        headings.insert(1, say("workspace"))
        for row, job in zip(rows, jobs, strict=True):
            row.insert(1, job.workspace)
    show_table(headings, rows)


def why(job: Job) -> str:
    """Return why a job is in its state: the failure's cause and message, else its reason."""
    return job.reason if job.failure is None else f"{words()('cause ' + job.failure.cause)}: {job.failure.message}"


def ending(job: Job) -> None:
    """Say how a job ended."""
    reason = why(job)
    talk("job ended because" if reason else "job ended", job=job.id, state=words()(job.state), reason=reason)
    if job.failure is not None:
        talk("job detail", job=job.id)


def job(one: Job, attempts: Sequence[Attempt], events: Sequence[Event], usage: Sequence[Usage]) -> None:
    """Print everything a person asks about a job."""
    say = words()
    facts = Table.grid(padding=(0, 2))
    colour = _COLOURS.get(one.state, "default")
    facts.add_row(say("job"), f"[bold]{escape(one.id)}[/]")
    facts.add_row(say("state"), f"[{colour}]{say(one.state)}[/]  {escape(one.reason)}")
    facts.add_row(say("workspace"), f"{escape(one.workspace)}, {say('owner').lower()} {escape(one.owner)}")
    for heading, value in _spec_facts(one):
        facts.add_row(heading, escape(value))
    console().print(facts)
    _failure(one.failure)
    _phases(events)
    if attempts:
        _attempts(attempts)
    if any(one.samples for one in usage):
        _usage(usage)


def events(found: Sequence[Event]) -> None:
    """Print a table of events."""
    say = words()
    rows = [[moment(one.time), one.kind, _event_text(one)] for one in found]
    show_table([say("time"), say("kind"), say("message")], rows)


def _spec_facts(one: Job) -> list[tuple[str, str]]:
    say, spec = words(), one.spec
    code = spec["code"]
    source = f"{code['git']} @ {(code['commit'] or '')[:12]}" if code.get("git") else code.get("path") or code["digest"]
    facts = [
        (messages.text("command"), spec["command"]),
        (say("codes"), source),
        (say("datasets"), ", ".join(f"{data['name']} ({data['uri']})" for data in spec["datasets"])),
        (say("backend"), f"{one.backend}, {spec['launch']}"),
        (say("resources"), needs(one)),
        (say("attempt"), f"{one.attempt} / {1 + spec['retries']['max']}"),
        (messages.text("retry of"), one.retry_of or ""),
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
    console().print(f"\n[red]{say('cause ' + failure.cause)}[/]: {escape(failure.message)}  {', '.join(where)}")
    if failure.detail:
        click.echo(failure.detail.rstrip())


def _phases(events: Sequence[Event]) -> None:
    say = words()
    changes = [event for event in events if event.kind == "state"]
    ends = [event.time for event in changes[1:]] + [datetime.now(UTC)]
    rows = []
    for event, end in zip(changes, ends, strict=True):
        state = State(event.data["to"])
        rows.append([moment(event.time), say(state), "" if state.terminal else span(event.time, end), event.message])
    show_table([say("time"), say("state"), say("duration"), say("reason")], rows)


def _attempts(attempts: Sequence[Attempt]) -> None:
    say = words()
    rows = [
        [
            one.number,
            say(one.state),
            moment(one.started),
            span(one.started, one.ended),
            one.handle,
            one.reason if one.failure is None else one.failure.message,
        ]
        for one in attempts
    ]
    show_table([say("attempt"), say("state"), say("started"), say("duration"), say("backend"), say("reason")], rows)


def _usage(usage: Sequence[Usage]) -> None:
    """Print the last sample of every node, with the most memory it had."""
    say = words()
    rows = [
        [
            one.node,
            moment(datetime.fromtimestamp(last.time, UTC)),
            f"{last.cpu:.1f}",
            gib(last.memory),
            gib(last.peak),
            "" if last.gpu is None else f"{last.gpu:.1f}, {gib(last.gpu_memory or 0)}",
        ]
        for one in usage
        for last in one.samples
    ]
    names = ("node", "time", "cpu used", "memory", "memory peak", "gpu used")
    show_table([say(name) for name in names], rows)


def _event_text(event: Event) -> str:
    if event.kind != "state":
        return event.message
    return f"{words()(event.data['to'])}: {event.message}" if event.message else words()(event.data["to"])

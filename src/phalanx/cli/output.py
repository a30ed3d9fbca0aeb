"""Output of CLI commands: tables or `--json` on stdout, messages on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.errors import SpecError, did_you_mean
from phalanx.i18n import language, tr
from phalanx.jobs.connect import open_jobs
from phalanx.jobs.protocol import Jobs
from phalanx.jobs.spec.training_job import DEFAULT_WORKSPACE
from phalanx.ui.i18n import Say, speaker

ALIASES = {
    "create": "add",
    "status": "show",
    "describe": "show",
    "remove": "rm",
    "delete": "rm",
    "ls": "list",
    "start": "submit",
    "cancel": "stop",
    "log": "logs",
}
"""What other tools call a command."""


class CommandGroup(click.Group):
    """A group of commands that accepts other tools' names for them, and suggests the nearest for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named first in `args`."""
        alias = ALIASES.get(args[0], "") if args[0] not in self.commands else ""
        args = [alias, *args[1:]] if alias in self.commands else args
        if args[0] not in self.commands:
            ctx.fail(f"There is no command '{ctx.command_path} {args[0]}'.{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


F = TypeVar("F", bound=Callable[..., Any])

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
workspace_flag = click.option("-w", "--workspace", help="Workspace. Default: default, or your only one.")


@contextmanager
def jobs() -> Iterator[Jobs]:
    """Open the jobs for a command; what is logged meanwhile goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("phalanx.jobs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with open_jobs() as service:
            yield service
    finally:
        logger.removeHandler(handler)


def workspace_of(service: Jobs, name: str | None) -> str:
    """Return the workspace of a command: the one that was given, `default`, or the only one there is.

    Raises:
        SpecError: If it is none of these, and the user is a member of several.
    """
    if name is not None:
        return name
    names = [workspace.name for workspace in service.workspaces()]
    if DEFAULT_WORKSPACE in names or not names:
        return DEFAULT_WORKSPACE
    if len(names) > 1:
        raise SpecError(tr("You are in several workspaces: {names}. Say which: -w NAME.", names=", ".join(names)))
    talk(tr("in workspace {name}, your only one", name=names[0]))
    return names[0]


@contextmanager
def jobs_in(workspace: str | None) -> Iterator[tuple[Jobs, str]]:
    """Open the jobs for a command about one workspace: that of `workspace_of`."""
    with jobs() as service:
        yield service, workspace_of(service, workspace)


@cache
def words() -> Say:
    """Return the function that translates a word of the console to the user's language."""
    return speaker(language())


def talk(message: str) -> None:
    """Print a message for the user on standard error; standard output is for data."""
    click.echo(message, err=True)


def show_json(value: Any) -> None:
    """Print dataclasses, or what holds them, as JSON."""
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False, indent=1))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows as a table; the first column is never cut, because names are copied from it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading[:1].upper() + heading[1:], no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console().print(table)


def show_change(message: str, value: Any, as_json: bool) -> None:
    """Tell what a command has changed: the message on standard error, or the value as JSON."""
    if as_json:
        show_json(value)
    else:
        talk(message)


def show_removed(what: str, name: str, as_json: bool, **where: str) -> None:
    """Tell that a command has removed something of the store; `what` is its kind in the language of the user."""
    message = tr("{what} {name} is removed.", what=what, name=name)
    show_change(message, {"removed": name, **where}, as_json)


def show_named(headings: Sequence[str], rows: Sequence[Sequence[object]], values: Any, as_json: bool) -> None:
    """Print what a list command found."""
    if as_json:
        show_json(values)
    elif rows:
        show_table(headings, rows)
    else:
        click.echo(words()("none yet"), err=True)


def console() -> Console:
    """Return the console that tables go to."""
    return Console(highlight=False)


def moment(time: datetime | None) -> str:
    """Return a moment in the user's time zone, to the second."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else asdict(value)

"""The page of commands: the help of each, as click prints it on 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click

from phalanx.cli.group import phalanx

_INTRODUCTION = (
    "# Commands\n\nThe help of every command, as `phalanx COMMAND --help` prints it on a terminal of 80 columns.\n"
)


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_INTRODUCTION, *_sections(phalanx, "phalanx", None)])


def _sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, max_content_width=80, terminal_width=80)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            if inner is not None and not inner.hidden:
                yield from _sections(inner, child, context)

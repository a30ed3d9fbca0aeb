"""The help of every command shows an example, whose command and flags exist, on lines of 80 columns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

from phalanx.cli.group import phalanx


def commands(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, click.Context]]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=80, max_content_width=80)
    yield context.command_path, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            yield from commands(inner, child, context)


COMMANDS = dict(commands(phalanx, "phalanx", None))


def examples(context: click.Context) -> list[str]:
    text = context.command.get_help(context)
    shown = [line.strip() for line in text.splitlines()]
    return [line.partition("   ")[0] for line in shown if line.startswith("phalanx ")]


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_has_an_example_that_the_command_takes(path: str) -> None:
    own_path = path.replace("phalanx job workspace", "phalanx workspace")  # the same commands
    lines = [line for line in examples(COMMANDS[path]) if line.startswith(own_path)]
    assert lines, f"{path} --help shows no example"
    for line in lines:
        command: click.Command = phalanx
        words = shlex.split(line)[1:]
        while isinstance(command, click.Group):
            inner = command.get_command(click.Context(command), words[0])
            assert inner is not None, line
            command, words = inner, words[1:]
        declared = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        script = next((i for i, word in enumerate(own) if word.endswith(".py")), len(own))
        takes_script_arguments = command.name in ("run", "verify")
        for word in own[:script] if takes_script_arguments else own:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                assert flag in declared or flag.replace("_", "-") in declared or flag.replace("-", "_") in declared, (
                    line
                )


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_fits_a_terminal_of_80_columns(path: str) -> None:
    context = COMMANDS[path]
    long = [line for line in context.command.get_help(context).splitlines() if len(line) > 80]
    assert long == []

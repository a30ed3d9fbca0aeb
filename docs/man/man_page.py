"""Write phalanx.1, the man page: every command with its flags, as click describes them.

python docs/man/man_page.py     # `make docs` does it; a test compares the file
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from phalanx.cli.group import phalanx

FILE = Path(__file__).with_name("phalanx.1")

_ABOUT = """\
.\\" Written by docs/man/man_page.py from the help of the commands.
.TH PHALANX 1 "" "phalanx" "User Commands"
.SH NAME
phalanx \\- train a PyTorch script in parallel, from a laptop to a cluster
.SH SYNOPSIS
.B phalanx
.I COMMAND
.RI [ OPTIONS ] ...
.SH DESCRIPTION
Each command is described below; \\fBphalanx\\fR \\fICOMMAND\\fR \\fB\\-\\-help\\fR prints the same with examples."""

_ENDING = """\
.SH EXIT STATUS
0: success. 1: the command failed. 2: the command line is wrong.
\\fBphalanx run\\fR and \\fBphalanx job run\\fR end with the status of the script.
.SH ENVIRONMENT
\\fBphalanx env \\-\\-list\\fR shows every variable.
"""


def page() -> str:
    """Return the man page as roff."""
    return "\n".join([_ABOUT, ".SH COMMANDS", *_commands(phalanx, "phalanx", None), _ENDING])


def _commands(group: click.Group, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(group, info_name=name, parent=parent)
    for child in group.list_commands(context):
        command = group.get_command(context, child)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=child, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(command, child, context)
        else:
            yield from _command(command, inner)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    arguments = [word for parameter in command.params for word in parameter.get_usage_pieces(context)]
    yield f".SS {_escaped(' '.join([context.command_path, '[OPTIONS]', *arguments]))}"
    yield from _paragraphs(command.help or "")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield f".TP\n\\fB{_escaped(record[0])}\\fR\n{_escaped(' '.join(record[1].split()))}"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the help of a command; paragraphs that click leaves as they are stay so here."""
    for paragraph in re.split(r"\n[^\S\n]*\n", text.strip()):
        is_verbatim = paragraph.lstrip(" ").startswith("\b")
        lines = [_escaped(line.strip()) for line in paragraph.replace("\b", "").splitlines() if line.strip()]
        yield f".nf\n{chr(10).join(lines)}\n.fi" if is_verbatim else f"{' '.join(lines)}\n.PP"


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


if __name__ == "__main__":
    FILE.write_text(page())

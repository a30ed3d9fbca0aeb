"""Whether `phalanx` has a command and the flags that a page or a file writes after it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from phalanx.cli.group import phalanx


def unknown_flags(words: Sequence[str]) -> list[str]:
    """Return the flags among the words after `phalanx` that its command lacks; a script's own do not count."""
    command: click.Command = phalanx
    while isinstance(command, click.Group):
        inner = command.get_command(click.Context(command), words[0])
        assert inner is not None, f"there is no command: {words}"
        command, words = inner, words[1:]
    ends = [place for place, word in enumerate(words) if word == "--" or word.endswith(".py")]
    flags = {word.partition("=")[0] for word in words[: min(ends, default=len(words))] if word.startswith("-")}
    declared = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return sorted(
        flag for flag in flags if not declared & {flag, flag.replace("_", "-"), f"--{flag[2:].replace('-', '_')}"}
    )

"""`parse_command`: parse a job's command into words, interpreter flags and script (pure)."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_TAKES_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class PythonCommand:
    """`python FLAGS SCRIPT ARGUMENTS` or `python FLAGS -m MODULE ARGUMENTS`; exactly one of the two is set."""

    interpreter: str
    flags: tuple[str, ...]
    script: str | None
    module: str | None
    arguments: tuple[str, ...]


def parse_command(command: str) -> str:
    """Return `command` if it can be split into words without a shell.

    Raises:
        ValueError: If it is empty, a quote is open, or it has an operator of the shell outside quotes.
    """
    if re.search(r"[\x00\ud800-\udfff]", command):
        raise ValueError(f"{command!r} holds what no command can: a zero byte, or half a letter")
    try:
        words = shlex.split(command)
        needs = _shell_syntax(command.strip())
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be cut into words: {error}; close every quote") from None
    if not words:
        raise ValueError("the command is empty; write what starts the training, as: python train.py")
    if needs:
        raise ValueError(
            f"a command is started without a shell, which {needs} needs; put it in a script, or write launch: env and "
            "bash -c '...'"
        )
    return command


def _shell_syntax(command: str) -> str:
    """Return what in a command only a shell understands, in words, or an empty string."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&|;<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = list(lexer)
    for word in words:
        if set(word) and set(word) <= set("&|;<>\n"):
            return "a second line" if "\n" in word else repr(word)
    is_shell = len(words) > 1 and re.fullmatch(r"(?:.*/)?(?:ba|da|z)?sh", words[0])
    variable = re.search(r"\$\w+|\$[{(]|`", re.sub(r"'[^']*'", "", command))
    return repr(variable[0]) if variable and not is_shell else ""


def python_command(command: str) -> PythonCommand | None:
    """Return the parts of a command that starts Python, or None if it starts something else or runs no file."""
    words = shlex.split(command)
    if not words or not re.fullmatch(r"(?:.*/)?python(?:3(?:\.\d+)?)?", words[0]):
        return None
    position = 1
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        flag = words[position]
        if flag == "-m" and position + 1 < len(words):
            rest = tuple(words[position + 2 :])
            return PythonCommand(words[0], tuple(words[1:position]), None, words[position + 1], rest)
        if flag.startswith("-c") or flag == "-m":
            return None
        position += 2 if flag in _TAKES_A_VALUE else 1
    if position >= len(words) or words[position] == "-":
        return None
    return PythonCommand(words[0], tuple(words[1:position]), words[position], None, tuple(words[position + 1 :]))

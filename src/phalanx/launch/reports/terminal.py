"""`fit_terminal`: wrap lines at the width of the terminal, where there is a terminal.

Lines break between words, and between Chinese characters, which take two columns each.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import TextIO

_LEAST = 60
_INDENT = "  "
_CLOSING = frozenset("，。、：；！？）」』》】”’…,.:;!?)]}%")
"""No line begins with these."""

_OPENING = frozenset("（「『《【“‘([{")
"""No line ends with these."""


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal that a stream goes to, by default standard output; None if to none."""
    try:
        columns = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (OSError, ValueError):  # a file, a pipe, or a stream of a test
        return None
    return max(columns, _LEAST) if columns else None


def fit_terminal(text: str, stream: TextIO | None = None) -> str:
    """Return text with its lines wrapped for people; programs get them whole.

    Args:
        text: Any text.
        stream: Where it goes; standard output if omitted.
    """
    width = terminal_width(stream)
    return text if width is None else wrap_lines(text, width)


def wrap_lines(text: str, width: int) -> str:
    """Return text with each line wrapped at a number of columns, and what belongs to one line indented."""
    return "\n".join("\n".join(wrap_line(line, width)) for line in text.split("\n"))


def wrap_line(line: str, width: int, indent: str = _INDENT) -> list[str]:
    """Return the lines that one line becomes; words that are too long, such as paths, stay whole.

    Args:
        line: Without a line break.
        width: Columns of a line.
        indent: What lines after the first begin with, beside the spaces of the first.
    """
    if columns_of(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + indent
    lines, now, spaces, is_empty = [], "", "", True
    for atom in _atoms(line):
        if atom.isspace():
            spaces = atom
            continue
        if not is_empty and columns_of(now + spaces + atom) > width:
            lines.append(now)
            now, spaces = indent, ""
        now, spaces, is_empty = now + spaces + atom, "", False
    return [*lines, now]


def columns_of(text: str) -> int:
    """Return the columns that text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 1 + _is_wide(char) for char in text)


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


def _atoms(line: str) -> list[str]:
    """Return what a line may break between: runs of spaces, words, and wide characters with their punctuation."""
    atoms: list[str] = []
    for char in line:
        if atoms and _stay_together(atoms[-1][-1], char):
            atoms[-1] += char
        else:
            atoms.append(char)
    return atoms


def _stay_together(before: str, char: str) -> bool:
    if before.isspace() or char.isspace():
        return before.isspace() and char.isspace()
    return char in _CLOSING or before in _OPENING or not (_is_wide(before) or _is_wide(char))

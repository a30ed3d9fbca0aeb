"""`fit_terminal`: wrap lines at the width of the terminal, between words, where there is a terminal."""

from __future__ import annotations

import os
import sys
import textwrap

_LEAST = 60
_INDENT = "  "


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output goes to; None where it goes elsewhere."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # a file, a pipe, or a stream of a test
        return None
    return max(columns, _LEAST) if columns else None


def fit_terminal(text: str) -> str:
    """Return text with its lines wrapped for people; programs get them whole."""
    width = terminal_width()
    return text if width is None else wrap_lines(text, width)


def wrap_lines(text: str, width: int) -> str:
    """Return text with each line wrapped between words, and what belongs to one line indented."""
    return "\n".join("\n".join(wrap_line(line, width)) for line in text.split("\n"))


def wrap_line(line: str, width: int) -> list[str]:
    """Return the lines that one line becomes; words that are too long, such as paths, stay whole."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + _INDENT
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

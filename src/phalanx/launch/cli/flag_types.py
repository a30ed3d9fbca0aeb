"""`Count`, `CountOrRange`, `Seconds`, `Port`: values of flags; `EITHER_SPELLING`: of their names."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem


def _normalize(token: str) -> str:
    """Return a flag as it is declared: with - for _; what `phalanx run` calls ranks of a node is known too."""
    name = token.replace("_", "-")
    return "procs-per-node" if name in ("nproc-per-node", "nprocs") else name


EITHER_SPELLING = {"token_normalize_func": _normalize, "help_option_names": ["-h", "--help"]}
"""Settings of a command: flags may be written with _ or -."""


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete an argument to the path of a file."""
    return [CompletionItem(incomplete, type="file")]


class Count(click.ParamType[int]):
    """A whole number of at least `least`; `instead` says what to do for less."""

    name = "N"

    def __init__(self, what: str, least: int = 1, instead: str = "") -> None:
        self._what, self._least, self._instead = what, least, instead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail with what was asked for and what would do."""
        text = str(value)
        if not text.lstrip("-").isdecimal() or int(text) < self._least:
            least = f"at least {self._least}{self._instead}"
            self.fail(f"'{text}' is no {self._what}. Give a whole number, {least}.", param, ctx)
        return int(text)


class CountOrRange(click.ParamType["int | range"]):
    """A whole number, or a range a:b of an elastic job, whose stop is b + 1."""

    name = "N[:N]"

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = Count(what, instead=", or a range as 1:4")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | range:
        """Return the number or the range, or fail with what was asked for and what would do."""
        least_text, colon, most_text = str(value).partition(":")
        if not colon:
            return self._count.convert(value, param, ctx)
        least, most = (self._count.convert(text, param, ctx) for text in (least_text, most_text))
        if least > most:
            self.fail(f"'{value}' is no range: it ends before it starts. Write {most}:{least}.", param, ctx)
        return most if least == most else range(least, most + 1)


class Seconds(click.ParamType[float]):
    """A time that ends; where `zero` says what it means, 0 may be given too."""

    name = "SECONDS"

    def __init__(self, zero: str = "") -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0.0 <= seconds < float("inf") or (seconds == 0.0 and not self._zero):
            zero = f", or 0 {self._zero}" if self._zero else ""
            self.fail(f"'{value}' is no number of seconds. Give one above 0{zero}.", param, ctx)
        return seconds


class Port(click.ParamType[int]):
    """A port a user can bind."""

    name = "PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the port."""
        text = str(value)
        if not text.isdecimal() or not 0 < int(text) < 65536:
            self.fail(f"'{text}' is no port. Give a number from 1 to 65535.", param, ctx)
        return int(text)

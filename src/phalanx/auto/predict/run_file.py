"""Reads described runs from mappings and files of JSON, and says what is wrong with them and where."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.auto.predict.run_spec import Run
from phalanx.cluster.messages.messages import meant, text
from phalanx.cluster.messages.wrong_values import why_wrong
from phalanx.errors import ConfigError

_SOMETHING = re.compile(r"\S")


def read_run(described: Any, where: str = "the run") -> Run:
    """Return a run, checked.

    Args:
        described: A mapping, as a line of a file of runs has it.
        where: Where it comes from, for messages.

    Raises:
        ConfigError: If a key is unknown or missing, or a value cannot be; names the place and what was found.
    """
    if not isinstance(described, Mapping):
        raise ConfigError(text("not an object", place=where, found=type(described).__name__))
    try:
        run = Run.model_validate(dict(described))
        run.device.rate(run.precision)
    except ValidationError as error:
        raise ConfigError(_first(error, where)) from None
    except ConfigError as error:
        raise ConfigError(text("wrong values", place=where, why=_unended(str(error)))) from None
    return run


def read_runs(lines: Iterable[str], where: str) -> list[Run]:
    """Return the runs of a file, checked.

    Args:
        lines: Its text.
        where: Its name, for messages.

    Raises:
        ConfigError: If it is not JSON, or holds a run that cannot be; names the line.
    """
    return [read_run(one, place) for place, one in described_in(lines, where)[0]]


def described_in(lines: Iterable[str], where: str) -> tuple[list[tuple[str, Any]], Counter[str]]:
    """Return the runs of a file, unchecked, with the line that each begins in; and how many collectives of each kind.

    An object about a single collective is no run: `collective` says its kind.

    Args:
        lines: JSON values one after the other, on one line or several each.
        where: Its name, for messages.

    Raises:
        ConfigError: If it is no text, or not JSON; names the line in which the value begins.
    """
    try:
        content = "\n".join(line.removesuffix("\n") for line in lines).removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise ConfigError(text("not text", path=where)) from None
    found, decoder, at, line = [], json.JSONDecoder(), 0, 1
    collectives: Counter[str] = Counter()
    while start := _SOMETHING.search(content, at):
        line += content.count("\n", at, start.start())
        at, place = start.start(), text("line of", path=where, number=line)
        try:
            value, end = decoder.raw_decode(content, at)
        except json.JSONDecodeError as error:
            why = text("not JSON", place=place, why=error.msg, line=error.lineno, column=error.colno)
            raise ConfigError(why) from None
        line, at = line + content.count("\n", at, end), end
        if isinstance(value, dict) and "collective" in value:
            collectives[str(value["collective"])] += 1
        else:
            found.append((place, value))
    return found, collectives


def _first(error: ValidationError, where: str) -> str:
    # A key that is not known explains one that is missing.
    found = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        part: Any = Run
        for name in found["loc"][:-1]:
            part = part.model_fields[str(name)].annotation
        known = [f.alias or name for name, f in part.model_fields.items() if not f.exclude]
        hint = meant(str(found["loc"][-1]), known)
        return text("unknown key", place=where, path=path, nearest=hint, known=", ".join(known))
    why = _unended(why_wrong(found))
    return text("wrong value", place=where, path=path, why=why) if path else text("wrong values", place=where, why=why)


def _unended(sentence: str) -> str:
    return sentence.removesuffix(".").removesuffix("。")

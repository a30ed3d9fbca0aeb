"""`read_run`: read run specs from JSON files, with error positions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.auto.predict.run_spec import RunSpec
from phalanx.cluster.validation_errors import why_wrong
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr

_SOMETHING = re.compile(r"\S")


def read_run(described: Any, where: str = "the run") -> RunSpec:
    """Return a run, checked.

    Args:
        described: A mapping, as a line of a file of runs has it.
        where: Where it comes from, for messages.

    Raises:
        ConfigError: If a key is unknown or missing, or a value cannot be; names the place and what was found.
    """
    if not isinstance(described, Mapping):
        raise ConfigError(
            tr(
                "{place}: a run is a JSON object, found {found}. Write {{...}}.",
                place=where,
                found=type(described).__name__,
            )
        )
    try:
        run = RunSpec.model_validate(dict(described))
        run.device.rate(run.precision)
    except ValidationError as error:
        raise ConfigError(_first_error(error, where)) from None
    except ConfigError as error:
        raise ConfigError(tr("{place}: {why}.", place=where, why=_without_period(str(error)))) from None
    return run


def read_runs(lines: Iterable[str], where: str) -> list[RunSpec]:
    """Return the runs of a file, checked.

    Args:
        lines: Its text.
        where: Its name, for messages.

    Raises:
        ConfigError: If it is not JSON, or holds a run that cannot be; names the line.
    """
    return [read_run(description, position) for position, description in parse_runs(lines, where)[0]]


def parse_runs(lines: Iterable[str], where: str) -> tuple[list[tuple[str, Any]], Counter[str]]:
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
        raise ConfigError(tr("{path} is no text in UTF-8. Give a file of JSON.", path=where)) from None
    runs, decoder, at, line = [], json.JSONDecoder(), 0, 1
    collectives: Counter[str] = Counter()
    while start := _SOMETHING.search(content, at):
        line += content.count("\n", at, start.start())
        at, position = start.start(), tr("{path}, line {number}", path=where, number=line)
        try:
            value, end = decoder.raw_decode(content, at)
        except json.JSONDecodeError as error:
            why = tr(
                "{place}: not JSON ({why} in line {line}, column {column}). Write each run as a JSON object.",
                place=position,
                why=error.msg,
                line=error.lineno,
                column=error.colno,
            )
            raise ConfigError(why) from None
        line, at = line + content.count("\n", at, end), end
        if isinstance(value, dict) and "collective" in value:
            collectives[str(value["collective"])] += 1
        else:
            runs.append((position, value))
    return runs, collectives


def _first_error(error: ValidationError, where: str) -> str:
    # A key that is not known explains one that is missing.
    first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        part: Any = RunSpec
        for name in first["loc"][:-1]:
            part = part.model_fields[str(name)].annotation
        fields = [f.alias or name for name, f in part.model_fields.items() if not f.exclude]
        hint = suggest(str(first["loc"][-1]), fields)
        return tr(
            "{place}: {path} is not known.{nearest} Known: {known}.",
            place=where,
            path=path,
            nearest=hint,
            known=", ".join(fields),
        )
    why = _without_period(why_wrong(first))
    return (
        tr("{place}: {path}: {why}.", place=where, path=path, why=why)
        if path
        else tr("{place}: {why}.", place=where, why=why)
    )


def _without_period(sentence: str) -> str:
    return sentence.removesuffix(".").removesuffix("。")

"""Read a `TrainingJob` from YAML, settings and flags, with errors per field."""

from __future__ import annotations

import json
import logging
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from phalanx.errors import SpecError, did_you_mean
from phalanx.i18n import tr
from phalanx.jobs.spec import dlc
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob

logger = logging.getLogger("phalanx.jobs")


def read(
    source: Path | str | None = None, *, settings: Iterable[str] = (), flags: Mapping[str, Any] | None = None
) -> TrainingJob:
    """Return a job from `source`, `settings` and `flags`, of which later ones override earlier ones.

    Args:
        source: A path of a YAML or JSON file, or such text itself. The body of a CreateJob request of PAI-DLC is taken
            too; what of it means nothing here is logged as warnings.
        settings: As `resources.nodes=2`, the value in YAML.
        flags: Values by dotted field; None leaves a field as it is.

    Raises:
        SpecError: If the file cannot be read, or a field is unknown, missing or cannot be as it is; names every one.
    """
    fields = {} if source is None else _parse(source)
    if dlc.is_request(fields):
        fields, left_out = dlc.translate(fields)
        for line in left_out:
            logger.warning("not taken over: %s", line)
    for field, value in [*map(_setting, settings), *(flags or {}).items()]:
        if value is not None:
            _set_field(fields, field, value)
    return validate(TrainingJob, fields)


ModelT = typing.TypeVar("ModelT", TrainingJob, Code, Dataset)


def validate(model: type[ModelT], fields: Mapping[str, Any] | str) -> ModelT:
    """Return `fields` as a job, code or dataset; the last two also from their short forms.

    Raises:
        SpecError: If a field is unknown, missing or cannot be as it is; names every one.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
    lines = [_describe(model, detail) for detail in mistakes]
    what = {"TrainingJob": "job", "Code": "code", "Dataset": "dataset"}[model.__name__]
    raise SpecError(f"this is no {what} that could run:\n  " + "\n  ".join(lines))


MOST_VALUES = 100_000
"""Most values of a file: nine lines of aliases of aliases stand for a billion."""

_LONGEST_NUMBER = 256
"""Bits."""

_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""What PyYAML raises for text that is none: dates as 2020-99-99 and tags as `!!int x` end in Python's own errors."""


# -- reading ---------------------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"[-+]?(0b[0-1_]+|0[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
"""A whole number. YAML 1.1 also reads 1:4 as one, of base 60."""


class _Loader(yaml.SafeLoader):
    """YAML where `on`, `off`, `yes` and `no` are words, `1:4` is a range, and no key is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, _NUMBER if tag == "tag:yaml.org,2002:int" else pattern)
        for tag, pattern in resolvers
        if tag != "tag:yaml.org,2002:bool" or letter in "tTfF"
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _yaml(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, _Loader)
        if _count_values(value, {}) > MOST_VALUES:
            raise SpecError(
                f"{where} holds more than {MOST_VALUES:,} values once its aliases (`*name`) stand for what they name. "
                "Write out what the job needs."
            )
    except SpecError:
        raise
    except _YAML_ERRORS as error:
        raise SpecError(f"{where} is neither YAML nor JSON: {error}.") from None
    return value


def _count_values(value: Any, counts: dict[int, int]) -> int:
    """Count the values of a tree in which one may be there many times, as aliases have it.

    Raises:
        ValueError: If a value holds itself, or is a number that no field can take.
    """
    if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        raise ValueError("a number is too long")  # Python refuses to write it out in a message
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        counts[id(value)] = 0  # until all inside are counted
        inner = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count_values(item, counts) for item in inner)
    elif not counts[id(value)]:
        raise ValueError("an alias stands for what holds it")
    return counts[id(value)]


def _parse(source: Path | str) -> dict[str, Any]:
    where = str(source) if isinstance(source, Path) else "the text of the job"
    try:
        text = source.read_text() if isinstance(source, Path) else source
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(
            tr("cannot read the job in {where}: {why}. Give a YAML or JSON file.", where=where, why=why)
        ) from None
    fields = _yaml(text, where)
    if not isinstance(fields, dict):
        raise SpecError(f"{where} holds {_quote(fields)}, no job. Write fields as `name: mnist` and `command: ...`.")
    return fields


def _setting(text: str) -> tuple[str, Any]:
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise SpecError(f"{text!r} sets nothing. Write FIELD=VALUE, as resources.nodes=2.")
    return field.strip(), _yaml(value, f"the value of {field}")


def _set_field(fields: dict[str, Any], field: str, value: Any) -> None:
    *parents, last = field.split(".")
    inner = fields
    for position, name in enumerate(parents):
        below = inner.get(name)
        # A short form, as `code: "."`, gives way to its fields.
        inner[name] = dict(below) if isinstance(below, dict) else {}
        if isinstance(below, list):
            raise SpecError(f"{field} cannot be set: {'.'.join(parents[: position + 1])} is a list. Set all of it.")
        inner = inner[name]
    inner[last] = value


# -- words of errors -------------------------------------------------------------------------------------------------


_PATTERNS = {
    "^(secret|configmap)": "secret/NAME or configmap/NAME",
    "^[a-z0-9]": "small letters, digits and dashes, 40 at most",
    "^[A-Za-z_]": "letters, digits and underscores",
    "^[0-9a-f]{40}": "the 40 digits of a commit",
    r"^[^\x00]": "text without a zero byte",
    r"^[^\x00-": "one line, without control characters",
    "^[0-9a-f]{64}": "64 hexadecimal digits, as `sha256sum FILE` prints them",
}


def _describe(model: type[BaseModel], detail: ErrorDetails) -> str:
    where = ".".join(map(str, detail["loc"]))
    words = describe_mistake(model, detail)
    return f"{where}: {words}" if where else words


def describe_mistake(model: type[BaseModel], detail: ErrorDetails) -> str:
    """Return what a mistake found in the JSON of a `model` is, and what to write instead."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    last = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        return f"there is no such field.{did_you_mean(last, _model_at(model, detail['loc'][:-1]).model_fields)}"
    if kind == "missing":
        description = _model_at(model, detail["loc"][:-1]).model_fields[last].description
        return f"is missing.{'' if description is None else ' ' + description.splitlines()[0]}"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("literal_error", "enum"):
        allowed = context["expected"].replace(" or ", ", ")
        return (
            f"{_quote(value)} is none of {allowed}.{did_you_mean(str(value), allowed.replace(chr(39), '').split(', '))}"
        )
    if kind == "string_pattern_mismatch":
        patterns = (words for start, words in _PATTERNS.items() if context["pattern"].startswith(start))
        return f"{_quote(value)} cannot be; write {next(patterns, 'what fits ' + context['pattern'])}"
    if detail["loc"][:1] == ("env",) and kind == "string_type":
        return "the value is no text; write it in quotes"
    return f"{detail['msg'][0].lower()}{detail['msg'][1:]}, found {_quote(value)}"


def _model_at(model: type[BaseModel], location: Iterable[str | int]) -> type[BaseModel]:
    for name in location:
        if isinstance(name, str):
            model = next(_models_in(model.model_fields[name].annotation))
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)


def _quote(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

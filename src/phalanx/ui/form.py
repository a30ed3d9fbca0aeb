"""`fields`, `collect`: generate an HTML form from the job's JSON schema, and parse submitted forms (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

from phalanx.i18n import wording

Kind = Literal["text", "number", "choice", "yes", "lines", "pairs", "yaml", "group"]


@dataclass(frozen=True)
class Field:
    """One field of the form, or a group of them.

    Attributes:
        path: Where its value lies in the job: `resources.nodes`; also the name of the input.
        label: What it is called, in the visitor's language.
        kind: What is shown: `lines` is one value a line, `pairs` one NAME=value a line, `yaml` objects.
        value: What is filled in, as text.
        shown: What the job means when it is left empty.
        options: Values that the workspace offers: names of its datasets, secrets, code sources.
    """

    path: str
    label: str
    kind: Kind
    help: str = ""
    required: bool = False
    value: str = ""
    shown: str = ""
    choices: tuple[str, ...] = ()
    error: str = ""
    options: tuple[str, ...] = ()
    fields: tuple[Field, ...] = field(default=())

    @property
    def name(self) -> str:
        """What the job's YAML calls it."""
        return self.path.rpartition(".")[2]

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that are filled in: those among the options, and others that a job to copy has."""
        return tuple(line for line in self.value.splitlines() if line.strip())

    @property
    def open(self) -> bool:
        """Whether a group has something filled in or wrong, and is so shown unfolded."""
        return any(child.value or child.error or child.open for child in self.fields)


def fields(
    schema: Mapping[str, Any],
    filled: Mapping[str, str],
    errors: Mapping[str, str],
    hidden: frozenset[str] = frozenset(),
    labels: Mapping[str, str] | None = None,
    options: Mapping[str, Sequence[str]] | None = None,
    language: str = "en",
) -> list[Field]:
    """Return the fields of the job that `schema` describes.

    Args:
        schema: `TrainingJob.model_json_schema()`.
        filled: What is filled in, by path.
        errors: What is wrong, by path.
        hidden: Paths that are not asked for.
        labels: What fields are called, by path; the schema's names where there is none.
        options: Values that the workspace offers, by path.
        language: Of labels and of what fields mean: "en" or "zh".
    """
    all_fields = _fields(schema, schema, "", filled, errors, hidden)
    return _describe(all_fields, labels or {}, options or {}, language)


def _describe(
    form_fields: Sequence[Field],
    labels: Mapping[str, str],
    options: Mapping[str, Sequence[str]],
    language: str,
) -> list[Field]:
    return [
        replace(
            child,
            label=wording(labels.get(child.path, child.label), language),
            help=wording(child.help, language),
            options=tuple(options.get(child.path, ())),
            fields=tuple(_describe(child.fields, labels, options, language)),
        )
        for child in form_fields
    ]


def _fields(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    prefix: str,
    filled: Mapping[str, str],
    errors: Mapping[str, str],
    hidden: frozenset[str],
) -> list[Field]:
    form_fields = []
    for name, property_schema in schema["properties"].items():
        path = f"{prefix}{name}"
        if path in hidden or "const" in property_schema:
            continue
        inner = _resolve(property_schema, root)
        if "properties" in inner:
            parts = tuple(_fields(inner, root, f"{path}.", filled, errors, hidden))
            form_fields.append(
                Field(path, name, "group", _help(property_schema, inner), error=errors.get(path, ""), fields=parts)
            )
            continue
        form_fields.append(
            Field(
                path=path,
                label=name,
                kind=_kind(inner, root),
                help=_help(property_schema, inner),
                required=name in schema.get("required", ()),
                value=filled.get(path, ""),
                shown=_format_default(property_schema.get("default")),
                choices=tuple(inner.get("enum", ())),
                error=errors.get(path, ""),
            )
        )
    return form_fields


def _resolve(property_schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind a reference, or the one beside null."""
    if "$ref" in property_schema:
        target: Mapping[str, Any] = root["$defs"][property_schema["$ref"].rpartition("/")[2]]
        return _resolve(target, root)
    if "anyOf" in property_schema:
        return _resolve(next(option for option in property_schema["anyOf"] if option.get("type") != "null"), root)
    return property_schema


def _help(property_schema: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    # A line break in a docstring is where the line was full.
    return " ".join(str(property_schema.get("description") or inner.get("description") or "").split())


def _kind(inner: Mapping[str, Any], root: Mapping[str, Any]) -> Kind:
    if "enum" in inner:
        return "choice"
    match inner.get("type"):
        case "integer" | "number":
            return "number"
        case "boolean":
            return "yes"
        case "array":
            return "yaml" if "properties" in _resolve(inner["items"], root) else "lines"
        case "object":
            values = next(iter(inner.get("patternProperties", {}).values()), inner.get("additionalProperties"))
            return "pairs" if isinstance(values, Mapping) and "type" in _resolve(values, root) else "yaml"
    return "text"


def _format_default(default: Any) -> str:
    if default is None or default in ({}, [], ()):
        return ""
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return str(default)


def collect(schema: Mapping[str, Any], filled: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the job that was filled in, as JSON without what was left empty, and what could not be read, by path."""
    job: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for leaf in _leaves(fields(schema, {}, {})):
        text = filled.get(leaf.path, "").strip()
        if not text:
            continue
        try:
            _set_value(job, leaf.path, _read(leaf.kind, text))
        except ValueError as error:
            errors[leaf.path] = str(error)
    return job, errors


def _leaves(form_fields: list[Field] | tuple[Field, ...]) -> list[Field]:
    return [leaf for child in form_fields for leaf in (_leaves(child.fields) if child.kind == "group" else [child])]


def _read(kind: Kind, text: str) -> Any:
    if kind == "lines":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if kind == "pairs":
        # Values may have other characters that end lines elsewhere.
        return dict(_pair(line) for line in text.replace("\r\n", "\n").split("\n") if line.strip())
    if kind == "yaml":
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"This is no YAML: {error}") from None
    if kind == "yes":
        return text == "true"
    return text.replace("\r\n", "\n")  # as browsers send lines


def _pair(line: str) -> tuple[str, str]:
    name, sign, value = line.partition("=")
    if not sign:
        raise ValueError(f"Write NAME=value on each line, not {line.strip()!r}")
    return name.strip(), _unquote(value) or value


def _unquote(value: str) -> str:
    """Return the text that a JSON string stands for, if `_quote` would write it so; empty if not."""
    if not value.startswith('"'):
        return ""
    try:
        text: str = json.loads(value)
    except ValueError:
        return ""
    return text if _needs_quotes(text) else ""


def _quote(text: str) -> str:
    """Return a value on one line: one of several lines, or that would be taken for such a one, as a JSON string."""
    return json.dumps(text, ensure_ascii=False) if _needs_quotes(text) else text


def _needs_quotes(text: str) -> bool:
    return "\n" in text or "\r" in text or bool(_unquote(text))


def _set_value(job: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        job = job.setdefault(name, {})
    job[last] = value


def filled_from(schema: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, str]:
    """Return what the form shows for `job`, by path: the way back from `collect`."""
    texts = {leaf.path: _format_value(leaf.kind, _at(job, leaf.path)) for leaf in _leaves(fields(schema, {}, {}))}
    return {path: text for path, text in texts.items() if text is not None}


def _at(job: Mapping[str, Any], path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _format_value(kind: Kind, value: Any) -> str | None:
    if value is None:
        return None
    if kind == "lines":
        return "\n".join(value)
    if kind == "pairs":
        return "\n".join(f"{name}={_quote(part)}" for name, part in value.items())
    if kind == "yaml":
        return (
            str(yaml.safe_dump(value if isinstance(value, Mapping) else list(value), sort_keys=False)) if value else ""
        )
    return str(value).lower() if isinstance(value, bool) else str(value)

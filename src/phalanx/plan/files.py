"""`save_plan`, `load_plan`: save and load Plans as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from phalanx.cluster.validation_errors import why_wrong
from phalanx.errors import PlanError
from phalanx.files import write_atomically
from phalanx.i18n import suggest, tr
from phalanx.plan import value as values
from phalanx.plan.shape import ModelShape
from phalanx.plan.value import Plan, Value

_PLAN, _SHAPE = "plan.json", "shape.json"
_shapes = TypeAdapter(ModelShape)

_FIELDS = {
    name
    for kind in vars(values).values()
    if isinstance(kind, type) and issubclass(kind, Value)
    for name in kind.model_fields
}


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a Plan as indented JSON; defaults are left out, so the file says only what was decided."""
    Path(path).write_text(_to_json(plan))


def _to_json(plan: Plan) -> str:
    return json.dumps({"version": plan.version, **non_defaults(plan)}, indent=2) + "\n"


def non_defaults(value: Any) -> Any:
    """Return a part of a Plan as plain values, without what is the default."""
    if isinstance(value, Value):
        fields = type(value).model_fields
        return {
            name: non_defaults(item)
            for name, item in value
            if name == "kind" or item != fields[name].get_default(call_default_factory=True)
        }
    if isinstance(value, dict):
        return {name: non_defaults(item) for name, item in value.items()}
    return [non_defaults(item) for item in value] if isinstance(value, tuple) else value


def load_plan(path: str | Path) -> Plan:
    """Read a Plan.

    Raises:
        PlanError: If the file cannot be read or does not hold a Plan; names the field and what was found.
    """
    try:
        plan = Plan.model_validate_json(Path(path).read_bytes(), strict=True)
    except FileNotFoundError:
        raise PlanError(
            tr("no Plan at {path}. Write one with phalanx.plan.save_plan(plan, path).", path=path)
        ) from None
    except OSError as error:
        raise PlanError(
            tr("the Plan in {path} cannot be read: {why}. Name a file.", path=path, why=error.strerror)
        ) from None
    except ValidationError as error:
        raise PlanError(
            tr("{path} does not hold a Plan: {why}", path=path, why="; ".join(map(_describe_error, error.errors())))
        ) from None
    if "version" not in plan.model_fields_set:
        raise PlanError(
            tr(
                "{path} does not hold a Plan: {why}",
                path=path,
                why=tr('it has no version. Write "version": 1, as save_plan does'),
            )
        )
    return plan


def _describe_error(error: ErrorDetails) -> str:
    """Return where a file is wrong, and what was found there."""
    *before, last = map(str, error["loc"] or ("plan",))
    where = ".".join((*before, last))
    if error["type"] == "extra_forbidden":
        return tr("{path}: there is no such field.{nearest}", path=where, nearest=suggest(last, _FIELDS))
    return tr("{path}: {why}", path=where, why=why_wrong(error))


def write_run_plan(plan: Plan, shape: ModelShape, folder: Path) -> None:
    """Write a Plan (`plan.json`) and the shape of its model (`shape.json`) beside a run's logs, for who watches it."""
    (folder / _SHAPE).write_bytes(_shapes.dump_json(shape))
    write_atomically(folder / _PLAN, _to_json(plan))  # last: a reader who sees it finds both


def read_run_plan(folder: Path) -> tuple[Plan, ModelShape] | None:
    """Return what `write_run_plan` wrote to a folder; None if nothing was."""
    if not (folder / _PLAN).is_file():
        return None
    return load_plan(folder / _PLAN), _shapes.validate_json((folder / _SHAPE).read_bytes())

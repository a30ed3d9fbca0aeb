"""Plans as files people read and edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.errors import PlanError
from phalanx.plan.value import Plan, Value


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a Plan as indented JSON; defaults are left out, so the file says only what was decided."""
    Path(path).write_text(json.dumps({"version": plan.version, **_decided(plan)}, indent=2) + "\n")


def _decided(value: Any) -> Any:
    if isinstance(value, Value):
        fields = type(value).model_fields
        return {
            name: _decided(found)
            for name, found in value
            if name == "kind" or found != fields[name].get_default(call_default_factory=True)
        }
    if isinstance(value, dict):
        return {name: _decided(found) for name, found in value.items()}
    return [_decided(found) for found in value] if isinstance(value, tuple) else value


def load_plan(path: str | Path) -> Plan:
    """Read a Plan.

    Raises:
        PlanError: If the file is missing or does not hold a Plan; names the field and what was found.
    """
    try:
        return Plan.model_validate_json(Path(path).read_bytes())
    except FileNotFoundError:
        raise PlanError(f"no Plan at {path}. Write one with phalanx.plan.save_plan(plan, path).") from None
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())
        raise PlanError(f"{path} does not hold a Plan: {found}") from None

"""`why_wrong`: turn a pydantic validation error into a message in the user's language."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from phalanx.i18n import Labels, tr

_LONGEST = 80
"""Characters of a value that are shown."""

_REASONS: Labels = {
    "extra_forbidden": "There is no such key",
    "missing": "Field required",
    "int_type": "Input should be a valid integer",
    "int_parsing": "Input should be a valid integer",
    "int_from_float": "Input should be a valid integer",
    "float_type": "Input should be a valid number",
    "float_parsing": "Input should be a valid number",
    "finite_number": "Input should be a finite number",
    "string_type": "Input should be a valid string",
    "bool_type": "Input should be a valid boolean",
    "bool_parsing": "Input should be a valid boolean",
    "list_type": "Input should be a valid list",
    "tuple_type": "Input should be a valid list",
    "dict_type": "Input should be an object, {{...}}",
    "model_type": "Input should be an object, {{...}}",
    "greater_than": "Input should be greater than {gt:g}",
    "greater_than_equal": "Input should be greater than or equal to {ge:g}",
    "less_than": "Input should be less than {lt:g}",
    "less_than_equal": "Input should be less than or equal to {le:g}",
    "literal_error": "Input should be {expected}",
    "too_short": "Input should have at least {min_length} item(s)",
}
"""By pydantic's type of the error."""


def why_wrong(error: ErrorDetails) -> str:
    """Return what pydantic says of a value, and the value itself, or how it begins, if it is a plain one."""
    kind, value = error["type"], error["input"]
    why = tr(_REASONS[kind], **error.get("ctx", {})) if kind in _REASONS else error["msg"].removeprefix("Value error, ")
    if kind in ("missing", "value_error") or not isinstance(value, str | int | float | bool | None | list):
        return why
    shown = repr(value)
    return tr("{why}, found {found}", why=why, found=shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "...")

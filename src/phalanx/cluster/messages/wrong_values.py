"""What is wrong with a value that a file or a caller gave, in the user's language."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from phalanx.cluster.messages.messages import TABLE, text

_LONGEST = 80
"""Characters of a value that are shown."""


def why_wrong(error: ErrorDetails) -> str:
    """Return what pydantic says of a value, and the value itself, or how it begins, if it is a plain one."""
    key, value = f"wrong {error['type']}", error["input"]
    why = text(key, **error.get("ctx", {})) if key in TABLE else error["msg"].removeprefix("Value error, ")
    if error["type"] in ("missing", "value_error") or not isinstance(value, str | int | float | bool | None | list):
        return why
    shown = repr(value)
    return text("wrong and found", why=why, found=shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "...")

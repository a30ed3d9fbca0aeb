"""`redact`: redact secret values in stored or shown text (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

SHORTEST = 4
"""Shorter values are no secrets, and striking them out would leave nothing readable."""

MARK = "***"


def parts(secrets: Collection[str]) -> list[str]:
    """Return what to look for, the longest first: values, and the lines of those that have several."""
    candidates = {part.strip() for value in secrets for part in (value, *value.splitlines())}
    return sorted((part for part in candidates if len(part) >= SHORTEST), key=len, reverse=True)


def redact(value: Any, secrets: Collection[str]) -> Any:
    """Return `value`, what JSON can hold, with every value of `secrets` in its texts replaced."""
    sought = parts(secrets)
    return _redact(value, re.compile("|".join(map(re.escape, sought)))) if sought else value


def _redact(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(MARK, value)
    if isinstance(value, dict):
        return {key: _redact(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, pattern) for item in value]
    return value

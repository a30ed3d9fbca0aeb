"""`read_ids`: the ids that a request asks for, as JSON or as bytes."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
from pydantic_core import from_json

from phalanx.errors import ConfigError
from phalanx.ps.stores.base import Keys
from phalanx.ps.text_ids import hash_to_array

BINARY = "application/octet-stream"

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_SHAPES = '{"ids": [1, "9007199254740993"]} or {"texts": ["red"], "salt": "colour"}'


def read_ids(body: bytes, content_type: str) -> Keys:
    """Return the ids of a request, int64, shape (n,).

    Args:
        body: As `application/octet-stream` little-endian int64; else a JSON object with `ids`, integers or strings of
            integers, or with `texts`, `salt` and perhaps `hash_space`, as `hash_ids` takes them.
        content_type: What the request says of it.

    Raises:
        ConfigError: If it is neither; names what is wrong.
    """
    if content_type.partition(";")[0].strip().lower() == BINARY:
        return _read_binary(body)
    try:
        value = from_json(body)
    except ValueError as error:
        raise ConfigError(f"The body is no JSON: {error}. Send {_SHAPES}.") from None
    match value:
        case {"ids": list(ids), **rest} if not rest:
            return np.fromiter((_id_of(position, item) for position, item in enumerate(ids)), np.int64, len(ids))
        case {"texts": list(texts), "salt": str(salt), **rest} if rest.keys() <= {"hash_space"}:
            return _hash(texts, salt, rest.get("hash_space"))
    raise ConfigError(f"The body is {_describe(value)}, which asks for no ids. Send {_SHAPES}.")


def _hash(texts: list[Any], salt: str, hash_space: object) -> Keys:
    if hash_space is not None and type(hash_space) is not int:
        raise ConfigError(f"hash_space is {str(hash_space)[:80]!r}, which is no integer. Send one, or leave it out.")
    return hash_to_array(texts, salt, hash_space=hash_space)


def _read_binary(body: bytes) -> Keys:
    if len(body) % 8:
        raise ConfigError(
            f"The body of type {BINARY} has {len(body)} bytes, which are no whole ids. Send little-endian int64."
        )
    ids = np.frombuffer(body, "<i8")
    return ids if sys.byteorder == "little" else ids.astype(np.int64)


def _id_of(position: int, item: Any) -> int:
    number: int | None = None
    if type(item) is int:
        number = item
    elif isinstance(item, str) and _INTEGER.fullmatch(item):
        number = int(item)
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise ConfigError(
            f"ids[{position}] is {str(item)[:80]!r}, which is no 64-bit signed integer. Send integers, or strings of "
            "them where a program has no integers beyond 2**53."
        )
    return number


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "an object of " + (", ".join(repr(name[:40]) for name in list(value)[:5]) or "nothing")
    return f"a {type(value).__name__}"

"""Hypothesis strategies that break what is valid, and a bound on memory: for tests of parsers of foreign bytes."""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

HEADROOM_BYTES = 1 << 30
"""What a parser may take beyond what the process already has."""

ODD_NUMBERS = [True, -1, 0, 1, 1.0, 1.5, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 70, float("inf"), float("nan")]
ODD_TEXTS = ["", ".", "..", "../x", "/", "\0", "x" * 5000, "é", "9" * 5000, "[[[", "\ud800", "$tensor", "$items"]
ODD_VALUES: list[Any] = [None, [], {}, [[]], [None], {"x": 1}, [1, "x"], *ODD_NUMBERS, *ODD_TEXTS]

ODD_DOCUMENTS = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b'{"version":' + b"9" * 5000 + b"}",
    b'{"a":1,"a":2}',
    b"NaN",
]
"""What stands where a JSON document is due."""


_odd = st.sampled_from(ODD_VALUES).map(copy.deepcopy)  # what is drawn may be changed afterwards


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


@st.composite
def broken_json(draw: st.DrawFn, valid: Any) -> Any:
    """Return a copy of a JSON value in which one to three places hold something else, or nothing."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            return draw(_odd)
        *parents, last = draw(st.sampled_from(places))
        holder = value
        for key in parents:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat", "add"])):
            case "replace":
                holder[last] = draw(_odd)
            case "remove":
                del holder[last]
            case "repeat" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(["x", "", "name", "version", "$tuple"]))] = draw(_odd)
    return value


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON; half letters are written as escapes."""
    return json.dumps(value).encode()


def broken_documents(valid: Any) -> st.SearchStrategy[bytes]:
    """Return JSON documents with odd values, and bytes that are no JSON."""
    return broken_json(valid).map(json_bytes) | st.sampled_from(ODD_DOCUMENTS) | broken_bytes(json_bytes(valid))


@st.composite
def broken_bytes(draw: st.DrawFn, *valid: bytes) -> bytes:
    """Return bytes that are cut, have flipped bits, or are joined with others."""
    data = bytearray(draw(st.sampled_from(valid)))
    match draw(st.sampled_from(["cut", "flip", "flip", "insert", "noise"])):
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "flip":
            for _ in range(draw(st.integers(1, 8))):
                if data:
                    data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        case "insert":
            at = draw(st.integers(0, len(data)))
            data[at:at] = draw(st.binary(max_size=40))
        case _:
            data = bytearray(draw(st.binary(max_size=200)))
    return bytes(data)


@contextmanager
def little_memory(headroom: int = HEADROOM_BYTES) -> Iterator[None]:
    """Let this process take so many bytes more, then none: what a header claims is not what a parser may allocate."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

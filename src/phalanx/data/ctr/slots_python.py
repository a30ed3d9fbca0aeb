"""Click-log parser in pure Python: the reference and fallback of `csrc/slots.cc`, equal bit for bit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sampling.hash64 import WORD, mix_one

BROKEN = ("fields", "number", "token", "name", "twice")
"""What can be wrong with a line, in the order of the native core's codes."""

_SHOWN_BYTES = 40
_NUMBER = re.compile(rb"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """The first broken line of a text."""

    kind: int
    line: int
    """Counted from 0 in the text."""

    field: int
    """Position in the line, from 0; for `fields`, how many there are."""

    text: bytes


def hash_texts_python(salt: str, texts: Sequence[str | bytes], hash_space: int) -> NDArray[np.int64]:
    """Return what `phalanx.data.ctr.slots.hash_texts` does; a hash space of 0 means all 64 bits."""
    seed = _hash(0, salt.encode())
    hashes = (_hash(seed, text if isinstance(text, bytes) else str.encode(text)) for text in texts)
    return np.array([h % hash_space if hash_space else h for h in hashes], np.uint64).view(np.int64)


def _hash(seed: int, text: bytes) -> int:
    state = mix_one((seed + len(text)) & WORD)
    for start in range(0, max(len(text), 1), 8):
        state = mix_one(state ^ int.from_bytes(text[start : start + 8], "little"))
    return state


class _BrokenLineError(Exception):
    def __init__(self, kind: str, position: int, text: bytes) -> None:
        self.kind, self.position, self.text = BROKEN.index(kind), position, text[:_SHOWN_BYTES]


@dataclass(slots=True)
class _Row:
    label: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    bags: list[list[int]] = field(default_factory=list)


class SlotParser:
    """What the native core's class of this name is; arguments and results alike."""

    def __init__(
        self,
        has_label: bool,
        dense: list[str],
        sparse: list[str],
        salts: list[str],
        hash_space: int,
        is_columns: bool,
    ) -> None:
        self.has_label, self.is_columns, self.hash_space = has_label, is_columns, hash_space
        self.dense = {name.encode(): i for i, name in enumerate(dense)}
        self.sparse = {name.encode(): i for i, name in enumerate(sparse)}
        self.seeds = [_hash(0, salt.encode()) for salt in salts]

    def parse(
        self, text: bytes
    ) -> tuple[
        int,
        NDArray[np.float32],
        NDArray[np.float32],
        NDArray[np.int64],
        NDArray[np.int64],
        int,
        tuple[int, int, int, bytes] | None,
    ]:
        """Return rows, label, dense, ids and offsets of whole lines; how many were broken and what the first is."""
        rows: list[_Row] = []
        broken, first = 0, None
        for number, line in enumerate(_lines(text)):
            try:
                rows.append(self._columns(line) if self.is_columns else self._tokens(line))
            except _BrokenLineError as error:
                first = first or (error.kind, number, error.position, error.text)
                broken += 1
        bags = [bag for row in rows for bag in row.bags]
        offsets = np.cumsum([0, *(len(bag) for bag in bags)]).astype(np.int64)
        return (
            len(rows),
            np.array([v for row in rows for v in row.label], np.float32),
            np.array([v for row in rows for v in row.dense], np.float32),
            np.array([i for bag in bags for i in bag], np.uint64).view(np.int64),
            np.zeros(0, np.int64) if self.is_columns else offsets,
            broken,
            first,
        )

    def _id(self, slot: int, text: bytes) -> int:
        hashed = _hash(self.seeds[slot], text)
        return hashed % self.hash_space if self.hash_space else hashed

    def _columns(self, line: bytes) -> _Row:
        fields = line.split(b"\t")
        numbers = self.has_label + len(self.dense)
        if len(fields) != numbers + len(self.sparse):
            raise _BrokenLineError("fields", len(fields), line)
        values = [
            0.0 if not text and i >= self.has_label else _number(text, i, text)
            for i, text in enumerate(fields[:numbers])
        ]
        bags = [[self._id(slot, text)] for slot, text in enumerate(fields[numbers:])]
        return _Row(values[: self.has_label], values[self.has_label :], bags)

    def _tokens(self, line: bytes) -> _Row:
        tokens = line.replace(b"\t", b" ").split(b" ")
        tokens = [token for token in tokens if token]
        if self.has_label and not tokens:
            raise _BrokenLineError("fields", 0, b"")
        label = [_number(tokens[0], 0, tokens[0])] if self.has_label else []
        dense: dict[int, float] = {}
        bags: list[list[int]] = [[] for _ in self.sparse]
        for position, token in enumerate(tokens[self.has_label :], self.has_label):
            name, colon, value = token.partition(b":")
            if not colon:
                raise _BrokenLineError("token", position, token)
            if name in self.sparse:
                bags[self.sparse[name]].append(self._id(self.sparse[name], value))
            elif name not in self.dense:
                raise _BrokenLineError("name", position, token)
            elif self.dense[name] in dense:
                raise _BrokenLineError("twice", position, token)
            else:
                dense[self.dense[name]] = _number(value, position, token)
        return _Row(label, [dense.get(i, 0.0) for i in range(len(self.dense))], bags)


def _lines(text: bytes) -> list[bytes]:
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def _number(text: bytes, position: int, token: bytes) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    # What a double cannot tell from 0, the native reader refuses.
    is_lost = value == 0 and any(digit in text.lower().partition(b"e")[0] for digit in b"123456789")
    with np.errstate(over="ignore"):
        if is_lost or not np.isfinite(np.float32(value)):
            raise _BrokenLineError("number", position, token)
    return value

"""`write_tensors`, `TensorFile`: write and memory-map safetensors files, with checksums.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.cluster.disk_space import named_errors
from phalanx.errors import ConfigError, DataError
from phalanx.files import sync_file

BLOCK_BYTES = 8 << 20
"""Bytes of a file that have one CRC-32.

It detects and locates damaged bytes and truncation. SHA-256 would detect no more, as whoever can change a file can
change the manifest too, and would cost as much as the rest of a save (1.9 GB/s against 6.5).
"""

HEADER_BYTES = 100_000_000
"""Longest header that is read, as in the safetensors library: the length in a broken file is arbitrary."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA, _NOTE = "__metadata__", "phalanx"
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Name, size and checksums of a written file."""

    name: str
    bytes: int
    block_bytes: int
    crc32: tuple[int, ...]
    """Of every block of this many bytes."""


class _Checksums:
    """CRC-32 of every block of a file, computed while it is written."""

    def __init__(self) -> None:
        self._left, self._running = BLOCK_BYTES, 0
        self._done: list[int] = []

    def blocks(self, view: memoryview) -> Iterator[memoryview]:
        """Yield the next bytes of the file in parts that do not cross the end of a block."""
        while view:
            part, view = view[: self._left], view[self._left :]
            self._running = zlib.crc32(part, self._running)
            self._left -= len(part)
            if not self._left:
                self._done.append(self._running)
                self._left, self._running = BLOCK_BYTES, 0
            yield part

    def all(self) -> tuple[int, ...]:
        """Return the checksums of all blocks, including a partial last one."""
        return (*self._done, self._running) if self._left < BLOCK_BYTES else tuple(self._done)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset in the file."""


def dtype_name(tensor: str, dtype: torch.dtype) -> str:
    """Return the name in the format of a tensor's dtype.

    Raises:
        ConfigError: If the format has no such dtype; names the tensor.
    """
    if dtype not in _NAMES:
        names = ", ".join(str(known_dtype).removeprefix("torch.") for known_dtype in _NAMES)
        raise ConfigError(f"{tensor!r} is of {dtype}, which cannot be saved. Convert it to one of {names}.")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in the format.

    Raises:
        DataError: If it is none.
    """
    if name not in _DTYPES:
        raise DataError(f"dtype {name!r} is not known to this version. Read the file with the version that wrote it.")
    return _DTYPES[name]


def are_counts(values: Iterable[Any]) -> bool:
    """Return whether these are whole numbers of at least 0, as sizes and offsets in a file must be."""
    return all(type(value) is int and value >= 0 for value in values)


def is_shape(sizes: Sequence[Any]) -> bool:
    """Return whether these can be the shape of a tensor, also of one without elements: torch counts with 64 bits."""
    return are_counts(sizes) and math.prod(filter(None, sizes)) < 1 << 60


def build_header(
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], note: str = ""
) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file of these tensors, and the offset of each tensor in it.

    Args:
        shapes: dtype and shape by name.
        note: Text for the header, which other readers of the format ignore.
    """
    if _METADATA in shapes:
        raise ConfigError(f"a tensor cannot be called {_METADATA!r}: the format uses that name. Rename it.")
    # Larger items first, so that every tensor begins at a multiple of its item size.
    order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
    header, ends, at = {}, {}, 0
    for name in order:
        dtype, shape = shapes[name]
        ends[name] = at
        at += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [ends[name], at]}
    metadata = {"format": "pt"} | ({_NOTE: note} if note else {})
    text = json.dumps({_METADATA: metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + ends[name] for name in shapes}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, list[int]]:
    """Write a file of tensors and make it durable.

    Args:
        path: The file; it must not be there yet.
        tensors: Contiguous tensors on the CPU, by name.

    Returns:
        The file, and the offset of every tensor in it.

    Raises:
        OSError: If the file system does not take it.
    """
    head, begins = build_header({name: (t.dtype, t.shape) for name, t in tensors.items()})
    contents = [bytes_of(tensors[name]) for name in sorted(begins, key=begins.__getitem__)]
    checksums, total = _Checksums(), len(head) + sum(map(len, contents))
    with named_errors(path, total), path.open("xb", buffering=0) as file:
        for view in (memoryview(head), *contents):
            for part in checksums.blocks(view):
                rest = part
                while rest:
                    rest = rest[file.write(rest) :]
        sync_file(file)
    return FileRecord(path.name, total, BLOCK_BYTES, checksums.all()), [begins[name] for name in tensors]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def check_file(folder: Path, file: FileRecord) -> None:
    """Raise unless the bytes of a file are those that were written. Reads all of it.

    Raises:
        DataError: If they are not; names the file and the damaged block.
    """
    path = folder / file.name
    with path.open("rb") as stream:  # buffered: it fills the block, however few bytes one read returns
        block = memoryview(bytearray(file.block_bytes))
        for number, expected in enumerate(file.crc32):
            n = stream.readinto(block)
            if zlib.crc32(block[:n]) != expected:
                raise DataError(
                    f"{path} is broken between bytes {number * file.block_bytes} and {number * file.block_bytes + n}: "
                    "they do not have the checksum of the manifest. Take another copy."
                )


class TensorFile:
    """A memory-mapped file of tensors: only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise DataError(f"{path} is empty. Take another copy.")
            # Copy-on-write only keeps torch from warning about read-only memory; nothing is written.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, slot: Slot) -> Tensor:
        """Return one tensor, a view into the file.

        Raises:
            DataError: If the file ends before it.
        """
        count = math.prod(slot.shape)
        if not count:
            return torch.empty(slot.shape, dtype=slot.dtype)
        if slot.begin + count * slot.dtype.itemsize > len(self._map):
            raise DataError(f"{self.path} ends at byte {len(self._map)}, inside a tensor. Take another copy.")
        return torch.frombuffer(self._map, dtype=slot.dtype, count=count, offset=slot.begin).view(slot.shape)

    def slots(self) -> dict[str, Slot]:
        """Return the tensors that the header lists.

        Raises:
            DataError: If it is no safetensors file.
        """
        with self._errors_named():
            header, start = self._header()
            header.pop(_METADATA, None)
            return {name: _slot(name, entry, start) for name, entry in header.items()}

    def note(self) -> str:
        """Return the text that `build_header` put into the header, "" if there is none.

        Raises:
            DataError: If it is no safetensors file.
        """
        with self._errors_named():
            return str((self._header()[0].get(_METADATA) or {}).get(_NOTE, ""))

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(len(self._map) - 8, HEADER_BYTES):
            raise ValueError(f"its header would have {length} bytes")
        return json.loads(self._map[8 : 8 + length]), 8 + length

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{self.path} is no safetensors file: {error}.") from None


def _slot(name: str, entry: Mapping[str, Any], start: int) -> Slot:
    dtype, shape, (begin, end) = dtype_of(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if not (is_shape(shape) and are_counts((begin, end))) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} of shape {list(shape)} cannot lie between bytes {begin} and {end}")
    return Slot(dtype, shape, start + begin)

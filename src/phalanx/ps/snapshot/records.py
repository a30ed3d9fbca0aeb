"""`Record`: checksummed binary records, the format of log segments and shard files.

A record is a header of 28 bytes (magic, checksum of the header, length of the JSON, length of the arrays, checksum of
each), the JSON, and the bytes of the arrays in order, little-endian.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from phalanx.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]

_MAGIC = b"PXR1"
_HEADER = struct.Struct("<4sIIQII")
_CHECKED = struct.Struct("<IQII")
_DTYPES = {
    t: np.dtype(t) for t in ("int64", "uint64", "float32", "float64", "int32", "uint32", "uint16", "int8", "uint8")
}

_MOST_DIMENSIONS = 2
_LONGEST_DIMENSION = 1 << 40


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file."""

    meta: dict[str, Any]
    arrays: list[Array]
    offset: int
    """Where the record begins in its file, in bytes."""

    end: int
    """Where it ends."""


class TornRecordError(DataError):
    """A file ends inside a record: its writer was stopped, or the file was cut."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"{path} ends inside the record that begins at byte {offset}: {reason}.")
        self.offset = offset


def pack(meta: dict[str, Any], arrays: Sequence[Array]) -> list[bytes | memoryview]:
    """Return the buffers of one record, in order; the first is its header.

    Args:
        meta: A JSON object; the key `arrays` is taken.
        arrays: C-contiguous arrays. Their memory is not copied.
    """
    text = json.dumps({**meta, "arrays": [[a.dtype.name, a.shape] for a in arrays]}, separators=(",", ":")).encode()
    views = [memoryview(a.reshape(-1).view(np.uint8)) for a in arrays]  # type: ignore[arg-type]
    checksum = 0
    for view in views:
        checksum = zlib.crc32(view, checksum)
    checked = _CHECKED.pack(len(text), sum(len(v) for v in views), zlib.crc32(text), checksum)
    return [_MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked, text, *views]


def read_records(path: Path, is_wanted: Callable[[dict[str, Any]], bool] = lambda meta: True) -> Iterator[Record]:
    """Yield the records of a file; their arrays are the caller's.

    Args:
        path: The file.
        is_wanted: Says by a record's JSON whether to read its arrays; others are passed over, unchecked.

    Raises:
        TornRecordError: If the file ends inside a record.
        DataError: If a record is not what was written; names file and offset.
    """
    with path.open("rb") as file:
        yield from read_open_file(file, path, is_wanted)


def read_open_file(
    file: io.BufferedReader, path: Path, is_wanted: Callable[[dict[str, Any]], bool] = lambda meta: True
) -> Iterator[Record]:
    """Yield the records of an open file, from where it stands to where it ends now; see `read_records`."""
    size = os.fstat(file.fileno()).st_size
    while file.tell() < size:
        record = _read(file, path, size, is_wanted)
        if record is not None:
            yield record


def _read(file: io.BufferedReader, path: Path, size: int, is_wanted: Callable[[dict[str, Any]], bool]) -> Record | None:
    offset = file.tell()
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise TornRecordError(path, offset, f"{len(header)} of {_HEADER.size} bytes of its header are there")
    magic, checksum, text_bytes, array_bytes, text_checksum, array_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or zlib.crc32(header[8:]) != checksum:
        raise_broken(path, offset, "there is no record's header")
    end = offset + _HEADER.size + text_bytes + array_bytes
    if end > size:
        raise TornRecordError(path, offset, f"it is {end - offset} bytes long, {size - offset} are there")
    text = file.read(text_bytes)
    _check(text, text_checksum, path, offset, at_end=end == size)
    meta = _decode_meta(text, path, offset)
    if not is_wanted(meta):
        file.seek(end)
        return None
    body = np.empty(array_bytes, np.uint8)
    file.readinto(body)  # type: ignore[arg-type]  # an array is a buffer
    _check(body, array_checksum, path, offset, at_end=end == size)
    return Record(meta, _split(body, meta.pop("arrays", None), path, offset), offset, end)


def _decode_meta(text: bytes, path: Path, offset: int) -> dict[str, Any]:
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise_broken(path, offset, f"its text is no JSON: {error}")
    if not isinstance(meta, dict):
        raise_broken(path, offset, "its text is no JSON object")
    return meta


def _check(data: bytes | Array, expected: int, path: Path, offset: int, *, at_end: bool) -> None:
    checksum = zlib.crc32(data)  # type: ignore[arg-type]
    if checksum == expected:
        return
    if at_end:
        raise TornRecordError(path, offset, "its bytes do not have its checksum")
    raise_broken(path, offset, f"its checksum is {expected:08x}, its bytes have {checksum:08x}")


def _split(body: Array, layout: Any, path: Path, offset: int) -> list[Array]:
    if not isinstance(layout, list):
        raise_broken(path, offset, "it does not say which arrays it holds")
    arrays, at = [], 0
    for entry in layout:
        dtype, shape = _array_of(entry, path, offset)
        count = math.prod(shape) * dtype.itemsize
        if at + count > len(body):
            raise_broken(path, offset, f"its arrays take more than the {len(body)} bytes it has")
        # A copy, because a column must begin at a multiple of its item size to be read by native code.
        arrays.append(body[at : at + count].copy().view(dtype).reshape(shape))
        at += count
    if at != len(body):
        raise_broken(path, offset, f"its arrays take {at} bytes, it has {len(body)}")
    return arrays


def _array_of(entry: Any, path: Path, offset: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    match entry:
        case [str(name), [*shape]] if name in _DTYPES and len(shape) <= _MOST_DIMENSIONS:
            # NumPy refuses an empty array with a shape that would not fit.
            if all(type(size) is int and 0 <= size <= _LONGEST_DIMENSION for size in shape):
                return _DTYPES[name], tuple(shape)
    raise_broken(path, offset, f"it holds an array of {str(entry)[:80]}")


def raise_broken(path: Path, offset: int, reason: str) -> NoReturn:
    """Raise the error of a file that does not hold what was written.

    Raises:
        DataError: Always.
    """
    raise DataError(
        f"{path} is broken at byte {offset}: {reason}. A disk or a copy damaged it; take another copy of the file."
    )

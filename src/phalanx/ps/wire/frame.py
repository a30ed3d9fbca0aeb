"""`Header`, `encode`: frames of RPC messages: 40-byte header, JSON or packed object, arrays with checksums.

    magic 4 | wire version u16 | kind u8 | flags u8 | client u64 | seq u64 | object's length u32 | payload's length u64
    | crc32 of all before and the object u32

The object tells the arrays' types and shapes; each array starts at a multiple of 64 bytes of the payload. A payload
comes in chunks of at most 4 MiB, each followed by its crc32, which TLS makes needless; or it lies in a shared segment
that the object names.
Packed objects are those of `data_frame`. Twin of `csrc/wire_frame.h`.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError

Bytes = NDArray[np.uint8]
"""A one-dimensional array of bytes: memory that is sent, received or shared."""

Array = NDArray[Any]

MAGIC = b"PHLX"
WIRE_VERSION = 4
CHUNK_BYTES = 4 << 20
LARGEST_OBJECT = 16 << 20
LARGEST_PAYLOAD = 1 << 40
MOST_DIMENSIONS = 8
MOST_ARRAYS = 1 << 16

SHARED = 1
"""Flag: the payload lies in a shared segment."""

NEW_SEGMENT = 2
"""Flag: the descriptor of that segment comes with the header."""

DTYPES = {np.dtype(name): name for name in ("int64", "float32", "uint32", "uint8", "float64")}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_HEADER = struct.Struct("<4sHBBQQIQI")
_CHECKED = _HEADER.size - 4
_CHECKSUM = struct.Struct("<I")
_ALIGNMENT = 64
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = _CHECKSUM.size


class FrameError(Exception):
    """What came is not a frame of ours; nothing after it on that connection can be read."""


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    WAITING = 4
    """Before a reply, any number of times: for whom it waits."""

    PULL = 5
    PUSH = 6
    ROWS = 7
    """The reply to a pull or push."""


_KINDS = frozenset(FrameKind)

DATA_KINDS = frozenset({FrameKind.PULL, FrameKind.PUSH})
"""Requests with a packed object."""

REQUEST_KINDS = DATA_KINDS | {FrameKind.REQUEST}


class Header(NamedTuple):
    """The fixed part of a frame."""

    kind: FrameKind
    flags: int
    client: int
    seq: int
    object_bytes: int
    payload_bytes: int


def aligned(offset: int) -> int:
    """Return the next place where an array may start."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Where the arrays of one message lie in its payload."""

    places: tuple[tuple[np.dtype[Any], tuple[int, ...], int, int], ...]
    """Type, shape, first byte and end of each array."""

    payload_bytes: int

    def describe(self) -> list[Any]:
        """Return types and shapes as JSON."""
        return [[DTYPES[dtype], shape] for dtype, shape, _, _ in self.places]

    def read(self, payload: Bytes) -> list[Array]:
        """Return the arrays as views of a payload."""
        return [payload[start:end].view(dtype).reshape(shape) for dtype, shape, start, end in self.places]

    def write(self, arrays: Sequence[Array], payload: Bytes) -> None:
        """Copy arrays to their places, but not one that was made there."""
        for array, target in zip(arrays, self.read(payload), strict=True):
            if array.ctypes.data != target.ctypes.data:
                target[...] = array


def layout_of(arrays: Sequence[Array]) -> PayloadLayout:
    """Return where arrays will lie.

    Raises:
        ConfigError: If a type does not travel.
    """
    for array in arrays:
        if array.dtype not in DTYPES:
            raise ConfigError(f"an array of {array.dtype} cannot be sent. Convert it to one of {_names()}.")
    return _build_layout([(array.dtype, array.shape) for array in arrays])


def layout_from(described: Any, payload_bytes: int) -> PayloadLayout:
    """Return the layout that an object describes.

    Raises:
        FrameError: If it describes none, or one of another length than the header's.
    """
    if not isinstance(described, list) or len(described) > MOST_ARRAYS:
        raise FrameError("arrays are not described by a list")
    layout = _build_layout([_parse_array(entry) for entry in described])
    if layout.payload_bytes != payload_bytes:
        raise FrameError(f"a payload of {payload_bytes} bytes for arrays of {layout.payload_bytes}")
    return layout


def _parse_array(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    match entry:
        case [str(name), [*shape]] if name in _BY_NAME and len(shape) <= MOST_DIMENSIONS:
            sizes = [size for size in shape if type(size) is int and size >= 0]
            # An empty array may still have a shape that NumPy cannot hold.
            if len(sizes) == len(shape) and math.prod(filter(None, sizes)) <= LARGEST_PAYLOAD:
                return _BY_NAME[name], tuple(sizes)
    raise FrameError(f"an array is described as {str(entry)[:80]}; type one of {_names()}, then its shape")


def _build_layout(described: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> PayloadLayout:
    places, end = [], 0
    for dtype, shape in described:
        start = end = aligned(end)
        end = start + dtype.itemsize * math.prod(shape)
        places.append((dtype, shape, start, end))
    if end > LARGEST_PAYLOAD:
        raise FrameError(f"arrays of {end} bytes in one message")
    return PayloadLayout(tuple(places), end)


def _names() -> str:
    return ", ".join(_BY_NAME)


def encode(kind: FrameKind, flags: int, client: int, seq: int, content: dict[str, Any], payload_bytes: int) -> bytes:
    """Return header and object of a frame whose object is JSON."""
    raw = json.dumps(content, separators=(",", ":")).encode()
    return encode_raw(kind, flags, client, seq, raw, payload_bytes)


def encode_raw(kind: FrameKind, flags: int, client: int, seq: int, raw: bytes, payload_bytes: int) -> bytes:
    """Return header and object of a frame."""
    if len(raw) > LARGEST_OBJECT:
        raise ConfigError(f"an object of {len(raw):,} bytes cannot be sent; send at most {LARGEST_OBJECT:,}.")
    start = _HEADER.pack(MAGIC, WIRE_VERSION, kind, flags, client, seq, len(raw), payload_bytes, 0)[:_CHECKED]
    return b"".join((start, _CHECKSUM.pack(zlib.crc32(raw, zlib.crc32(start))), raw))


def decode_header(raw: bytes | bytearray) -> Header:
    """Return the fixed part, its lengths within limits.

    Raises:
        FrameError: If it is not one.
    """
    magic, version, kind, flags, client, seq, object_bytes, payload_bytes, _ = _HEADER.unpack(raw)
    if magic != MAGIC or version != WIRE_VERSION:
        raise FrameError(f"a frame starts with {bytes(raw[:6])!r}")
    if kind not in _KINDS or flags & ~(SHARED | NEW_SEGMENT):
        raise FrameError(f"a frame of kind {kind} with flags {flags}")
    if object_bytes > LARGEST_OBJECT or payload_bytes > LARGEST_PAYLOAD:
        raise FrameError(f"a frame claims {object_bytes} and {payload_bytes} bytes")
    return Header(FrameKind(kind), flags, client, seq, object_bytes, payload_bytes)


def check_object(header: bytes | bytearray, raw: bytes | bytearray) -> None:
    """Check header and object against their checksum.

    Raises:
        FrameError: If it does not hold.
    """
    if zlib.crc32(raw, zlib.crc32(memoryview(header)[:_CHECKED])) != _CHECKSUM.unpack_from(header, _CHECKED)[0]:
        raise FrameError("the checksum of a frame is wrong")


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Return an object that is JSON.

    Raises:
        FrameError: If it is not.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's object is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise FrameError("a frame's object is not a JSON object")
    return content


def checksum_holds(chunk: Bytes, checksum: bytes | bytearray) -> bool:
    """Return whether a received chunk is what was sent."""
    return bool(zlib.crc32(chunk.data) == _CHECKSUM.unpack(checksum)[0])


def chunks(layout: PayloadLayout, arrays: Sequence[Array], *, has_checksums: bool = True) -> list[memoryview | bytes]:
    """Return the payload as it goes through a socket: views of the arrays, in chunks with a checksum each if it has."""
    if not has_checksums:
        return list(_payload_views(layout, arrays))
    out: list[memoryview | bytes] = []
    room, checksum = CHUNK_BYTES, 0
    for view in _payload_views(layout, arrays):
        start = 0
        while start < len(view):
            part = view[start : start + room]
            out.append(part)
            checksum = zlib.crc32(part, checksum)
            start, room = start + len(part), room - len(part)
            if not room:
                out.append(_CHECKSUM.pack(checksum))
                room, checksum = CHUNK_BYTES, 0
    if room < CHUNK_BYTES:
        out.append(_CHECKSUM.pack(checksum))
    return out


def _payload_views(layout: PayloadLayout, arrays: Sequence[Array]) -> Iterator[memoryview | bytes]:
    at = 0
    for array, (_, _, start, end) in zip(arrays, layout.places, strict=True):
        if start > at:
            yield bytes(start - at)
        if end > start:
            yield array.reshape(-1).view(np.uint8).data
        at = end

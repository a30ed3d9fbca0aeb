"""`DataRequest`, `DataReply`: packed objects of pulls, pushes and their replies, on the client.

`csrc/wire_data.h` draws them and is the server's end. One frame has all tables of a step that one server owns keys of.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

from phalanx.ps.wire.frame import DATA_KINDS, Bytes, FrameError, FrameKind
from phalanx.ps.wire.segments import SharedSegment

_REQUEST = struct.Struct("<QdQQIIII")
_REPLY = struct.Struct("<B7xQQQ")
_KEEP = 1

TakePayload = Callable[[int, int], Bytes]
"""Returns the payload of a reply, by its place in the shared segment and its length."""

PUSH_HEAD = struct.Struct("<QQdIIBB6x")
"""Of each table of a push: salt, number of the pull that brought its keys (0: they come along), learning rate, rows,
dim, kind of update, columns."""

PULL_HEAD = struct.Struct("<QII")
"""Of each table of a pull: salt, number of keys, flags."""

HAS_LR, HAS_COUNTS, HAS_SHOWS, HAS_CLICKS = 1, 2, 4, 8

BFLOAT16_VALUES = 16
"""Beside these columns of a push: its values are bfloat16."""

BFLOAT16_ROWS = 1
"""Flag of a pull: its rows are to be bfloat16."""

ValueType = Literal["float32", "bfloat16"]
"""As what pulled rows and pushed gradients travel."""


class DataStatus(IntEnum):
    """How a pull or push went."""

    DONE = 0
    AGAIN = 1
    """The push was applied before."""

    NEED_PUSH = 2
    """A push before this pull has to come again first."""

    NEED_KEYS = 3
    """The server does not know the pull that this push names."""


_STATUSES = frozenset(DataStatus)


class DataReply(NamedTuple):
    """The answer to a pull or push."""

    status: DataStatus
    number: int
    """What the server calls this pull; the step that is due where it needs a push."""

    dropped: int
    rows: Bytes
    """The rows of each table, each beginning at a multiple of 64 bytes."""


class PartOfServer(Protocol):
    """What of a pull or push goes to one server."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of keys, values and columns."""
        ...

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows that it reads."""
        ...

    @property
    def counts(self) -> tuple[int, int]:
        """Tables it pushes, and tables it reads."""
        ...

    def heads(self) -> bytes:
        """Return `PUSH_HEAD` and `PULL_HEAD` of each table."""
        ...

    def write(self, memory: Bytes) -> None:
        """Write keys, values and columns, each array at a multiple of 64 bytes."""
        ...


_OPS = {kind: kind.name.lower() for kind in DATA_KINDS}


class DataRequest:
    """A pull or push of one server, as `Connection.post` takes it.

    Args:
        kind: `PULL` or `PUSH`.
        part: Its tables.
        step: The worker's step.
        weight: Of a push.
        keep: Whether the server remembers the keys of a pull for a push.
    """

    def __init__(
        self, kind: FrameKind, part: PartOfServer, step: int, weight: float = 1.0, *, keep: bool = False
    ) -> None:
        self.kind, self.op = kind, _OPS[kind]
        self.part, self.step, self.weight, self.keep = part, step, weight, keep
        self.payload_bytes, self.reply_bytes = part.payload_bytes, part.rows_bytes

    def encode(self, segment: SharedSegment | None) -> bytes:
        """Return the object."""
        number, size = (0, 0) if segment is None else (segment.number, segment.size)
        pushes, pulls = self.part.counts
        flags = _KEEP if self.keep else 0
        head = _REQUEST.pack(self.step, self.weight, number, size, flags, pushes, pulls, 0)
        return head + self.part.heads()

    def write(self, memory: Bytes) -> None:
        """Write the payload."""
        self.part.write(memory)

    def decode_reply(self, kind: FrameKind, raw: bytes | bytearray, count: int, take: TakePayload) -> DataReply:
        """Return the reply, its payload taken.

        Args:
            kind: Of its frame.
            raw: Its object.
            count: Bytes of its payload.
            take: Returns so many bytes, which lie at this place of the shared segment or come through the socket.

        Raises:
            FrameError: If it is no reply to this request.
        """
        if kind != FrameKind.ROWS or len(raw) != _REPLY.size:
            raise FrameError(f"a {kind.name.lower()} of {len(raw)} bytes to a {self.op}")
        status, number, dropped, at = _REPLY.unpack(raw)
        if status not in _STATUSES or count != (self.reply_bytes if status <= DataStatus.AGAIN else 0):
            raise FrameError(f"an answer of status {status} with {count} bytes of rows, not {self.reply_bytes}")
        return DataReply(DataStatus(status), number, dropped, take(at, count))

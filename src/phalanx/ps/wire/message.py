"""What travels: a request with its reply, as the two ends see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from phalanx.ps.wire.frame import Array, Bytes, aligned


@dataclass(frozen=True, slots=True)
class RpcReply:
    """The answer to a request.

    On the client the arrays belong to the caller for as long as it keeps them. They may lie in a shared segment, which
    is used again once the last of them is gone; a caller that keeps a few rows of many for long should copy them.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON object."""

    arrays: Sequence[Array] = ()
    """Arrays of the types in `frame.DTYPES`."""


class ReplyBuffer:
    """Memory that the client set aside for the reply; arrays made in it are not copied on their way back."""

    __slots__ = ("_used", "memory")

    def __init__(self, memory: Bytes | None) -> None:
        self.memory = memory
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialised array, in the client's memory as long as that has room."""
        array: Array = np.empty(0, dtype)
        sizes = (shape,) if isinstance(shape, int) else shape
        count = int(np.prod(sizes, dtype=np.int64)) * array.dtype.itemsize
        if self.memory is None or self._used + count > len(self.memory):
            return np.empty(shape, dtype)
        start, self._used = self._used, aligned(self._used + count)
        return self.memory[start : start + count].view(array.dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """One request, as the handler of a `Listener` gets it.

    The arrays may lie in memory shared with the client: they are valid until the handler returns. What is kept longer
    must be copied.
    """

    op: str
    meta: dict[str, Any]
    arrays: list[Array]
    client: int
    """The client's number, from the handshake."""

    seq: int
    """1, 2, ... per client; a request that is sent again after a lost connection keeps its number."""

    peer: str
    """Name the client gave, as `worker 1`."""

    reply_buffer: ReplyBuffer = field(default_factory=lambda: ReplyBuffer(None))
    """Where arrays of the reply can be made without a copy: `request.reply_buffer.empty((n, dim), np.float32)`."""

    report_wait: Callable[[str, bool], None] = lambda waits_for, is_here: None
    """Tells the client that its answer waits for others: for whom, in words, and whether they are there. While they
    are, the answer is not late. Raises `ClosedError` when the client is gone."""


Handler = Callable[[RpcRequest], RpcReply]
"""Answers one request; may block; raises a `PhalanxError` to have it raised in the client."""

"""`EngineClient`: pushes to a server's engine of this process as a session hands them over, without sockets."""

from __future__ import annotations

import numpy as np

from phalanx._core import MemoryBudget, ServerContext
from phalanx.ps.server.service import Service
from phalanx.ps.stores.partition import ServerPart, partition_keys, partitioned_request
from phalanx.ps.stores.update import TableUpdate
from phalanx.ps.table.placement import table_salt
from phalanx.ps.wire.data_frame import DataRequest
from phalanx.ps.wire.frame import Bytes, FrameKind

PushPart = tuple[ServerPart, Bytes]
"""A push and its payload."""


def push_part(update: TableUpdate) -> PushPart:
    """Return a push of one table as it comes to its only server."""
    request = partitioned_request(1)
    request.add_push(update, partition_keys(update.keys, table_salt(update.table), 1), None)
    part = ServerPart(request, 0)
    payload = np.empty(part.payload_bytes, np.uint8)
    part.write(payload)
    return part, payload


class EngineClient:
    """A worker that declared its tables.

    Args:
        service: Whose engine takes its pushes, in mode `async`.
        client: Its number.
    """

    def __init__(self, service: Service, client: int) -> None:
        self._context = ServerContext(service.engine, "server 0", 1 << 30, MemoryBudget(1 << 30), print)
        self._client = client
        self.step = 0
        """Pushes so far."""

    def push(self, push: PushPart) -> None:
        """Push once."""
        part, payload = push
        raw = DataRequest(FrameKind.PUSH, part, self.step).encode(None)
        seq = self.step + 2  # 1 declared the tables
        self._context.answer("worker", self._client, FrameKind.PUSH, seq, raw, payload, _ignore)
        self.step += 1


def _ignore(waits_for: str, is_connected: bool) -> None:
    """No one waits in mode `async`."""

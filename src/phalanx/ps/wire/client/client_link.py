"""`ClientLink`: what native code and Python both know of a link: the number of its newest request, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.ps.wire.frame import Bytes
from phalanx.versions import HAS_NATIVE

__all__ = ["ClientLink"]

if TYPE_CHECKING or HAS_NATIVE:
    from phalanx._core import ClientLink
else:

    @dataclass(slots=True)
    class ClientLink:
        """See `csrc/client_link.h`. Without native code none of its requests is ever under way."""

        channel: Any
        buffer: Bytes
        client: int
        seq: int
        most_bytes: int
        writing: Any
        is_reading: bool = False
        was_read: bool = False
        has_waiter: bool = False
        has_ended: bool = False
        has_answered: bool = False

        def first_due(self) -> None:
            """Return None: no part is under way."""

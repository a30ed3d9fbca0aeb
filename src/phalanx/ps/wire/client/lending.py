"""`Borrower`, `LentLink`: links that are lent to who sends over several at once, while nobody else uses one of them."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from phalanx.ps.wire.frame import Bytes


class Borrower(Protocol):
    """Who sends pulls and pushes over the links of several connections at once, while nobody else uses one of them."""

    def give_back(self) -> None:
        """Give all links back, with what is under way on them. Runs with the lock of the connections held."""
        ...

    @property
    def uses(self) -> int:
        """How often it sent or waited so far."""
        ...

    @property
    def is_reading(self) -> bool:
        """Whether it waits for replies now."""
        ...


class LentLink(NamedTuple):
    """What a `Borrower` needs to know of a link."""

    fd: int
    buffer: Bytes
    start: int
    end: int
    """What was read and not taken begins and ends here in the buffer."""

    client: int
    seq: int
    """Number of the newest request."""

    room: int
    """Bytes of requests that may be on their way."""

    due: list[tuple[int, int]]
    """Number, and bytes of rows, of each request without an answer."""

    writing: threading.Lock
    """Held while a request is written."""

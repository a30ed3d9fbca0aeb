"""`MemberChannel`: JSON lines between the agent and one rank, over a Unix stream socket pair."""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
from typing import Any

logger = logging.getLogger("phalanx.launch")

_READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is no message of ours."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading the fields of a message may raise that is none of this version."""


class MemberChannel:
    """The agent's end; never blocks, however slowly the rank reads."""

    def __init__(self, end: socket.socket, title: str) -> None:
        end.setblocking(False)
        self.socket: socket.socket | None = end
        self._title = title
        self._unsent = b""
        self._partial = b""

    @property
    def events(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message and send what the socket takes."""
        if self.socket is not None:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if self.socket is None:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()  # the process is gone; its end is reported by who started it

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; what is no JSON object is reported and left out."""
        if self.socket is None:
            return []
        try:
            while data := self.socket.recv(_READ_BYTES):
                self._partial += data
                if len(self._partial) > LONGEST_LINE:
                    break
            else:
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._partial = self._partial.split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            logger.warning("%s sent a membership message without an end; it is ignored", self._title)
            self._partial = b""
        return [message for line in lines if (message := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        logger.warning("%s sent a membership message that is no JSON object: %.80r; it is ignored", self._title, line)
        return None

    def end(self) -> None:
        """Send what is queued, as far as the socket takes it, and nothing after it."""
        self.flush()
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; the rank sees that no agent is left."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

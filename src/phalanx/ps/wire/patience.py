"""`Patience`: how long a client asks for a server that it lost. Times are those of `time.monotonic`."""

from __future__ import annotations


class Patience:
    """Begins with a loss and ends with an answer. A server that is on its way to an answer does not use it up.

    Args:
        seconds: How long to ask for a server that gives no sign.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._can_grow = True

    def begin(self, now: float) -> float:
        """Return when to give up a server that is lost now, or was before and has not answered since."""
        if self._until is None:
            self._until = now + self._seconds
        return self._until

    def renew(self, now: float) -> None:
        """Note that the server came nearer to an answer."""
        if self._until is not None and self._can_grow:
            self._until = now + self._seconds

    def limit(self, now: float) -> None:
        """Note that the server's start failed: it may be started again, and fail again whatever it says before."""
        if self._can_grow:
            self._until, self._can_grow = now + self._seconds, False

    def end(self) -> None:
        """Note that the server answered."""
        self._until, self._can_grow = None, True

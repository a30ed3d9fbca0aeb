"""`first_failure`: root cause of a failed job: which process failed first (pure).

When one rank dies the others fail too, often within a millisecond and sometimes before its end is noticed. So an ending
is judged by its kind before its time: a signal that we did not send is a cause; then an exception of the script's own;
an error that says a peer is gone is a consequence.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import PeerLostError

_CAUSE, _ERROR, _CONSEQUENCE = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """How one process ended. Plain values: it is sent between hosts."""

    title: str
    """`rank 1`, `server 0`, ..."""

    role: str
    rank: int
    host: str
    pid: int
    code: int
    """Exit code, or minus the signal."""

    time: float
    """When it ended, or when it recorded its exception: seconds since the epoch."""

    log_file: str
    stopped_by_us: bool = False
    kind: str = ""
    """"exception" or "peer" when the process recorded an error; "hang" when the others waited for it too long."""

    error: str = ""
    """`Type: message` of that error."""

    traceback: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this ending is a failure of its own."""
        return self.code != 0 and not self.stopped_by_us

    @property
    def exit_code(self) -> int:
        """The launcher's exit code when this is the first failure."""
        return 128 - self.code if self.code < 0 else (self.code or 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ProcessExit:
        """Undo `to_json`.

        Raises:
            PeerLostError: If it is none; another program may write to the hosts' store, which asks for no password.
        """
        try:
            read = cls(**{**values, "last_lines": tuple(values["last_lines"])})
        except (TypeError, KeyError):
            read = None
        if read is None or not all(isinstance(getattr(read, name), kind) for name, kind in _KINDS.items()):
            raise PeerLostError(
                f"Another host reported a failure as {str(values)[:60]!r}, which no launcher of this version says. Run "
                "the same version on every host, and let nothing else connect to --master-port."
            )
        return read


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("title", "role", "host", "log_file", "kind", "error", "traceback"), str),
    **dict.fromkeys(("rank", "pid", "code"), int),
    "time": (int, float),
}


def _severity(process_exit: ProcessExit) -> int:
    if process_exit.kind == "peer":
        return _CONSEQUENCE
    if process_exit.kind == "hang":
        return _CAUSE
    if process_exit.code < 0 and -process_exit.code != signal.SIGABRT:
        return _CAUSE
    # SIGABRT is how a communication thread ends its process when a peer is gone, and how libraries report
    # bugs.
    return _ERROR


def is_consequence(process_exit: ProcessExit) -> bool:
    """Return whether this ending says only that someone else is gone."""
    return _severity(process_exit) == _CONSEQUENCE


def first_failure(exits: Iterable[ProcessExit]) -> ProcessExit | None:
    """Return the ending that started the failure, or None when nothing failed.

    When all failures only say that a peer is gone, and a process had ended with exit code 0 by itself, that early end
    is the cause: it closed its connections before its exit could be seen, so its time says nothing.
    """
    seen: Sequence[ProcessExit] = list(exits)
    failures = sorted((e for e in seen if e.failed), key=lambda e: (_severity(e), e.time))
    if not failures:
        return None
    first = failures[0]
    early = [e for e in seen if e.code == 0 and not e.stopped_by_us and e.role == first.role]
    if is_consequence(first) and early:
        return min(early, key=lambda e: e.time)
    return first

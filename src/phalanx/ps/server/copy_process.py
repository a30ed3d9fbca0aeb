"""`CopyProcess`: fork a copy-on-write child that writes a snapshot while the server goes on."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from phalanx import errors
from phalanx.errors import BackendError, PhalanxError


class CopyProcess:
    """A child forked from this process, which does `work` and ends.

    The child has this process's memory as it was, and none of its sockets and threads: `work` must take no lock that
    another thread could hold, import nothing, and log nothing.

    Args:
        work: What the child does; returns a JSON object.

    Raises:
        BackendError: If the system makes no copy.
    """

    def __init__(self, work: Callable[[], dict[str, Any]]) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as e:
            os.close(reading)
            os.close(writing)
            raise BackendError(
                f"A snapshot is written by a copy of this process, which the system did not make: {e.strerror}. Free "
                "memory, or let the system promise more than it has (vm.overcommit_memory=1); then save again."
            ) from e
        if self._pid == 0:
            _run(work, writing, parent)
        os.close(writing)
        self._answer: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, args=(reading,), name="snapshot", daemon=True)
        self._reader.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the child has ended, at most so many seconds; returns whether it has."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def result(self) -> dict[str, Any]:
        """Return what `work` returned.

        Raises:
            PhalanxError: If it raised that, or the child was killed.
        """
        self._reader.join()
        if "error" in self._answer:
            raise getattr(errors, self._answer["error"], BackendError)(self._answer["message"])
        done: dict[str, Any] = self._answer["done"]
        return done

    def _read(self, reading: int) -> None:
        with open(reading, "rb") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if text:
            self._answer = json.loads(text)
        else:
            self._answer = {
                "error": "BackendError",
                "message": f"The process that wrote a snapshot ended with {code} before it was done. Look for a lack "
                "of memory, then save again.",
            }


def give_up_without(parent: int) -> None:
    """End this process if its parent has ended: nobody waits for what it writes."""
    if os.getppid() != parent:
        os._exit(1)


def _run(work: Callable[[], dict[str, Any]], writing: int, parent: int) -> NoReturn:
    code = 1
    try:
        # Collecting garbage would touch, and so copy, all memory shared with the parent.
        gc.disable()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # Clients must see the end of the parent's connections when it ends.
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != writing:
                _close(fd)
        with open(writing, "wb") as pipe:
            pipe.write(_answer(work))
        code = 0
    finally:
        os._exit(code)


def _answer(work: Callable[[], dict[str, Any]]) -> bytes:
    try:
        answer: dict[str, Any] = {"done": work()}
    except PhalanxError as e:
        answer = {"error": type(e).__name__, "message": str(e)}
    except Exception as e:  # noqa: BLE001 -- the parent reports it
        answer = {"error": "InternalError", "message": f"A snapshot was not written: {e!r}. Please report it."}
    return json.dumps(answer).encode()


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        return  # the one that listed the folder

"""The log folder: one job at a time in it, the run before kept apart."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from phalanx.errors import LaunchError

logger = logging.getLogger("phalanx.launch")

ENDED = "ended.json"
"""How the job ended, for programs: the launcher's exit code with the first failure, or the launcher's own error."""

_OURS = (
    ENDED,
    "workerlog.*",
    "serverlog.*",
    "heterlog.*",
    "endpoints.log",
    "error.*",
    "events.*",
    "launcher.*",
    "attempt-*",
    "servers",
    "rank_[0-9]*",
    "server_[0-9]*",
    "heter_worker_[0-9]*",
)


class LogFolder:
    """The folder this job writes to, locked for as long as the launcher lives."""

    def __init__(self, asked: str) -> None:
        """Take `asked`, or `asked.2`, `asked.3`, ... while other jobs that still run hold those before.

        Raises:
            LaunchError: If the folder cannot be made or written to.
        """
        self.path, self._lock = _take(asked)
        if str(self.path) != os.path.abspath(asked):
            logger.warning("%s is in use by another job that runs now; this one writes to %s", asked, self.path)
        self._move("previous", replace=True)

    def set_aside(self, attempt: int) -> None:
        """Move the files of an attempt that failed to `attempt-N`."""
        self._move(f"attempt-{attempt}", replace=False)

    def record_end(self, **values: Any) -> None:
        """Write how the job ended, whole or not at all."""
        partial = self.path / f"{ENDED}.partial"
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.rename(self.path / ENDED)

    def _move(self, name: str, *, replace: bool) -> None:
        found = [p for pattern in _OURS for p in self.path.glob(pattern) if p.name != name]
        if not replace:
            found = [p for p in found if not p.name.startswith("attempt-")]
        if not found:
            return
        target = self.path / name
        if replace:
            shutil.rmtree(target, ignore_errors=True)
        target.mkdir(exist_ok=True)
        for path in found:
            path.rename(target / path.name)


def _take(asked: str) -> tuple[Path, TextIO]:
    for number in range(1, 1000):
        path = Path(os.path.abspath(asked if number == 1 else f"{asked}.{number}"))
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("a")
        except OSError as error:
            raise LaunchError(
                f"--log_dir {asked} cannot be written to ({error.strerror}). Choose another folder."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return path, lock
    raise LaunchError(f"--log_dir {asked}: 999 jobs write there already. Choose another folder.")


def shown(path: str) -> str:
    """Return `path` as a user in the current folder would type it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log, with what a progress bar overwrote left out."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]

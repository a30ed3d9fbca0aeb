"""`build_once`: create a cached file or folder exactly once across processes."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.files import file_lock
from phalanx.units import format_mb

logger = logging.getLogger("phalanx.jobs")

_SILENCE_S = 5.0
"""Seconds between two lines about progress."""


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`, made first if it is not there.

    One process makes it while others wait. It appears under its name only when it is whole.

    Args:
        target: The file or folder.
        make: Makes it at the path it is given, which is not there yet; may raise.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    with file_lock(lock, lambda: logger.info("another process has %s in hand; waiting for it", target)):
        if not target.exists():
            part = target.with_name(f".{target.name}.part")
            remove(part)  # what a process that was killed had made
            try:
                make(part)
                part.rename(target)
            finally:
                remove(part)
    return target


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Progress:
    """Says every few seconds how far something long is."""

    def __init__(self, what: str, total_bytes: int | None) -> None:
        self._what, self._total, self._done, self._logged_at = what, total_bytes, 0, time.monotonic()

    def add(self, count: int) -> None:
        """Count `count` bytes more."""
        self._done += count
        if time.monotonic() - self._logged_at > _SILENCE_S:
            self._logged_at = time.monotonic()
            total = "?" if self._total is None else format_mb(self._total)
            logger.info("%s: %s of %s", self._what, format_mb(self._done), total)

"""Locks on files that show that a process lives: children inherit them, and they end with the last holder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.files import try_lock


@contextlib.contextmanager
def liveness_lock(path: Path) -> Iterator[int | None]:
    """The lock on a file, made if missing, as a descriptor that children may be given; None while another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = try_lock(path)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)

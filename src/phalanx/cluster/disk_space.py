"""`named_errors`: free disk space, and errors that say which file system is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.i18n import tr

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Return whether an error means that the file system, or this user's share of it, is full."""
    return error.errno in _FULL


def free_bytes(folder: str | Path) -> int:
    """Return the free bytes of the file system of `folder`, or of its nearest parent that exists."""
    at = Path(os.path.abspath(folder))
    while not at.exists() and at != at.parent:
        at = at.parent
    return shutil.disk_usage(at).free


def describe_full(folder: str | Path, needed: int) -> str:
    """Return in words that a file system is full: which folder, the bytes needed and the bytes free.

    Args:
        folder: Where a write failed.
        needed: Bytes of that write.
    """
    return tr(
        "the file system of {folder} is full, {needed} bytes are needed and {free} are free",
        folder=folder,
        needed=f"{needed:,}",
        free=f"{free_bytes(folder):,}",
    )


@contextmanager
def named_errors(path: Path, needed: int) -> Iterator[None]:
    """Remove a new file that could not be written, and have the error name it, with the room where that was missing.

    Python names the file when it cannot be opened, and not when a write to it fails.

    Args:
        path: The file that is written inside.
        needed: Its size.

    Raises:
        OSError: As raised inside.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        if is_full(error):
            path.unlink(missing_ok=True)  # what it took counts as free
            why += f" ({needed:,} bytes are needed, {free_bytes(path):,} are free)"
        raise OSError(error.errno, why, str(path)) from error

"""`list_saved`: the checkpoints that the attempts of a job have saved in the folder that they share.

A job writes there, and may leave anything: links to what is not its own, pipes, files without end. None is followed or
waited for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Literal

from phalanx.checkpoint.folder.checkpoint_folder import step_of
from phalanx.checkpoint.folder.marker import COMPLETE, parse_marker
from phalanx.errors import DataError

_MOST = 100
"""Most checkpoints that are listed, the newest."""

_MOST_FILES = 10_000
"""Most files of a checkpoint whose bytes are added up."""

_MARKER_BYTES = 1 << 16
"""Most bytes of a marker; a whole one has some hundred."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a job has saved."""

    folder: str
    """Where it is, below the folder that the job's attempts share (PHALANX_CHECKPOINT_DIR)."""

    step: int
    saved: datetime
    bytes: int
    state: Literal["complete", "unfinished", "unreadable"]
    """Complete: its save ended; files are checked when it is loaded. Unfinished: a save that still runs, or did not
    end."""

    why: str
    """Why one cannot be read."""


def list_saved(shared: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints of a job, newest first: those in its shared folder and in the folders there.

    Args:
        shared: The folder that its attempts share.
    """
    if shared.is_symlink():
        return []
    parents = [shared, *(path for path in _list_folders(shared) if step_of(path.name) is None)]
    folders = [
        (changed, path)
        for parent in parents
        for path in _list_folders(parent)
        if step_of(path.name) is not None and (changed := _changed(path)) is not None
    ]
    newest = sorted(folders, key=lambda item: item[0], reverse=True)[:_MOST]
    return [_describe(shared, path, changed) for changed, path in newest]


def _list_folders(parent: Path) -> list[Path]:
    """Return the folders in another one whose names can be shown; none where it cannot be read."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [parent / name for name in sorted(names) if name.isprintable()]


def _changed(path: Path) -> datetime | None:
    """Return when a checkpoint was completed, or its folder changed; None if it has gone, or never was."""
    for file in (path / COMPLETE, path):
        with suppress(OSError, ValueError, OverflowError):
            return datetime.fromtimestamp(file.lstat().st_mtime, UTC)
    return None


def _describe(shared: Path, path: Path, changed: datetime) -> SavedCheckpoint:
    state: Literal["complete", "unfinished", "unreadable"] = "complete"
    why = ""
    try:
        parse_marker(_read_marker(path / COMPLETE), path / COMPLETE)
    except FileNotFoundError:
        state = "unfinished"
    except OSError as error:
        state, why = "unreadable", f"{COMPLETE}: {error.strerror}"
    except DataError as error:
        state, why = "unreadable", str(error).replace(f"{path}{os.sep}", "")
    return SavedCheckpoint(
        folder=str(path.relative_to(shared)),
        step=step_of(path.name) or 0,
        saved=changed,
        bytes=sum(islice(_list_sizes(path), _MOST_FILES)),
        state=state,
        why=why,
    )


def _read_marker(path: Path) -> bytes:
    """Return what a marker holds; a link is an error, and so is what is no file or too large for a marker."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        described = os.fstat(descriptor)
        if not stat.S_ISREG(described.st_mode) or described.st_size > _MARKER_BYTES:
            raise DataError(f"{path} is no marker of a checkpoint. Take another copy.")
        return os.read(descriptor, _MARKER_BYTES)
    finally:
        os.close(descriptor)


def _list_sizes(path: Path) -> Iterator[int]:
    """Yield the bytes of the files in a folder and the folders there; what goes meanwhile is left out."""
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                described = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(described.st_mode):
                    yield described.st_size

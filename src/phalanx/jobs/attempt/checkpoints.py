"""`list_saved`: the checkpoints that the attempts of a job have saved in the folder that they share."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from phalanx.checkpoint.folder.checkpoint_folder import list_checkpoints
from phalanx.checkpoint.folder.marker import COMPLETE, Marker

_MOST = 100
"""Most checkpoints that are listed, the newest."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a job has saved."""

    folder: str
    """Where it is, below the folder that the job's attempts share (PHALANX_CHECKPOINT_DIR)."""

    step: int
    saved: datetime
    bytes: int
    state: Literal["complete", "unfinished", "broken"]
    """Unfinished: a save that still goes on, or did not end."""

    why: str
    """What is wrong with a broken one."""


def list_saved(shared: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints of a job, newest first: those in its shared folder and in the folders there.

    Args:
        shared: The folder that its attempts share.
    """
    if not shared.is_dir():
        return []
    parents = [shared, *(path for path in sorted(shared.iterdir()) if path.is_dir() and not path.is_symlink())]
    saved = []
    for path, marker in (item for parent in parents for item in list_checkpoints(parent).items()):
        with suppress(FileNotFoundError):  # the job removes old ones meanwhile
            saved.append(_describe(shared, path, marker))
    return sorted(saved, key=lambda checkpoint: checkpoint.saved, reverse=True)[:_MOST]


def _describe(shared: Path, path: Path, marker: Marker | str) -> SavedCheckpoint:
    is_ended = (path / COMPLETE).exists()
    changed = (path / COMPLETE if is_ended else path).stat().st_mtime
    return SavedCheckpoint(
        folder=str(path.relative_to(shared)),
        step=int(path.name.rpartition("-")[2]),
        saved=datetime.fromtimestamp(changed, UTC),
        bytes=sum(file.lstat().st_size for file in path.rglob("*")),
        state="complete" if isinstance(marker, Marker) else "broken" if is_ended else "unfinished",
        why=marker if isinstance(marker, str) and is_ended else "",
    )

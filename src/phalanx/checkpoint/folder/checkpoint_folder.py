"""The `step-<n>` folders of a checkpoint folder: list them, remove failed saves, prune old checkpoints."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from phalanx.checkpoint.folder.marker import COMPLETE, Marker, read_marker
from phalanx.errors import DataError

logger = logging.getLogger("phalanx.checkpoint")

_NAME = re.compile(r"step-(\d+)", re.ASCII)
_FILE_NAME = re.compile(
    r"(?:rank-\d+|tables|manifest)-(?P<save>[0-9a-f]{8})(?:\.safetensors|\.json)?|complete\.json\.(?P<part>[0-9a-f]{8})"
)


def step_folder(parent: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return parent / f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step of the folder of a checkpoint; None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one checkpoint, complete or not, rather than a folder of checkpoints."""
    return (folder / COMPLETE).exists() or (_NAME.fullmatch(folder.name) is not None and not list_checkpoints(folder))


def list_checkpoints(parent: Path) -> dict[Path, Marker | str]:
    """Return the checkpoints of a folder, newest first, with their markers; broken ones last, with the reason."""
    markers: dict[Path, Marker | str] = {}
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if _NAME.fullmatch(folder.name) and folder.is_dir():
            try:
                markers[folder] = read_marker(folder)
            except DataError as error:
                markers[folder] = str(error)
    return dict(sorted(markers.items(), key=lambda item: _sequence(item[1]), reverse=True))


def _sequence(marker: Marker | str) -> int:
    return -1 if isinstance(marker, str) else marker.sequence


def next_numbers(parent: Path) -> tuple[int, int]:
    """Return the sequence number of the next save to a folder, and the step after the highest there."""
    checkpoints = list_checkpoints(parent)
    steps = [int(folder.name.rpartition("-")[2]) for folder in checkpoints]
    return max((_sequence(marker) for marker in checkpoints.values()), default=0) + 1, max(steps, default=0) + 1


def sweep(parent: Path) -> None:
    """Remove the files of saves that did not complete; targets of links are left alone."""
    for folder, marker in list_checkpoints(parent).items():
        if folder.is_symlink():
            continue
        if isinstance(marker, Marker):
            clean(folder, marker.save)
        elif not (folder / COMPLETE).exists():
            logger.warning("%s was not finished by the process that wrote it, and is removed", folder)
            clean(folder, None)


def clean(folder: Path, keep: str | None) -> None:
    """Remove the files of all saves but one from a checkpoint's folder, and the folder once it is empty."""
    for path in list(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match and (match["save"] or match["part"]) != keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def prune(parent: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`; of a link to one, only the link."""
    complete = [(folder, marker) for folder, marker in list_checkpoints(parent).items() if isinstance(marker, Marker)]
    for folder, _ in complete[keep:]:
        if folder.is_symlink():
            folder.unlink()
            continue
        # The marker goes first: if this is interrupted, what remains is no checkpoint.
        (folder / COMPLETE).unlink()
        clean(folder, None)

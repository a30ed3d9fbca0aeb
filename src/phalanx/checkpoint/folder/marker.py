"""`Marker`: what completes a checkpoint: the file that is written last and names the manifest."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

from phalanx.errors import DataError

COMPLETE = "complete.json"
VERSION = 1

PARSE_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""Errors of parsing JSON of another structure."""

_FILE_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*")


@dataclass(frozen=True, slots=True)
class Marker:
    """The complete-marker of a checkpoint."""

    save: str
    """Name of the save, part of its files' names."""

    sequence: int
    """One more than that of the save before it in this folder: the newest is not always that of the highest step."""

    step: int
    manifest: str
    sha256: str
    version: int = VERSION


def read_marker(folder: Path) -> Marker:
    """Return the marker of a checkpoint.

    Raises:
        DataError: If the folder holds no complete checkpoint, or one of another version.
    """
    path = folder / COMPLETE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{folder} has no {COMPLETE}: its save did not end.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Let this user read it.") from None
    return parse_marker(text, path)


def parse_marker(text: bytes, path: Path) -> Marker:
    """Return the marker that a file holds.

    Args:
        text: What is in the file.
        path: The file, for errors.

    Raises:
        DataError: If it is none, or one of another version.
    """
    try:
        value = json.loads(text)
        if value.get("version") != VERSION:
            raise DataError(
                f"{path} has version {value.get('version')}; this version of phalanx reads {VERSION}. Load it with the "
                "version that saved it."
            )
        marker = Marker(**value)
        for field in fields(marker):
            kind = type(getattr(marker, field.name)).__name__
            if kind != field.type:
                raise ValueError(f"{field.name} is of type {kind}, not {field.type}")
        require_plain(marker.manifest)
    except PARSE_ERRORS as error:
        raise DataError(f"{path} is broken: {error}. Take another copy.") from None
    return marker


def require_plain(name: str) -> None:
    """Raise unless a name is that of a file beside the one that names it: none may lead out of the folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no file of a checkpoint")

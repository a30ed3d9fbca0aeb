"""`SnapshotManifest`: the manifest of a snapshot, written last, so that its presence means complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from phalanx.errors import ConfigError, DataError, did_you_mean
from phalanx.files import write_atomically
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.rules import TableSpec

MANIFEST = "manifest.json"
SnapshotMode = Literal["full", "delta", "serving", "serving_bf16", "serving_int8", "text"]
MODES: tuple[SnapshotMode, ...] = get_args(SnapshotMode)
_FILE_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,254}")
HASH = "mix64 (Stafford 13) of id ^ blake2b-64(table); top 10 bits"

_frozen = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_frozen)
class SnapshotFile:
    """A file of a snapshot."""

    name: str
    bytes: int
    checksum: int
    """CRC-32 of the headers of its records, which hold those of the rest; of all its bytes for text."""


@dataclass(frozen=True, config=_frozen)
class BaseSnapshot:
    """The full snapshot that a delta changes."""

    save: str
    directory: str
    """Relative to the delta's folder."""

    tables: list[str]
    """Tables of which the delta holds changes only; it holds all of the others."""


@dataclass(frozen=True, config=_frozen)
class SnapshotManifest:
    """What a snapshot holds."""

    save: str
    """Name of this save; part of its files' names, so that saving again into a folder overwrites none of them."""

    mode: SnapshotMode
    tables: dict[str, TableSpec]
    rows: dict[str, int]
    files: dict[str, SnapshotFile]
    """By number of virtual shard, or of server for text."""

    extra: Any
    base: BaseSnapshot | None = None
    dense: SnapshotFile | None = None
    leases: dict[str, Any] | None = None
    steps: list[int] | None = None
    """Pushes of each worker that the rows hold: no more and no less; in mode `sync` those of complete steps."""

    servers: int = 1
    shards: int = SHARDS
    hash: str = HASH
    schema: int = 2
    """Schema 2 has removed ids in deltas, and days after which ids go in specifications."""


_manifest: TypeAdapter[SnapshotManifest] = TypeAdapter(SnapshotManifest)


def check_mode(mode: str) -> SnapshotMode:
    """Return the mode of a save.

    Raises:
        ConfigError: If it is none.
    """
    for valid in MODES:
        if mode == valid:
            return valid
    raise ConfigError(f"Asked for a snapshot of mode {mode!r}; modes: {', '.join(MODES)}.{did_you_mean(mode, MODES)}")


def write_manifest(directory: Path, manifest: SnapshotManifest) -> None:
    """Put a manifest in place of the one there, in one step and durably."""
    text = json.dumps(_manifest.dump_python(manifest, mode="json"), indent=1)
    write_atomically(directory / MANIFEST, text, temporary=directory / f"{MANIFEST}.{manifest.save}")


def read_manifest(directory: Path, *, check_files: bool = True) -> SnapshotManifest:
    """Return the manifest of a snapshot.

    Args:
        directory: Folder of the snapshot.
        check_files: Whether its files must be there in full length.

    Raises:
        ConfigError: If the folder holds no snapshot.
        DataError: If the manifest is broken or of another version, or a file is missing or too short; names the file.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"There is no snapshot in {directory}: {MANIFEST} is missing, which a save writes last. Give the folder of "
            "a save that ended."
        ) from None
    value = _parse(path, text)
    try:
        manifest = _manifest.validate_python(value)
    except ValidationError as e:
        raise DataError(f"{path} is not the manifest of a snapshot: {e}") from e
    _check_names(path, manifest)
    if check_files:
        _check_files(directory, manifest)
    return manifest


def _parse(path: Path, text: bytes) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(f"{path} is broken at byte {e.pos}: {e.msg}. Take another copy of the snapshot.") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path} is broken: {e}. Take another copy of the snapshot.") from e
    versions = (value.get("schema"), value.get("shards"), value.get("hash")) if isinstance(value, dict) else (None,) * 3
    if versions[0] not in (1, 2) or versions[1:] != (SHARDS, HASH):
        raise DataError(
            f"{path} has schema {versions[0]}, {versions[1]} shards by {versions[2]!r}; this version reads schema 1 "
            f"and 2, {SHARDS} shards by {HASH!r}. Read it with the version that wrote it."
        )
    return value


def _check_names(path: Path, manifest: SnapshotManifest) -> None:
    """Raise unless every file is one of this folder: no name may lead out of it."""
    for file in _files(manifest):
        if not _FILE_NAME.fullmatch(file.name):
            raise DataError(f"{path} names {file.name!r}, which is no file of a snapshot. Take another copy.")
    if manifest.base is not None and "\0" in manifest.base.directory:
        raise DataError(f"{path} names the folder {manifest.base.directory!r}, which is none. Take another copy.")


def _files(manifest: SnapshotManifest) -> list[SnapshotFile]:
    return [*manifest.files.values(), *([manifest.dense] if manifest.dense else [])]


def _check_files(directory: Path, manifest: SnapshotManifest) -> None:
    for file in _files(manifest):
        try:
            size = (directory / file.name).stat().st_size
        except FileNotFoundError:
            raise DataError(
                f"{directory / file.name} is missing, which {MANIFEST} names. Copy the whole folder."
            ) from None
        if size != file.bytes:
            raise DataError(
                f"{directory / file.name} ends at byte {size}, it was written with {file.bytes}. Take another copy."
            )

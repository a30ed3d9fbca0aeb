"""`CheckpointManifest`: the manifest of a checkpoint (JSON: tensors, chunks, files).

    <folder>/step-200/rank-0-<save>.safetensors   what rank 0 wrote; one file a rank
    <folder>/step-200/manifest-<save>.json        every tensor, its pieces, all other values, checksums of files
    <folder>/step-200/complete.json               names the manifest and its digest

A folder without a marker is not a checkpoint. Files carry the name of their save, so saving the same step again touches
none of the files there until the marker is replaced, in one step.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx import __version__
from phalanx.checkpoint.folder.marker import COMPLETE, PARSE_ERRORS, VERSION, Marker, read_marker, require_plain
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.safetensors_file import FileRecord, Slot, are_counts, dtype_of, is_shape
from phalanx.cluster.disk_space import named_errors
from phalanx.errors import DataError
from phalanx.files import sync_directory, sync_file, write_atomically

BLOCK_BYTES_LIMIT = 1 << 30
"""Largest block of a file with a checksum of its own that is read."""

REQUIRED_VALUES = frozenset({"aliases", "averages", "model", "random", "kept"})
"""What every rank saves beside tensors."""


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A chunk of a tensor, and where it is stored."""

    chunk: TensorChunk
    rank: int
    begin: int
    """Offset in the file of that rank."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A full tensor, stored in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    saved_chunks: tuple[SavedChunk, ...]

    def slot(self, saved_chunk: SavedChunk) -> Slot:
        """Return where in its file a chunk is."""
        return Slot(self.dtype, saved_chunk.chunk.size, saved_chunk.begin)


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Everything of a checkpoint but the data of its tensors."""

    folder: Path
    save: str
    """Name of the save that wrote it, which no other has."""

    step: int
    world_size: int
    files: tuple[FileRecord, ...]
    """By rank."""

    tensors: dict[str, SavedTensor]
    values: list[Any]
    """Values of every rank, by rank; equal ones are one object."""

    tables: str | None
    """Folder of the snapshot of its tables, beside the files."""


def write_manifest(folder: Path, marker_terms: dict[str, Any], body: dict[str, Any]) -> Marker:
    """Write the manifest of a checkpoint, and its marker last; both durable.

    Args:
        folder: The folder of the checkpoint.
        marker_terms: `save`, `sequence` and `step` of the marker.
        body: The manifest, JSON.
    """
    text = json.dumps({"version": VERSION, "phalanx": __version__, "torch": torch.__version__, **body}).encode()
    name = f"manifest-{marker_terms['save']}.json"
    _write_durable(folder / name, text)
    marker = Marker(**marker_terms, manifest=name, sha256=hashlib.sha256(text).hexdigest())
    # Files must have their names on disk before the marker has its own.
    sync_directory(folder)
    part, data = folder / f"{COMPLETE}.{marker.save}", json.dumps(asdict(marker), indent=1)
    with named_errors(part, len(data)):
        write_atomically(folder / COMPLETE, data, temporary=part)
    sync_directory(folder.parent)
    return marker


def _write_durable(path: Path, data: bytes) -> None:
    """Write a new file, and wait until it is on disk."""
    with named_errors(path, len(data)), path.open("xb") as file:
        file.write(data)
        sync_file(file)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint, after checking that its files exist in full length.

    Raises:
        DataError: If the folder holds no complete checkpoint, the manifest's digest differs, or a file is missing or
            truncated; names it.
    """
    marker = read_marker(folder)
    path = folder / marker.manifest
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Take another copy.") from None
    if hashlib.sha256(text).hexdigest() != marker.sha256:
        raise DataError(f"{path} is broken: its digest is not that of {COMPLETE}. Take another copy.")
    try:
        manifest = _manifest(folder, marker, json.loads(text))
    except PARSE_ERRORS as error:
        raise DataError(f"{path} does not describe a checkpoint: {error!r}. Take another copy.") from None
    for file in manifest.files:
        _require_length(folder / file.name, file.bytes)
    return manifest


def _manifest(folder: Path, marker: Marker, value: dict[str, Any]) -> CheckpointManifest:
    """Return a manifest after checking that every chunk exists and lies inside the files of its folder."""
    files = tuple(_file(entry) for entry in value["files"])
    unique, of_rank = value["values"]["unique"], value["values"]["of_rank"]
    if not len(files) == len(of_rank) == value["world_size"]:
        raise ValueError(f"{value['world_size']} ranks have {len(files)} files and {len(of_rank)} values")
    for values in unique:
        if missing := REQUIRED_VALUES - set(values):
            raise ValueError(f"the values of a rank lack {', '.join(sorted(missing))}")
    if value["tables"] is not None:
        require_plain(value["tables"])
    return CheckpointManifest(
        folder=folder,
        save=marker.save,
        step=marker.step,
        world_size=value["world_size"],
        files=files,
        tensors={name: _tensor(name, entry, files) for name, entry in value["tensors"].items()},
        values=[unique[index] for index in of_rank],
        tables=value["tables"],
    )


def _file(entry: dict[str, Any]) -> FileRecord:
    file = FileRecord(entry["name"], entry["bytes"], entry["block_bytes"], tuple(entry["crc32"]))
    require_plain(file.name)
    if not are_counts((file.bytes, file.block_bytes, *file.crc32)):
        raise ValueError(f"{file.name} is described with what is no number")
    if not 0 < file.block_bytes <= BLOCK_BYTES_LIMIT or len(file.crc32) != -(-file.bytes // file.block_bytes):
        raise ValueError(f"{file.name} of {file.bytes} bytes has {len(file.crc32)} blocks of {file.block_bytes}")
    return file


def _require_length(path: Path, length: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing, which the manifest names. Copy the whole folder.") from None
    except OSError as error:  # as of a name that is too long for the file system
        raise DataError(f"{path!s:.300} cannot be read: {error.strerror}. Take another copy.") from None
    if size != length:
        raise DataError(f"{path} ends at byte {size}, it was written with {length}. Take another copy.")


def _tensor(name: str, entry: list[Any], files: tuple[FileRecord, ...]) -> SavedTensor:
    dtype, shape, entries = dtype_of(entry[0]), tuple(entry[1]), entry[2]
    chunks = tuple(
        SavedChunk(TensorChunk(tuple(offset), tuple(size)), rank, begin) for rank, offset, size, begin in entries
    )
    if not is_shape(shape):
        raise ValueError(f"{name!r} cannot have the shape {list(shape)}")
    for chunk in chunks:
        if not are_counts((*chunk.chunk.offset, *chunk.chunk.size, chunk.rank, chunk.begin)):
            raise ValueError(f"a piece of {name!r} lies outside of it, or where no number says")
        places = zip(chunk.chunk.offset, chunk.chunk.size, shape, strict=True)
        is_inside = all(at + n <= extent for at, n, extent in places)
        end = chunk.begin + chunk.chunk.count * dtype.itemsize
        if not is_inside or end > files[chunk.rank].bytes:
            raise ValueError(f"a piece of {name!r} lies outside of it, or of its file")
    if sum(chunk.chunk.count for chunk in chunks) < math.prod(shape):
        raise ValueError(f"parts of {name!r} are in no file")
    return SavedTensor(dtype, shape, chunks)

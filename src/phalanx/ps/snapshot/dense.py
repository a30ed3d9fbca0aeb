"""`write_extra`, `read_extra`: nested dicts of values and tensors beside the tables of a snapshot."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import DataError
from phalanx.files import sync_file
from phalanx.ps.snapshot.manifest import SnapshotFile, SnapshotManifest
from phalanx.state_tree import pack_tree, unpack_tree


def write_extra(directory: Path, save: str, extra: Mapping[str, object]) -> tuple[Any, SnapshotFile | None]:
    """Write the tensors of a tree of dicts, lists and tuples, and return the rest of it as JSON, and the file.

    Raises:
        ConfigError: If the tree holds something that is neither JSON nor a tensor; names where.
    """
    tensors: dict[str, Any] = {}
    value = pack_tree(dict(extra), "extra", tensors)
    if not tensors:
        return value, None
    from safetensors.torch import save as as_bytes

    # A tensor may share its memory with another; each is written for itself.
    data = as_bytes({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()})
    path = directory / f"dense-{save}.safetensors"
    with path.open("wb") as file:
        file.write(data)
        sync_file(file)
    return value, SnapshotFile(path.name, len(data), zlib.crc32(data))


def read_extra(directory: Path, manifest: SnapshotManifest) -> dict[str, Any]:
    """Return the tree that `write_extra` took.

    Raises:
        DataError: If the tensors' file is broken; names it.
    """
    tensors: dict[str, Any] = {}
    if manifest.dense is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = directory / manifest.dense.name
        data = path.read_bytes()
        if zlib.crc32(data) != manifest.dense.checksum:
            raise DataError(f"{path} is broken: its bytes do not have the checksum of the manifest. Take another copy.")
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise DataError(f"{path} holds no tensors: {error}. Take another copy.") from None
    try:
        value = unpack_tree(manifest.extra, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{directory} holds values that name no tensor ({error!r}). Take another copy.") from None
    if not isinstance(value, dict):
        raise DataError(f"{directory} holds {type(value).__name__} where values by name are due. Take another copy.")
    return value

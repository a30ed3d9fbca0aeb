"""Save and load nested dicts of values and tensors beside the tables of a snapshot (JSON, safetensors)."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, DataError
from phalanx.files import sync_file
from phalanx.ps.snapshot.manifest import SnapshotFile, SnapshotManifest

_TENSOR, _ITEMS, _TUPLE = "$tensor", "$items", "$tuple"


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


def pack_tree(value: object, where: str, tensors: dict[str, Any]) -> Any:
    """Return a tree of dicts, lists and tuples as JSON.

    Args:
        value: The tree.
        where: Its name, for messages and as the start of its tensors' names.
        tensors: Takes the tensors, by name.

    Raises:
        ConfigError: If the tree holds something that is neither JSON nor a tensor; names where.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        while where in tensors:  # {"a": {"b": x}, "a.b": y}
            where += "'"
        tensors[where] = value
        return {_TENSOR: where}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack_tree(v, f"{where}.{key}", tensors) for key, v in value.items()}
        # Optimizers number their state: JSON has no such keys.
        return {
            _ITEMS: [[pack_tree(k, where, tensors), pack_tree(v, f"{where}.{k}", tensors)] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        parts = [pack_tree(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"Asked to save {where}, which is a {type(value).__name__}. Save tensors, numbers, text, lists, tuples, dicts."
    )


def unpack_tree(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `pack_tree` took.

    Args:
        value: What `pack_tree` returned.
        tensors: The tensors, by name.
    """
    if isinstance(value, list):
        return [unpack_tree(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _ITEMS in value:
        return {unpack_tree(k, tensors): unpack_tree(v, tensors) for k, v in value[_ITEMS]}
    if _TUPLE in value:
        return tuple(unpack_tree(v, tensors) for v in value[_TUPLE])
    return {key: unpack_tree(v, tensors) for key, v in value.items()}

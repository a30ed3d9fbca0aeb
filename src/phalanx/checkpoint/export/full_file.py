"""`write_full_tensors`: write full tensors to one safetensors file, each rank its shards."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import WRITE_TIMEOUT_S
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.local_tensors import LocalTensor
from phalanx.checkpoint.tensors.safetensors_file import build_header, dtype_of
from phalanx.checkpoint.tensors.write_plan import TensorLayout
from phalanx.files import sync_directory


def write_full_tensors(
    ranks: Ranks,
    local_tensors: Mapping[str, LocalTensor],
    target: Path,
    *,
    collect: Callable[[], Any],
    plan: Callable[[list[Any]], tuple[dict[str, TensorLayout], str]],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write full tensors of which every rank holds shards. Collective.

    Args:
        ranks: All ranks.
        local_tensors: This rank's shards, by name in the file.
        target: The file, seen by all ranks; replaced once the new one is complete.
        collect: Returns this rank's message to rank 0, as JSON.
        plan: From the messages of all ranks to the layout of the tensors and a note for the header. On rank 0 only.
        aliases: Further names of tensors, which are written twice.

    Raises:
        ConfigError: What `collect` and `plan` raise; on all ranks.
        BackendError: If the file system does not take it; on all ranks.
    """
    aliases = aliases or {}

    def begin(answers: list[Any]) -> dict[str, Any]:
        layout, note = plan(answers)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        head, begins, length = _head(layout, aliases, note)
        _reserve(part, head, length)
        return {
            "part": part.name,
            "layout": {name: entry.to_json() for name, entry in layout.items()},
            "begins": begins,
        }

    decision = ranks.decide("begin", collect, begin)
    part = target.with_name(decision["part"])
    layout = {name: TensorLayout.from_json(entry) for name, entry in decision["layout"].items()}

    def write() -> None:
        with _MappedFile(part) as memory:
            for name, local in local_tensors.items():
                entry = layout[name]
                mine = [item.chunk for item in entry.write_items if item.rank == ranks.rank]
                for key in (name, *(alias for alias, of in aliases.items() if of == name)):
                    full_tensor = memory.tensor(entry, decision["begins"][key])
                    for chunk in mine:
                        source = local.tensor[chunk.within(entry.chunk_of(local.part))]
                        full_tensor[chunk.within(TensorChunk.full(entry.shape))].copy_(source)
                    del full_tensor

    def finish(_: list[Any]) -> None:
        part.rename(target)
        sync_directory(target.parent)

    try:
        ranks.decide("written", write, finish, timeout_s=WRITE_TIMEOUT_S)
    finally:
        if ranks.rank == 0:
            part.unlink(missing_ok=True)


def _head(
    layout: Mapping[str, TensorLayout], aliases: Mapping[str, str], note: str
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of the file of these tensors, the offset of each, and the length of the file."""
    names = {**layout, **{alias: layout[of] for alias, of in aliases.items()}}
    shapes = {name: (dtype_of(entry.dtype), entry.shape) for name, entry in names.items()}
    head, begins = build_header(shapes, note)
    ends = [begins[name] + TensorChunk.full(shape).count * dtype.itemsize for name, (dtype, shape) in shapes.items()]
    return head, begins, max(ends, default=len(head))


def _reserve(path: Path, head: bytes, length: int) -> None:
    """Allocate a file of this length: a full disk is an error here, not a SIGBUS in the middle of writing."""
    with path.open("xb") as file:
        file.write(head)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, length)
        except OSError:
            path.unlink()
            raise


class _MappedFile:
    """A file in memory, written back when the block ends."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def tensor(self, entry: TensorLayout, begin: int) -> Tensor:
        """Return the memory of a full tensor."""
        dtype, count = dtype_of(entry.dtype), TensorChunk.full(entry.shape).count
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(entry.shape)

    def __enter__(self) -> _MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.flush()

"""One safetensors file of whole tensors, to which every rank writes what it holds at its place."""

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
from phalanx.checkpoint.tensors.chunk import Box
from phalanx.checkpoint.tensors.file import dtype_of, lay_out
from phalanx.checkpoint.tensors.local import Held
from phalanx.checkpoint.tensors.write_plan import Entry


def write_whole(
    ranks: Ranks,
    held: Mapping[str, Held],
    target: Path,
    *,
    say: Callable[[], Any],
    plan: Callable[[list[Any]], tuple[dict[str, Entry], str]],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write whole tensors of which every rank holds parts. Collective.

    Args:
        ranks: All ranks.
        held: What this rank holds, by name in the file.
        target: The file, seen by all ranks; replaced when the new one is whole.
        say: Returns what this rank tells rank 0, as JSON.
        plan: From what all ranks said to how they hold the tensors, and a note to keep in the file. On rank 0 only.
        aliases: Further names of tensors, which are written twice.

    Raises:
        ConfigError: What `say` and `plan` raise; on all ranks.
        BackendError: If the file system does not take it; on all ranks.
    """
    aliases = aliases or {}

    def begin(said: list[Any]) -> dict[str, Any]:
        layout, note = plan(said)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        head, begins, length = _head(layout, aliases, note)
        _reserve(part, head, length)
        return {
            "part": part.name,
            "layout": {name: entry.to_json() for name, entry in layout.items()},
            "begins": begins,
        }

    decided = ranks.decide("begin", say, begin)
    part = target.with_name(decided["part"])
    layout = {name: Entry.from_json(entry) for name, entry in decided["layout"].items()}

    def write() -> None:
        with _mapped(part) as memory:
            for name, one in held.items():
                entry = layout[name]
                mine = [piece.box for piece in entry.pieces if piece.rank == ranks.rank]
                for key in (name, *(alias for alias, of in aliases.items() if of == name)):
                    whole = memory.tensor(entry, decided["begins"][key])
                    for box in mine:
                        source = one.tensor[box.within(entry.box_of(one.part))]
                        whole[box.within(Box.whole(entry.shape))].copy_(source)
                    del whole

    def finish(_: list[Any]) -> None:
        part.rename(target)
        sync_directory(target.parent)

    try:
        ranks.decide("written", write, finish, timeout_s=WRITE_TIMEOUT_S)
    finally:
        if ranks.rank == 0:
            part.unlink(missing_ok=True)


def _head(layout: Mapping[str, Entry], aliases: Mapping[str, str], note: str) -> tuple[bytes, dict[str, int], int]:
    """Return the header of the file of these tensors, the offset of each, and the length of the file."""
    names = {**layout, **{alias: layout[of] for alias, of in aliases.items()}}
    shapes = {name: (dtype_of(entry.dtype), entry.shape) for name, entry in names.items()}
    head, begins = lay_out(shapes, note)
    ends = [begins[name] + Box.whole(shape).count * dtype.itemsize for name, (dtype, shape) in shapes.items()]
    return head, begins, max(ends, default=len(head))


def _reserve(path: Path, head: bytes, length: int) -> None:
    """Make a file of this length, so that a full disk is an error here and not a signal in the middle of writing."""
    with path.open("xb") as file:
        file.write(head)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, length)
        except OSError:
            path.unlink()
            raise


class _mapped:  # noqa: N801 (reads as the verb it is)
    """A file in memory, written back when the block ends."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def tensor(self, entry: Entry, begin: int) -> Tensor:
        """Return the memory of a whole tensor."""
        dtype, count = dtype_of(entry.dtype), Box.whole(entry.shape).count
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(entry.shape)

    def __enter__(self) -> _mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.flush()

"""Read tensors of a checkpoint, or just the parts of them that this rank asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.folder.manifest import Manifest, SavedTensor
from phalanx.checkpoint.tensors.chunk import Box
from phalanx.checkpoint.tensors.file import TensorFile
from phalanx.checkpoint.tensors.local import RANKS, own
from phalanx.errors import InternalError
from phalanx.ps.snapshot.dense import unpacked


class Reader:
    """The tensors and values of one checkpoint. Reads lazily; not collective."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[int, TensorFile] = {}

    @torch.no_grad()
    def read(self, name: str, into: Tensor, box: Box) -> None:
        """Copy a part of a tensor into memory.

        Args:
            name: The tensor.
            into: Takes the part; any strides, dtype and device.
            box: Which part.
        """
        saved, missing = self.manifest.tensors[name], box.count
        for piece in saved.pieces:
            shared = piece.box.overlap(box)
            if shared is None:
                continue
            found = self._file(piece.rank).tensor(saved.slot(piece))
            into[shared.within(box)].copy_(found[shared.within(piece.box)])
            missing -= shared.count
        if missing > 0:
            raise InternalError(f"{missing} elements of {name!r} are in no piece of {self.manifest.folder}")

    def whole(self, name: str) -> Tensor:
        """Return a tensor in memory of its own."""
        saved = self.manifest.tensors[name]
        tensor = torch.empty(saved.shape, dtype=saved.dtype)
        self.read(name, tensor, Box.whole(saved.shape))
        return tensor

    def values(self, rank: int, word: str) -> Any:
        """Return one part of what a saved rank said of itself, its tensors among it."""
        return unpacked(self.manifest.values[rank][word], _Own(self, rank))

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = TensorFile(self.manifest.folder / self.manifest.files[rank].name)
        return self._files[rank]


class _Own(Mapping[str, Tensor]):
    """Tensors in the values of one saved rank, read when they are used."""

    def __init__(self, reader: Reader, rank: int) -> None:
        self._reader, self._rank = reader, rank

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.whole(own(self._rank, name))

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def saved_names(tensors: Mapping[str, SavedTensor], kind: str) -> set[str]:
    """Return the names of tensors of one kind (`model/`, `optimizer/`), without it, whether of all ranks or of one."""
    plain = {name.removeprefix(kind) for name in tensors if name.startswith(kind)}
    apart = (name.split("/", 2)[2] for name in tensors if name.startswith(RANKS))
    return plain | {name.removeprefix(kind) for name in apart if name.startswith(kind)}

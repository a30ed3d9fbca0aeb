"""`CheckpointReader`: reads tensors of a checkpoint, or the chunks of them that a rank needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.folder.manifest import CheckpointManifest, SavedTensor
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.local_tensors import RANKS, rank_name
from phalanx.checkpoint.tensors.safetensors_file import TensorFile
from phalanx.errors import DataError, InternalError
from phalanx.state_tree import unpack_tree

_DICTS = frozenset({"aliases", "model", "optimizer", "random", "kept", "replicas", "streams"})
"""Words of values that are dicts."""


class CheckpointReader:
    """The tensors and values of one checkpoint. Reads lazily; not collective."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        self.manifest = manifest
        self._files: dict[int, TensorFile] = {}

    @torch.no_grad()
    def read(self, name: str, into: Tensor, chunk: TensorChunk) -> None:
        """Copy a chunk of a tensor into memory.

        Args:
            name: The tensor.
            into: Takes the chunk; any strides, dtype and device.
            chunk: Which chunk.
        """
        saved, missing = self.manifest.tensors[name], chunk.count
        for saved_chunk in saved.saved_chunks:
            shared = saved_chunk.chunk.overlap(chunk)
            if shared is None:
                continue
            source = self._file(saved_chunk.rank).tensor(saved.slot(saved_chunk))
            into[shared.within(chunk)].copy_(source[shared.within(saved_chunk.chunk)])
            missing -= shared.count
        if missing > 0:
            raise InternalError(f"{missing} elements of {name!r} are in no chunk of {self.manifest.folder}")

    def read_full(self, name: str) -> Tensor:
        """Return a full tensor in new memory."""
        saved = self.manifest.tensors[name]
        tensor = torch.empty(saved.shape, dtype=saved.dtype)
        self.read(name, tensor, TensorChunk.full(saved.shape))
        return tensor

    def values(self, rank: int, word: str) -> Any:
        """Return one of the values of a saved rank, with the tensors in it.

        Raises:
            DataError: If it is not what a save writes there.
        """
        try:
            value = unpack_tree(self.manifest.values[rank][word], _RankTensors(self, rank))
            if word in _DICTS and not isinstance(value, dict):
                raise TypeError(f"a {type(value).__name__}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            folder = self.manifest.folder
            raise DataError(f"{folder} holds no {word!r} of rank {rank} ({error!r}). Take another copy.") from error
        return value

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = TensorFile(self.manifest.folder / self.manifest.files[rank].name)
        return self._files[rank]


class _RankTensors(Mapping[str, Tensor]):
    """Tensors in the values of one saved rank, read when they are used."""

    def __init__(self, reader: CheckpointReader, rank: int) -> None:
        self._reader, self._rank = reader, rank

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read_full(rank_name(self._rank, name))

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def saved_names(tensors: Mapping[str, SavedTensor], kind: str) -> set[str]:
    """Return the names of tensors of one kind (`model/`, `optimizer/`), without it, whether of all ranks or of one."""
    plain = {name.removeprefix(kind) for name in tensors if name.startswith(kind)}
    apart = (name.split("/", 2)[2] for name in tensors if name.startswith(RANKS))
    return plain | {name.removeprefix(kind) for name in apart if name.startswith(kind)}

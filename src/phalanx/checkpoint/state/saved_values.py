"""`SavedValues`: what the ranks that saved a checkpoint wrote beside tensors: whether it is the same, and merged."""

from __future__ import annotations

import json
from typing import Any

from phalanx.checkpoint.folder.reader import CheckpointReader
from phalanx.checkpoint.tensors.local_tensors import RANKS, rank_name
from phalanx.checkpoint.tensors.safetensors_file import bytes_of


class SavedValues:
    """The values of all saved ranks, by word: `model`, `optimizer`, `loader`, `extra`, ..."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader, self._manifest = reader, reader.manifest

    def has(self, word: str) -> bool:
        """Return whether something was saved: `loader`, `extra`, ..."""
        return word in self._manifest.values[0]

    def distinct(self, word: str) -> list[int]:
        """Return one saved rank for each distinct value of a word."""
        rank_of: dict[str, int] = {}
        for rank, tree in enumerate(self._manifest.values):
            rank_of.setdefault(json.dumps(tree[word]), rank)
        return list(rank_of.values())

    def is_common(self, word: str) -> bool:
        """Return whether all saved ranks had the same value of a word, including its tensors."""
        first, tensors = rank_name(0, f"values.{word}."), self._manifest.tensors
        return len(self.distinct(word)) == 1 and all(
            tensors[name].dtype == tensors[other].dtype
            and bytes_of(self._reader.read_full(name)) == bytes_of(self._reader.read_full(other))
            for name in tensors
            if name.startswith(first)
            for other in (rank_name(rank, without_rank(name)) for rank in range(1, self._manifest.world_size))
        )

    def merge_ranks(self, word: str) -> dict[str, Any]:
        """Return a dict merged over the saved ranks."""
        return {k: v for rank in self.distinct(word) for k, v in self._reader.values(rank, word).items()}

    def groups(self) -> list[dict[str, Any]]:
        """Return the saved optimizer's groups, with the parameters of all ranks."""
        groups: list[dict[str, Any]] = []
        for rank in self.distinct("optimizer"):
            for number, group in enumerate(self._reader.values(rank, "optimizer")["groups"]):
                if number == len(groups):
                    groups.append(group)
                else:
                    groups[number]["params"] = list(dict.fromkeys(groups[number]["params"] + group["params"]))
        return groups


def without_rank(name: str) -> str:
    """Return a tensor's name without the prefix of one rank's own tensors."""
    return name.split("/", 2)[2] if name.startswith(RANKS) else name

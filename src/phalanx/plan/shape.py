"""`ModelShape`: names, shapes and dtypes of a model's parameters, without torch modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.value import Table, digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamShape:
    """One parameter: plain name, shape, dtype, and how its layer uses it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, such as `float32`."""

    item_bytes: int
    trainable: bool = True
    is_distributed: bool = False
    """Whether the layer itself holds one shard of it on each rank (the user's `param.is_distributed = True`)."""

    table: Table | None = None
    """The table it stands for, when its rows are found by id; its own shape then says (0, dim)."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the parameter."""
        return self.count * self.item_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All parameters of a model, in registration order."""

    params: tuple[ParamShape, ...]

    def digest(self) -> str:
        """Return a short digest of names, shapes and dtypes. Shards held by a layer count by name and dtype only."""
        return digest_of([[p.name, None if p.is_distributed else p.shape, p.dtype] for p in self.params])

    @property
    def trainable(self) -> Sequence[ParamShape]:
        """The parameters that receive gradients."""
        return [p for p in self.params if p.trainable]

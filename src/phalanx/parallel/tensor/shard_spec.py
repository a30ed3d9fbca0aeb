"""`ShardSpec`: how one dim of a parameter is split over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.groups import Group
from phalanx.data.sampling.shards import even_split
from phalanx.parallel.model_shape import mark_held
from phalanx.parallel.session import session


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of an even cut, the larger slices first."""
    return tuple(even_split(length, parts, index)[1] for index in range(parts))


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Slices of one dim over the ranks of a group, as one of them sees it."""

    group: Group
    index: int
    """This rank's place in the group."""

    sizes: tuple[int, ...]
    """Size of every rank's slice, in rank order."""

    zigzag: bool = False
    """Whether a slice is two chunks, one of each half of the dim: of 2n chunks rank i has number i and 2n - 1 - i. Then
    sizes are equal and even. Of causal attention, in which a token meets those before it, ranks so compute equal
    parts."""

    @property
    def start(self) -> int:
        """Where this rank's slice begins."""
        return sum(self.sizes[: self.index])

    @property
    def mine(self) -> int:
        """Size of this rank's slice."""
        return self.sizes[self.index]

    def of_rank(self, index: int) -> ShardSpec:
        """Return it as another rank of the group sees it."""
        return replace(self, index=index)

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a whole tensor, sharing its memory unless it is two chunks."""
        if not self.zigzag:
            return x.narrow(dim, self.start, self.mine)
        chunk = self.mine // 2
        late = 2 * len(self.sizes) - 1 - self.index
        return torch.cat([x.narrow(dim, self.index * chunk, chunk), x.narrow(dim, late * chunk, chunk)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor of all ranks' slices, in rank order."""
        if not self.zigzag:
            return torch.cat(list(parts), dim)
        early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    def __deepcopy__(self, _: dict[int, Any]) -> ShardSpec:
        return self  # A copied layer is of the same group, and groups cannot be copied.


@torch.no_grad()
def hold(param: nn.Parameter, dim: int, spec: ShardSpec) -> None:
    """Let a parameter keep this rank's slice only, in place: optimizers and other holders follow.

    Args:
        param: A whole parameter, equal on all ranks of the group. Marked `is_distributed` afterwards.
        dim: Dim to cut.
        spec: How.
    """
    grad, param.grad = param.grad, None
    param.data = spec.part(param.data, dim).clone(memory_format=torch.contiguous_format)
    if grad is not None:
        param.grad = spec.part(grad, dim).clone(memory_format=torch.contiguous_format)
    mark_held(param, spec.group)
    session.shards[param] = dim, spec


def shard_of_state(param: Tensor, value: Tensor) -> Tensor | None:
    """Return this rank's slice of what an optimizer keeps of a whole parameter; None if `value` is nothing of that.

    Args:
        param: The parameter, which may be cut.
        value: Some of its optimizer's state.
    """
    if param not in session.shards:
        return None
    dim, spec = session.shards[param]
    full = list(param.shape)
    full[dim] = sum(spec.sizes)
    if list(value.shape) != full:
        return None
    part: Tensor = spec.part(value, dim).clone(memory_format=torch.contiguous_format)
    return part

"""`ShardedDropout`: dropout of sharded activations with the mask of the full tensor."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import transfers
from phalanx.parallel.tensor.shard_spec import ShardSpec


class ShardedDropout(nn.Dropout):
    """Dropout of this rank's slice of an activation.

    Every rank of the group draws the mask of the whole from the stream they have in common and uses its slice: units of
    different slices drop independently, and the streams stay together. Collective when cut by features, whose slices
    may differ in size.
    """

    spec: ShardSpec
    """Names the group; the sizes of slices come with the activations."""

    dim: int
    """Dim along which activations are cut."""

    def configure(self, path: str, inputs: int | None, outputs: int | None) -> None:
        """Take the dim along which activations are sharded; see `styles.ShardedLayer`."""
        assert inputs is not None
        self.dim = inputs

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's slice after dropout."""
        return drop_part(input, self.p, self.dim, self.spec) if self.training and self.p else input


def drop_part(x: Tensor, p: float, dim: int, spec: ShardSpec) -> Tensor:
    """Return this rank's slice of an activation after dropout, by its slice of the mask of the whole.

    Collective when cut by features (dim -1), whose slices may differ in size.

    Args:
        x: The slice.
        p: Share of the units that are dropped.
        dim: Dim along which the activation is cut.
        spec: Names the group.
    """
    axis = dim % x.dim()
    sizes = transfers.part_sizes(x, axis, None, dim != -1, spec.group)
    shape = (*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :])
    mask = F.dropout(x.new_ones(shape), p)
    mine = replace(spec, sizes=tuple(sizes)).part(mask, axis).clone()  # a view would keep the whole mask
    return x * mine

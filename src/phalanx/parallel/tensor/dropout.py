"""Dropout of activations that are cut: the mask is that of the whole, so one process drops the same."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import transfers
from phalanx.parallel.tensor.cut import Cut


class CutDropout(nn.Dropout):
    """Dropout of this rank's slice of an activation.

    Every rank of the group draws the mask of the whole from the stream they have in common and uses its slice: units of
    different slices drop independently, and the streams stay together. Collective when cut by features, whose slices
    may differ in size.
    """

    cut: Cut
    """Names the group; the sizes of slices come with the activations."""

    dim: int
    """Dim along which activations are cut."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's slice after dropout."""
        if not self.training or self.p == 0:
            return input
        dim = self.dim % input.dim()
        sizes = transfers.part_sizes(input, dim, None, self.dim != -1, self.cut.group)
        shape = (*input.shape[:dim], sum(sizes), *input.shape[dim + 1 :])
        mask = F.dropout(input.new_ones(shape), self.p)
        mine = Cut(self.cut.group, self.cut.index, tuple(sizes)).part(mask, dim)
        return input * mine

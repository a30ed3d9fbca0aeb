"""Wide & deep learning (H.-T. Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016).

The wide part is a weight for every id, the deep part a network over a vector for every id and the dense values. Ids
need no vocabulary: their rows live in tables on the parameter servers, or in this process if there are none.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from phalanx import ps


class WideDeepModel(nn.Module):
    """Logits from dense values (n, dense) and ids (n, slots), shape (n,)."""

    def __init__(self, *, slots: int, dense: int, dim: int, hidden: Sequence[int], rule: ps.Adagrad) -> None:
        super().__init__()
        self.wide = ps.SparseEmbedding(1, optimizer=rule, init=ps.Constant(0.0))
        self.deep = ps.SparseEmbedding(dim, optimizer=rule, init=ps.Uniform(0.01))
        widths = [slots * dim + dense, *hidden]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.linear = nn.Linear(dense, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        weights, vectors = ps.lookup([(self.wide, ids), (self.deep, ids)])
        deep = self.network(torch.cat([vectors.flatten(1), dense], 1))
        return (deep + self.linear(dense)).squeeze(1) + weights.sum((1, 2))

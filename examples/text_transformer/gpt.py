"""A small GPT (Radford et al., 2019: pre-norm), plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and a two-layer MLP, both with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # -1: with tensor parallel a rank holds a subset of the heads
        q, k, v = (part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Scores of the next token at each position.

    Args:
        vocabulary: Number of different tokens.
        context: Tokens it can look back on, at most.
        width: Numbers that stand for a token.
        heads: Divides `width`.
        layers: Blocks.
    """

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of shape (samples, positions, vocabulary)."""
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

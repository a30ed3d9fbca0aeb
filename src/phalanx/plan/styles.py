"""`ParallelStyle`: the tensor-parallel styles of `px.shard`: which layers each shards, and along which dims (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StyleName = Literal["column", "row", "vocab", "sequence", "context", "expert"]

ContextAttention = Literal["all_gather", "ring"]
"""How keys and values reach ranks that compute other tokens of a sequence: all at once, or around the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStyle:
    """One way to compute a module on several ranks; `parallel/tensor/styles` has the layer that does."""

    name: StyleName

    layers: tuple[str, ...] = ()
    """Classes of `torch.nn` whose weight it shards; without any, it fits modules whose parameters stay replicated."""

    weight_dim: int | None = None
    """Dim of the weight that is sharded; None if parameters stay replicated. With dim 0 a bias is sharded too."""

    shards_tokens: bool = False
    """Whether inputs and outputs are sharded along the sequence."""

    spans_attention: bool = False
    """Whether it covers all modules inside, with attention to the tokens of all ranks."""

    keeps_logits_sharded: bool = False
    """Whether the outputs of an `nn.Linear` stay sharded whatever follows, for `px.vocab_cross_entropy`."""

    fits_between: bool = False
    """Whether modules between two sharded layers may have it by their full name: they work on sharded features."""

    gathers_samples: bool = False
    """Whether ranks that read samples of their own can hold the shards: the layer gathers the samples of all."""

    shards_experts: bool = False
    """Whether it deals experts, stacked along dim 0 of all parameters of a module, to ranks that read samples of their
    own: tokens travel."""


STYLES: dict[str, ParallelStyle] = {
    style.name: style
    for style in (
        ParallelStyle(name="column", layers=("Linear",), weight_dim=0, fits_between=True, gathers_samples=True),
        ParallelStyle(name="row", layers=("Linear",), weight_dim=1, gathers_samples=True),
        ParallelStyle(name="vocab", layers=("Embedding", "Linear"), weight_dim=0, keeps_logits_sharded=True),
        ParallelStyle(name="sequence", shards_tokens=True),
        ParallelStyle(name="context", shards_tokens=True, spans_attention=True),
        ParallelStyle(name="expert", weight_dim=0, shards_experts=True),
    )
}


def weight_dim(style: str | None) -> int | None:
    """Return the dim of a layer's weight that a style shards; None if it shards no weight."""
    return STYLES[style].weight_dim if style in STYLES else None

"""How ranks are arranged: how many read other rows, how many hold a layer together, where each group lies (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.auto.collective_cost import Layout

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """What is the same for all layers of a model."""

    data: int
    """Ranks that read rows of their own."""

    model: int = 1
    """Ranks that read the same rows and hold layers together. With 1, layers may be cut over the ranks of `data`."""

    zero: Literal[0, 1, 2, 3] = 0
    """Stage of sharding over the ranks of `data`: 1 optimizer state, 2 gradients too, 3 parameters too."""

    recompute: Recompute = "none"
    """What repeated blocks compute again in the backward pass: nothing, all but products, all."""

    model_inside: bool = True
    """Order of the ranks: whether those that hold a layer together are neighbours, or those that read other rows."""

    per_node: int = field(default=1 << 30, compare=False)
    """Ranks of one machine."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.model

    @property
    def cuts_by_rows(self) -> bool:
        """Whether layers may be cut over ranks that read other rows."""
        return self.model == 1 and self.zero == 0 and self.data > 1

    @property
    def over_data(self) -> Layout:
        """Where the ranks lie that read other rows."""
        return _layout(self.data, self.model if self.model_inside else 1, self.per_node)

    @property
    def over_model(self) -> Layout:
        """Where the ranks lie that hold a layer together."""
        return _layout(self.model, 1 if self.model_inside else self.data, self.per_node)

    def __str__(self) -> str:
        parts = [f"data={self.data}", f"model={self.model}", f"zero={self.zero}"]
        parts += [f"recompute={self.recompute}"]
        if self.model > 1 and self.data > 1 and not self.model_inside:
            parts.append("order=model,data")
        return " ".join(parts)


def _layout(ranks: int, stride: int, per_node: int) -> Layout:
    """Return where ranks lie that are `stride` apart."""
    in_node = min(ranks, max(1, per_node // stride))
    return Layout(ranks, in_node, max(1, per_node // in_node) if in_node < ranks else 1)

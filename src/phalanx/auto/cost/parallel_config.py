"""How ranks are arranged: how many read other rows, how many hold a layer together, where each group lies (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from phalanx.auto.cost.collectives import Layout

Recompute = Literal["none", "selective", "full"]
Zero = Literal[0, 1, 2, 3]
Kind = Literal["dp", "pp", "sharding", "mp"]
ScheduleKind = Literal["none", "1f1b", "interleaved", "zero_bubble"]

SCHEDULES: tuple[ScheduleKind, ...] = ("none", "1f1b", "interleaved", "zero_bubble")
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ZERO: tuple[Zero, ...] = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """What is the same for all layers of a model."""

    data: int
    """Ranks that read rows of their own."""

    model: int = 1
    """Ranks that read the same rows and hold layers together. With 1, layers may be cut over the ranks of `data`."""

    zero: Zero = 0
    """Stage of sharding over the ranks of `data`: 1 optimizer state, 2 gradients too, 3 parameters too."""

    recompute: Recompute = "none"
    """What repeated blocks compute again in the backward pass: nothing, all but products, all."""

    stages: int = 1
    """Ranks along the stages of a pipeline."""

    virtual: int = 1
    """Stages of each of them."""

    micro_batches: int = 1
    """Parts into which a rank's rows are cut for the stages."""

    zero_bubble: bool = False
    """Whether gradients of weights are computed apart, where stages would wait for each other. One stage a rank then,
    and nothing sharded or computed again."""

    model_inside: bool = True
    """Order of the ranks: whether those that hold a layer together are neighbours, or those furthest apart."""

    per_node: int = field(default=1 << 30, compare=False)
    """Ranks of one machine."""

    rows: int = field(default=0, compare=False)
    """Rows of a global batch; 0 if they divide evenly."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.model * self.stages

    @property
    def row_parts(self) -> float:
        """Parts of a global batch that are computed one by one, or apart, as large as the largest."""
        return self.micro_batches * (self.rows / -(-self.rows // self.data) if self.rows else self.data)

    @property
    def cuts_by_rows(self) -> bool:
        """Whether layers may be cut over ranks that read other rows."""
        return self.model == 1 and self.zero == 0 and self.data > 1 and self.stages == 1

    @property
    def can_split(self) -> bool:
        """Whether a pipeline with one stage a rank can compute gradients of weights apart."""
        plain = self.zero == 0 and self.recompute == "none"
        return plain and self.stages > 1 and self.virtual == 1 and self.micro_batches % self.stages == 0

    @property
    def schedule(self) -> ScheduleKind:
        """The order in which micro-batches go through the stages, by the Plan's name."""
        if self.stages == 1:
            return "none"
        if self.zero_bubble:
            return "zero_bubble"
        return "interleaved" if self.virtual > 1 else "1f1b"

    @property
    def order(self) -> tuple[Kind, ...]:
        """Kinds of parallelism by Fleet's names, those whose ranks are furthest apart first."""
        return ("dp", "pp", "sharding", "mp") if self.model_inside else ("mp", "sharding", "dp", "pp")

    @property
    def over_data(self) -> Layout:
        """Where the ranks lie that read other rows."""
        return self._layout("sharding" if self.zero else "dp")

    @property
    def over_model(self) -> Layout:
        """Where the ranks lie that hold a layer together."""
        return self._layout("mp")

    @property
    def over_rows_and_parts(self) -> Layout:
        """Where the ranks lie that read other rows, or other tokens of the same."""
        data, model = self.over_data, self.over_model
        in_node = min(data.ranks * model.ranks, data.in_node * model.in_node)
        return Layout(data.ranks * model.ranks, in_node, min(data.sharing, model.sharing))

    @property
    def over_stages(self) -> Layout:
        """Where two neighbours along the stages lie."""
        found = self._layout("pp")
        return Layout(2, min(2, found.in_node), found.sharing)

    def __str__(self) -> str:
        parts = [f"data={self.data}", f"model={self.model}"]
        if self.stages > 1:
            virtual = f"x{self.virtual}" if self.virtual > 1 else ""
            parts.append(f"stages={self.stages}{virtual} micro={self.micro_batches}")
            parts += ["zero_bubble"] if self.zero_bubble else []
        parts += [f"zero={self.zero}", f"recompute={self.recompute}"]
        if not self.model_inside:
            parts.append("order=model,data")
        return " ".join(parts)

    def _layout(self, name: Kind) -> Layout:
        """Return where the ranks of one kind lie."""
        sizes: dict[Kind, int] = {"sharding" if self.zero else "dp": self.data, "pp": self.stages, "mp": self.model}
        later = self.order[self.order.index(name) + 1 :]
        ranks, stride = sizes[name], math.prod(sizes.get(one, 1) for one in later)
        in_node = min(ranks, max(1, self.per_node // stride))
        return Layout(ranks, in_node, max(1, self.per_node // in_node) if in_node < ranks else 1)


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide a number, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]

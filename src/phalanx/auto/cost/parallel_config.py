"""`ParallelConfig`: degrees of data, tensor and pipeline parallelism, ZeRO stage, schedule (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from phalanx.auto.cost.collectives import GroupTopology
from phalanx.plan.styles import ContextAttention
from phalanx.plan.value import Average, TopK

Recompute = Literal["none", "selective", "full"]
Zero = Literal[0, 1, 2, 3]
GroupKind = Literal["dp", "pp", "sharding", "ep", "sep", "mp"]
ScheduleKind = Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"]

SCHEDULES: tuple[ScheduleKind, ...] = ("none", "1f1b", "interleaved", "zero_bubble")
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ZERO: tuple[Zero, ...] = (0, 1, 2, 3)
ATTENTION: tuple[ContextAttention, ...] = ("all_gather", "ring")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """What is the same for all layers of a model."""

    data: int
    """Ranks that read samples of their own."""

    model: int = 1
    """Ranks that read the same samples and hold layers together. With 1, layers may be cut over the ranks of `data`."""

    experts: int = 1
    """Ranks of `data`, next to each other, that hold one copy of the experts of mixtures together."""

    load: float = 1.0
    """Tokens that come to the experts of the rank that is priced, over an even share of them."""

    context: int = 1
    """Ranks that read the same samples and share their sequences in repeated blocks, style `context`. No layer is cut
    then, and there are no stages."""

    attention: ContextAttention = "all_gather"
    """How keys and values reach the ranks that share a sequence."""

    zero: Zero = 0
    """Stage of sharding over the ranks of `data`: 1 optimizer state, 2 gradients too, 3 parameters too."""

    recompute: Recompute = "none"
    """What repeated blocks recompute in the backward pass: nothing, all but products, all."""

    stages: int = 1
    """Ranks along the stages of a pipeline."""

    virtual: int = 1
    """Stages of each of them."""

    micro_batches: int = 1
    """Parts into which a rank's samples are cut for the stages."""

    zero_bubble: bool = False
    """Whether gradients of weights are computed apart, where stages would wait for each other. One stage a rank then,
    and nothing sharded or recomputed."""

    gpipe: bool = False
    """Whether all micro-batches go forward before one goes back. A search has no use for it; a Plan may say so."""

    update: Average | TopK | None = None
    """What ranks exchange instead of all gradients in every step, where a Plan says so; no search does."""

    model_inside: bool = True
    """Order of the ranks: whether those that hold a layer together are neighbours, or those furthest apart."""

    per_node: int = field(default=1 << 30, compare=False)
    """Ranks of one machine."""

    batch_size: int = field(default=0, compare=False)
    """Samples of a global batch; 0 if they divide evenly."""

    rows: int = 0
    """Samples of the rank that is priced, where ranks get unequal parts by their speeds; 0 where the parts are even."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.model * self.context * self.stages

    @property
    def batch_parts(self) -> float:
        """Parts of a global batch that are computed one by one, or apart, as large as the largest."""
        if self.rows:
            return self.batch_size / self.rows
        return self.micro_batches * (
            self.batch_size / -(-self.batch_size // self.data) if self.batch_size else self.data
        )

    @property
    def shards_over_data(self) -> bool:
        """Whether layers may be cut over ranks that read other samples."""
        plain = self.zero == 0 and self.experts == self.context == 1 and not self.rows
        return plain and self.model == self.stages == 1 and self.data > 1

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
        if self.gpipe:
            return "gpipe"
        return "interleaved" if self.virtual > 1 else "1f1b"

    @property
    def order(self) -> tuple[GroupKind, ...]:
        """Kinds of parallelism by Fleet's names, those whose ranks are furthest apart first."""
        return (
            ("dp", "pp", "sharding", "ep", "sep", "mp")
            if self.model_inside
            else ("mp", "sharding", "dp", "pp", "ep", "sep")
        )

    @property
    def sizes(self) -> dict[GroupKind, int]:
        """Ranks of each kind of parallelism, in the order of the ranks."""
        sizes: dict[GroupKind, int] = {
            "sharding" if self.zero else "dp": self.data // self.experts,
            "pp": self.stages,
            "ep": self.experts,
            "sep": self.context,
            "mp": self.model,
        }
        return {kind: sizes[kind] for kind in self.order if kind in sizes}

    @property
    def over_data(self) -> GroupTopology:
        """Where the ranks lie that read other samples."""
        if self.experts > 1:
            return self._layout("dp", "ep")
        return self._layout("sharding" if self.zero else "dp")

    @property
    def over_experts(self) -> GroupTopology:
        """Where the ranks lie that hold one copy of the experts together."""
        return self._layout("ep")

    @property
    def over_copies(self) -> GroupTopology:
        """Where the ranks lie that hold the same experts."""
        return self._layout("dp")

    @property
    def over_model(self) -> GroupTopology:
        """Where the ranks lie that hold a layer together."""
        return self._layout("mp")

    @property
    def over_context(self) -> GroupTopology:
        """Where the ranks lie that share a sequence."""
        return self._layout("sep")

    @property
    def over_ring(self) -> GroupTopology:
        """Where two neighbours of a ring lie, of the two that are furthest apart."""
        topology = self.over_context
        return GroupTopology(2, 2 if topology.ranks <= topology.in_node else 1, topology.sharing)

    @property
    def over_tokens(self) -> GroupTopology:
        """Where the ranks lie that may have other tokens of the same samples."""
        return self.over_context if self.context > 1 else self.over_model

    @property
    def over_data_and_tokens(self) -> GroupTopology:
        """Where the ranks lie that read other samples, or other tokens of the same."""
        data, tokens = self.over_data, self.over_tokens
        in_node = min(data.ranks * tokens.ranks, data.in_node * tokens.in_node)
        return GroupTopology(data.ranks * tokens.ranks, in_node, min(data.sharing, tokens.sharing))

    @property
    def over_stages(self) -> GroupTopology:
        """Where two neighbours along the stages lie."""
        topology = self._layout("pp")
        return GroupTopology(2, min(2, topology.in_node), topology.sharing)

    def __str__(self) -> str:
        parts = [f"data={self.data}", *([f"experts={self.experts}"] if self.experts > 1 else []), f"model={self.model}"]
        if self.context > 1:
            parts.append(f"context={self.context} attention={self.attention}")
        if self.stages > 1:
            virtual = f"x{self.virtual}" if self.virtual > 1 else ""
            parts.append(f"stages={self.stages}{virtual} micro={self.micro_batches}")
            parts += [name for name in ("zero_bubble", "gpipe") if getattr(self, name)]
        parts += [f"zero={self.zero}", f"recompute={self.recompute}"]
        parts += [] if self.update is None else [f"update={self.update.kind}"]
        if not self.model_inside:
            parts.append("order=model,data")
        return " ".join(parts)

    def _layout(self, *names: GroupKind) -> GroupTopology:
        """Return where the ranks of a kind lie, or of kinds that follow each other."""
        sizes, later = self.sizes, self.order[self.order.index(names[-1]) + 1 :]
        ranks = math.prod(sizes[name] for name in names)
        stride = math.prod(sizes.get(axis, 1) for axis in later)
        in_node = min(ranks, max(1, self.per_node // stride))
        return GroupTopology(ranks, in_node, max(1, self.per_node // in_node) if in_node < ranks else 1)


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide a number, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]

"""A training step through pipeline stages as choices: how to compute each piece, and where stages begin (pure).

A model is a chain of pieces, runs of which are stages. What its options cost is said of one micro-batch. With m
micro-batches, v stages a rank and w the seconds that a rank works on one, sends among them, a step takes

    m x max w + (sum w - max w) / v + the most of any rank's gradient synchronisation and update

which is the time of 1F1B and of its interleaved form (D. Narayanan et al., SC 2021, section 2.2) where all sends are
waited for. A rank keeps the activations of as many micro-batches as 1F1B has in flight on it.

With zero bubble (ZB-H1; P. Qi et al., ICLR 2024) a backward pass is gradients of inputs b, for which others wait, and
of weights g, for which nobody does. Of p ranks with equal stages, whose forward passes take f, each is idle for

    (p - 1) x max(f + b - g, f, b) = (p - 1) x (w - g - min(g, f, b))

which is (p - 1) x (f + b - g) in the paper, where g is the smallest. Stages that differ are as if all had their mean:
with G, F and B the sums of all ranks, (1 - 1 / p) x (G + min(G, F, B)), which depends on no cut, is taken off
sum w - max w, down to 0: nothing is sooner than the rank that works the most. Of stages of which some work up to 1.5
times as long as others, this says from 5 % less to 8 % more than event by event; up to 10 times as long, from 8 % less
to 15 % more.

A rank keeps activations until the gradients of weights, which gives each as many as 1F1B keeps on the first. The
gradients that these are computed from are there for one micro-batch and, on rank r, r more whose turn has not come;
the first has no inputs to be early for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.auto.solver.problem import ROUNDING, LayerNode, TransitionCost


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineProblem:
    """A step in pipeline stages: the strategies of its nodes, and where stages may begin."""

    nodes: tuple[LayerNode, ...]
    pieces: tuple[int, ...]
    """The piece that each node is in, rising."""

    sends: tuple[float, ...]
    """Seconds that a stage's border after a piece costs each of its two ranks, one micro-batch there and back."""

    ranks: int
    """Ranks along the stages."""

    virtual: int = 1
    """Stages of each."""

    micro_batches: int = 1
    zero_bubble: bool = False
    """Whether gradients of weights are computed apart."""

    transitions: tuple[TransitionCost, ...] = ()
    forbidden: tuple[frozenset[tuple[str, int]], ...] = ()
    needed: frozenset[tuple[str, int]] = frozenset()
    room: float = math.inf
    decisions: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", {node.decision: len(node.options) for node in self.nodes})

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.virtual

    def in_flight(self, stage: int) -> int:
        """Return of how many micro-batches a stage keeps activations at most."""
        rank = stage % self.ranks
        if self.zero_bubble:
            return min(self.micro_batches, self.ranks)
        if self.virtual == 1:
            # With fewer micro-batches than stages all go forward before one goes back.
            return self.micro_batches if self.micro_batches < self.ranks else self.ranks - rank
        begun = 2 * (self.ranks - rank - 1) + (self.virtual - 1) * self.ranks + 1
        return min(-(-begun // self.virtual), self.micro_batches)

    def in_debt(self, stage: int) -> int:
        """Return of how many micro-batches a stage has gradients at most from which those of weights are to come."""
        return min(stage + 1, self.micro_batches) if self.zero_bubble and stage else 0

    def seconds(self, pick: Mapping[str, int], stages: Sequence[int]) -> float:
        """Return the seconds of a step; infinity if the pick is forbidden.

        Args:
            pick: Place of the option by decision.
            stages: Stage of each piece.
        """
        linked = sum(
            transition.seconds.get((pick[transition.first], pick[transition.second]), 0.0)
            for transition in self.transitions
        )
        if self.needed and self.needed.isdisjoint(pick.items()):
            return math.inf
        if linked == math.inf or any(combination <= pick.items() for combination in self.forbidden):
            return math.inf
        work, after = [0.0] * self.ranks, [0.0] * self.ranks
        for node, piece in zip(self.nodes, self.pieces, strict=True):
            combination, rank = node.options[pick[node.decision]], stages[piece] % self.ranks
            work[rank] += combination.forward_s + combination.backward_s
            after[rank] += combination.grad_sync_s + combination.update_s
        for send, (one_stage, next_stage) in zip(self.sends, itertools.pairwise(stages), strict=True):
            if one_stage != next_stage:
                work[one_stage % self.ranks] += send
                work[next_stage % self.ranks] += send
        most = max(work)
        idle = (sum(work) - most) / self.virtual - self.saved(pick)
        return linked + self.micro_batches * most + max(idle, 0.0) + max(after)

    def saved(self, pick: Mapping[str, int]) -> float:
        """Return the seconds of idle time that gradients of weights fill, if there is so much of it."""
        if not self.zero_bubble:
            return 0.0
        fills = zip(*(node.options[pick[node.decision]].fills_s for node in self.nodes), strict=True)
        return (1 - 1 / self.ranks) * min(map(sum, fills))

    def peaks(self, pick: Mapping[str, int], stages: Sequence[int]) -> list[float]:
        """Return the most bytes that each rank holds at a time."""
        always, working = [0.0] * self.ranks, [0.0] * self.ranks
        for node, piece in zip(self.nodes, self.pieces, strict=True):
            cost, stage = node.options[pick[node.decision]], stages[piece]
            passing = self.in_flight(stage) * cost.activation_bytes + self.in_debt(stage) * cost.deferred_bytes
            always[stage % self.ranks] += cost.persistent_bytes + passing
            working[stage % self.ranks] = max(working[stage % self.ranks], cost.workspace_bytes)
        return [persistent + more for persistent, more in zip(always, working, strict=True)]

    def fits(self, pick: Mapping[str, int], stages: Sequence[int]) -> bool:
        """Return whether all ranks keep to the room."""
        return max(self.peaks(pick, stages)) <= self.room * (1 + ROUNDING)

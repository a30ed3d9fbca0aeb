"""`StepProblem`: choose a strategy for each layer, and where pipeline stages begin (pure).

Nodes follow each other in forward order. Each has several strategies, and is in one piece of a chain; runs of pieces
are stages. With one stage the order of the nodes counts: gradients are synchronised beside backward passes, and
activations add up. With several, a pass of a stage counts as one.

One stage. The synchronisation of a node's gradients starts once the node's backward pass and the exchanges before it
are over, beside the backward passes that are left. Seconds in which both run cost `contention` more: 0 where
communication is free beside computation, 1 where both share the same cores. Memory is held against the room at every
node: what is held all through, what the nodes up to it keep for their backward passes, the gradients of the nodes from
it on, and what it needs itself while it runs. All gradients are there when the optimizer runs.

Stages. What strategies cost is of one micro-batch. With m micro-batches, v stages a rank and w the seconds that a rank
works on one, sends among them, a step takes

    m x max w + (sum w - max w) / v + the most of any rank's gradient synchronisation and update

which is the time of 1F1B and of its interleaved form (D. Narayanan et al., SC 2021, section 2.2) where all sends are
waited for. It takes the stages of a rank for equal. Where they differ, ranks wait for each other in turn: one works on
its long stage while another works on its short one, then the other way round. So with several stages a rank, a step
takes what the formula says or what the schedule takes pass by pass (`auto/solver/interleaved`), whichever is longer.
What bounds the formula from below bounds that too.

A rank keeps the activations of as many micro-batches as the schedule has in flight on it, of each of its stages at the
moment when they are most together (`auto/solver/in_flight`), and buffers at its borders. It is fullest then or while
its optimizer runs.

With zero bubble (ZB-H1; P. Qi et al., ICLR 2024) a backward pass is gradients of inputs b, for which others wait, and
of weights g, for which nobody does. Of p ranks with equal stages, whose forward passes take f, each is idle for

    (p - 1) x max(f + b - g, f, b) = (p - 1) x (w - g - min(g, f, b))

which is (p - 1) x (f + b - g) in the paper, where g is the smallest. Stages that differ are as if all had their mean:
with G, F and B the sums of all ranks, (1 - 1 / p) x (G + min(G, F, B)), which depends on no cut, is taken off
sum w - max w, down to 0: nothing is sooner than the rank that works the most. Of stages of which some work up to 1.5
times as long as others, this says from 5 % less to 8 % more than event by event; up to 10 times as long, from 8 % less
to 15 % more.

A rank keeps activations until the gradients of weights, which gives each as many as 1F1B keeps on the first. What these
are computed from is there for one micro-batch and, on rank r but the first, for r more whose turn has not come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.in_flight import list_in_flight
from phalanx.auto.solver.interleaved import PassTimes, StageTimes, find_rank_ends

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Fills: TypeAlias = tuple[float, float, float]
"""Seconds of a step in stages."""

ROUNDING = 1e-9
"""Part of the room by which sums of bytes may be over it: sums in another order are not the same to the last digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyCost:
    """Cost of one strategy for a node. Times in seconds, memory in bytes of one device."""

    label: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    comm_s: float = 0.0
    """Of both passes, collectives that they wait for."""

    weight_grad_s: float = 0.0
    """Of the backward pass, gradients of weights that are computed apart from those of inputs."""

    grad_sync_s: float = 0.0
    """Exchange of its gradients, beside the backward passes of the nodes before it."""

    update_s: float = 0.0
    """After all gradients are there: the optimizer, and collectives that wait for it."""

    persistent_bytes: float = 0.0
    """All through the step: parameters, gradients, optimizer state, the batch, what the model returns."""

    batch_bytes: float = 0.0
    """Of these, the batch and what the model returns."""

    late_bytes: float = 0.0
    """Of what is persistent, gradients that are there from its backward pass on only; of one stage."""

    update_bytes: float = 0.0
    """While the optimizer runs, beside what is persistent."""

    activation_bytes: float = 0.0
    """From its forward to its backward pass."""

    recomputed_bytes: float = 0.0
    """Activations that are computed again, while its backward pass and those of later nodes of its block run, less
    results of products, which are let go; may be negative. Of one stage."""

    deferred_bytes: float = 0.0
    """From gradients of inputs to those of weights, which are computed from it, where these are apart."""

    workspace_bytes: float = 0.0
    """While it runs."""

    @property
    def fills_s(self) -> Fills:
        """What its gradients of weights may fill of idle time."""
        return fills_s(self.forward_s, self.backward_s, self.weight_grad_s)


def fills_s(forward_s: float, backward_s: float, weights_s: float) -> Fills:
    """Return what gradients of weights may fill of the idle time of stages; the smallest of three sums it is.

    Args:
        forward_s: Of the forward pass.
        backward_s: Of the whole backward pass.
        weights_s: Of it, those that are computed apart.
    """
    return 2 * weights_s, weights_s + forward_s, backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNode:
    """A part of a step, and the costs of its strategies."""

    name: str
    decision: str
    """Nodes of one decision take the option of the same place: repeated blocks are cut alike."""

    options: tuple[StrategyCost, ...]
    block: str = ""
    """The block that is computed again with it; empty if none is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionCost:
    """What the options of two decisions cost together; pairs that are not named cost nothing."""

    first: str
    second: str
    seconds: Mapping[tuple[int, int], float]
    """By the places of both options; infinity forbids the pair."""


class RankMemory(NamedTuple):
    """Bytes of a rank where it is fullest."""

    persistent: float
    """All through the step, buffers at borders too."""

    activation: float
    workspace: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.persistent + (self.activation + self.workspace)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProblem:
    """A step: its nodes, their strategies, what goes together, and where stages may begin."""

    nodes: tuple[LayerNode, ...]
    pieces: tuple[int, ...] = ()
    """The piece that each node is in, rising; all are in one when empty."""

    sends: tuple[float, ...] = ()
    """Seconds that a stage's border after a piece costs each of its two ranks, one micro-batch there and back."""

    border_bytes: tuple[float, ...] = ()
    """Bytes that a stage's border after a piece takes of each of its two ranks: what arrives there, of all
    micro-batches. None where empty."""

    ranks: int = 1
    """Ranks along the stages."""

    virtual: int = 1
    """Stages of each."""

    micro_batches: int = 1
    zero_bubble: bool = False
    """Whether gradients of weights are computed apart."""

    contention: float = 0.0
    """Of one stage; gradients of several are synchronised after all passes."""

    transitions: tuple[TransitionCost, ...] = ()
    forbidden: tuple[frozenset[tuple[str, int]], ...] = ()
    """Sets of options, by decision and place, not all of which may be picked."""

    needed: frozenset[tuple[str, int]] = frozenset()
    """Options, by decision and place, of which at least one is to be picked; any pick will do when empty."""

    room: float = math.inf
    """Bytes that a device has."""

    decisions: dict[str, int] = field(init=False, compare=False)
    """Number of options by decision, in the order of the nodes."""

    def __post_init__(self) -> None:
        decisions: dict[str, int] = {}
        for node in self.nodes:
            if decisions.setdefault(node.decision, len(node.options)) != len(node.options):
                raise ValueError(f"nodes of decision {node.decision!r} have different numbers of options")
        if self.virtual > 1 and self.micro_batches % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not take turns at {self.micro_batches} micro-batches")
        object.__setattr__(self, "decisions", decisions)
        object.__setattr__(self, "border_bytes", self.border_bytes or (0.0,) * len(self.sends))
        object.__setattr__(self, "pieces", self.pieces or (0,) * len(self.nodes))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.virtual

    @property
    def piece_count(self) -> int:
        """Number of pieces."""
        return self.pieces[-1] + 1 if self.pieces else 1

    @property
    def in_flight(self) -> Ints:
        """Of how many micro-batches each stage keeps activations, by moment and stage (`list_in_flight`)."""
        return list_in_flight(self.ranks, self.virtual, self.micro_batches, zero_bubble=self.zero_bubble)

    def in_debt(self, stage: int) -> int:
        """Return of how many micro-batches a stage has gradients at most from which those of weights are to come."""
        return min(stage + 1, self.micro_batches) if self.zero_bubble and stage else 0

    def list_costs(self, pick: Mapping[str, int]) -> list[StrategyCost]:
        """Return the option of every node."""
        return [node.options[pick[node.decision]] for node in self.nodes]

    def transition_s(self, pick: Mapping[str, int]) -> float:
        """Return the seconds that options cost together; infinity if the pick is forbidden."""
        if self.needed and self.needed.isdisjoint(pick.items()):
            return math.inf
        if any(combination <= pick.items() for combination in self.forbidden):
            return math.inf
        return sum(
            transition.seconds.get((pick[transition.first], pick[transition.second]), 0.0)
            for transition in self.transitions
        )

    def seconds(self, pick: Mapping[str, int], stage_of: Sequence[int] = ()) -> float:
        """Return the seconds of a step; infinity if the pick is forbidden.

        Args:
            pick: Place of the option by decision.
            stage_of: Stage of each piece; none need be given of one stage.
        """
        linked = self.transition_s(pick)
        if linked == math.inf:
            return math.inf
        options = self.list_costs(pick)
        if self.stages == 1:
            return linked + self._backward_s(options) + sum(cost.forward_s + cost.update_s for cost in options)
        forward, backward, after = np.zeros((3, self.stages))
        for cost, piece in zip(options, self.pieces, strict=True):
            forward[stage_of[piece]] += cost.forward_s
            backward[stage_of[piece]] += cost.backward_s
            after[stage_of[piece]] += cost.grad_sync_s + cost.update_s
        sends = [send for send, (a, b) in zip(self.sends, itertools.pairwise(stage_of), strict=True) if a != b]
        stages = StageTimes(forward[None], backward[None], np.array(sends).reshape(1, -1), after[None])
        seconds = self.formula_s(stages, self.saved(pick))
        if self.virtual > 1:
            seconds = np.maximum(seconds, self.schedule_s(stages))
        return linked + float(seconds[0])

    def formula_s(self, stages: StageTimes, saved: float) -> Floats:
        """Return the seconds of steps by the formula, which knows the sums of a rank alone; by cut.

        Args:
            stages: Of several cuts.
            saved: Seconds of idle time that gradients of weights fill at most.
        """
        work, after = stages.forward + stages.backward, self.by_rank(stages.after)
        work[:, :-1] += stages.sends
        work[:, 1:] += stages.sends
        work = self.by_rank(work)
        most = work.max(axis=1)
        idle = (work.sum(axis=1) - most) / self.virtual - saved
        return np.asarray(self.micro_batches * most + np.maximum(idle, 0.0) + after.max(axis=1))

    def schedule_s(self, stages: StageTimes) -> Floats:
        """Return the seconds of steps whose ranks take turns at several stages, pass by pass; by cut."""
        none = np.zeros((len(stages.forward), 1))
        # Both ranks of a border wait for a send; the one that receives may begin when the other does.
        before = np.concatenate([none, stages.sends / 2], axis=1)
        behind = np.concatenate([stages.sends / 2, none], axis=1)
        forward = PassTimes((before + stages.forward + behind).T, -behind.T)
        backward = PassTimes((behind + stages.backward + before).T, -before.T)
        ends = find_rank_ends(forward, backward, self.ranks, self.micro_batches)
        return np.asarray((ends + self.by_rank(stages.after).T).max(axis=0))

    def by_rank(self, values: Floats) -> Floats:
        """Return sums by cut and rank, of values by cut and stage."""
        return np.asarray(values.reshape(len(values), self.virtual, self.ranks).sum(axis=1))

    def _backward_s(self, options: Sequence[StrategyCost]) -> float:
        """Return the seconds of the backward passes of one stage, and of the synchronisation beside them.

        If the exchange of a node starts when its backward pass is over and never waits again, the step has seen the
        backward passes of this node and those after it, and the exchanges of this node and those before. The last end
        is the largest of these, or all backward passes.
        """
        after = list(itertools.accumulate(cost.backward_s for cost in reversed(options)))[::-1]
        before = itertools.accumulate(cost.grad_sync_s for cost in options)
        together = max((*(b + e for b, e in zip(after, before, strict=True)), *after[:1]), default=0.0)
        apart = sum(cost.backward_s + cost.grad_sync_s for cost in options)
        return together + self.contention * (apart - together)

    def saved(self, pick: Mapping[str, int]) -> float:
        """Return the seconds of idle time that gradients of weights fill, if there is so much of it."""
        if not self.zero_bubble:
            return 0.0
        fills = zip(*(cost.fills_s for cost in self.list_costs(pick)), strict=True)
        return (1 - 1 / self.ranks) * min(map(sum, fills))

    def memory(self, pick: Mapping[str, int], stage_of: Sequence[int] = ()) -> list[RankMemory]:
        """Return the bytes of each rank where it is fullest."""
        options = self.list_costs(pick)
        if self.stages == 1:
            return [self._memory_of_layers(options)]
        persistent, owed, workspace, update = np.zeros((4, self.ranks))
        activation = np.zeros(self.stages)
        for cost, stage in zip(options, (stage_of[piece] for piece in self.pieces), strict=True):
            rank = stage % self.ranks
            persistent[rank] += cost.persistent_bytes
            activation[stage] += cost.activation_bytes
            owed[rank] += self.in_debt(stage) * cost.deferred_bytes
            workspace[rank] = max(workspace[rank], cost.workspace_bytes)
            update[rank] = max(update[rank], cost.update_bytes)
        for size, (stage, after_it) in zip(self.border_bytes, itertools.pairwise(stage_of), strict=True):
            if stage != after_it:
                for end in (stage, after_it):  # the same rank may have both
                    persistent[end % self.ranks] += size
        passing = self.most_in_flight(activation[None])[0] + owed
        return [
            max(RankMemory(*in_passes), RankMemory(in_passes[0], 0.0, in_update), key=lambda memory: memory.total)
            for *in_passes, in_update in np.stack([persistent, passing, workspace, update], axis=1).tolist()
        ]

    def most_in_flight(self, activation: Floats) -> Floats:
        """Return the bytes of activations that ranks keep at most, by cut and rank.

        Args:
            activation: Bytes of one micro-batch, by cut and stage.
        """
        return np.asarray(np.maximum.reduce([self.by_rank(counts * activation) for counts in self.in_flight]))

    def _memory_of_layers(self, options: Sequence[StrategyCost]) -> RankMemory:
        """Return the bytes of the only stage where it is fullest: at a node, or while the optimizer runs."""
        persistent, activation = sum(cost.persistent_bytes for cost in options), 0.0
        fullest = RankMemory(persistent, 0.0, max((cost.update_bytes for cost in options), default=0.0))
        sizes = sum_in_blocks([cost.recomputed_bytes for cost in options], [node.block for node in self.nodes])
        for cost, recomputed in zip(options, sizes, strict=True):
            activation += cost.activation_bytes
            at_node = RankMemory(persistent, activation, recomputed + cost.workspace_bytes)
            fullest = max(fullest, at_node, key=lambda memory: memory.total)
            persistent -= cost.late_bytes  # nodes before it come earlier in the forward pass, later in the backward one
        return fullest

    def peak(self, pick: Mapping[str, int], stage_of: Sequence[int] = ()) -> float:
        """Return the most bytes that a rank holds at a time."""
        return max(rank.total for rank in self.memory(pick, stage_of))

    def fits(self, pick: Mapping[str, int], stage_of: Sequence[int] = ()) -> bool:
        """Return whether all ranks keep to the room."""
        return self.peak(pick, stage_of) <= self.room * (1 + ROUNDING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The best pick so far."""

    pick: Mapping[str, int]
    """Place of the option by decision."""

    seconds: float
    bound: float
    """Seconds that no choice beats."""

    stage_of: tuple[int, ...] = ()
    """Stage of every piece; empty with one stage."""


def sum_in_blocks(sizes: Sequence[float], blocks: Sequence[str]) -> Iterator[float]:
    """Yield for each node the sum over the nodes of its block up to it, which follow each other."""
    total, before = 0.0, ""
    for size, block in zip(sizes, blocks, strict=True):
        total, before = (total if block == before else 0.0) + size, block
        yield total

"""One training step as an optimization problem: nodes in forward order, each with several strategies (pure).

What a step costs follows two streams. Computation runs the nodes forward, then backward. The synchronisation of a
node's gradients starts once the node's backward pass and the exchanges before it are over, beside the backward passes
that are left. Seconds in which both run cost `contention` more: 0 where communication is free beside computation, 1
where both share the same cores. Memory is held against the room at every node: what is held all through, what the nodes
up to it keep for their backward passes, and what it needs itself while it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Fills: TypeAlias = tuple[float, float, float]
"""Seconds of a step in stages (`auto/solver/pipeline_problem`)."""

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
    """All through the step: parameters, gradients, optimizer state."""

    activation_bytes: float = 0.0
    """From its forward to its backward pass."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionCost:
    """What the options of two decisions cost together; pairs that are not named cost nothing."""

    first: str
    second: str
    seconds: Mapping[tuple[int, int], float]
    """By the places of both options; infinity forbids the pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntraStageProblem:
    """A step without stages: nodes, their strategies, and what goes together."""

    nodes: tuple[LayerNode, ...]
    transitions: tuple[TransitionCost, ...] = ()
    forbidden: tuple[frozenset[tuple[str, int]], ...] = ()
    """Sets of options, by decision and place, not all of which may be picked."""

    needed: frozenset[tuple[str, int]] = frozenset()
    """Options, by decision and place, of which at least one is to be picked; any pick will do when empty."""

    room: float = math.inf
    """Bytes that a device has."""

    contention: float = 0.0
    fixed_s: float = 0.0
    """Seconds of every step, whatever is chosen."""

    decisions: dict[str, int] = field(init=False, compare=False)
    """Number of options by decision, in the order of the nodes."""

    def __post_init__(self) -> None:
        decisions: dict[str, int] = {}
        for node in self.nodes:
            if decisions.setdefault(node.decision, len(node.options)) != len(node.options):
                raise ValueError(f"nodes of decision {node.decision!r} have different numbers of options")
        object.__setattr__(self, "decisions", decisions)

    def list_costs(self, pick: Mapping[str, int]) -> list[StrategyCost]:
        """Return the option of every node."""
        return [node.options[pick[node.decision]] for node in self.nodes]

    def seconds(self, pick: Mapping[str, int]) -> float:
        """Return the seconds of a step; infinity if the pick is forbidden."""
        if self.needed and self.needed.isdisjoint(pick.items()):
            return math.inf
        if any(cost <= pick.items() for cost in self.forbidden):
            return math.inf
        options = self.list_costs(pick)
        linked = sum(
            transition.seconds.get((pick[transition.first], pick[transition.second]), 0.0)
            for transition in self.transitions
        )
        together = max(backward_bounds(options), default=0.0)
        apart = sum(cost.backward_s + cost.grad_sync_s for cost in options)
        backward = together + self.contention * (apart - together)
        return self.fixed_s + linked + backward + sum(cost.forward_s + cost.update_s for cost in options)

    def peak(self, pick: Mapping[str, int]) -> float:
        """Return the most bytes that a device holds at a time."""
        options = self.list_costs(pick)
        persistent = sum(cost.persistent_bytes for cost in options)
        activations = itertools.accumulate(cost.activation_bytes for cost in options)
        return persistent + max(
            (until + cost.workspace_bytes for until, cost in zip(activations, options, strict=True)), default=0.0
        )

    def fits(self, pick: Mapping[str, int]) -> bool:
        """Return whether a pick keeps to the room; a part in 10^9 more is rounding."""
        return self.peak(pick) <= self.room * (1 + ROUNDING)


def backward_bounds(options: Sequence[StrategyCost]) -> list[float]:
    """Return what the backward pass with its exchanges takes at least, once for every node that may hold it up.

    If the exchange of a node starts when its backward pass is over and never waits again, the step has seen the
    backward passes of this node and those after it, and the exchanges of this node and those before. The last end is
    the largest of these, or all backward passes.
    """
    after = list(itertools.accumulate(cost.backward_s for cost in reversed(options)))[::-1]
    before = list(itertools.accumulate(cost.grad_sync_s for cost in options))
    return [*(b + e for b, e in zip(after, before, strict=True)), *after[:1]]

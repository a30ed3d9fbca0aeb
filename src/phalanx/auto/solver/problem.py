"""One training step as choices: nodes in the order of the forward pass, each computed in one of several ways (pure).

What a step costs follows two streams. Computation runs the nodes forward, then backward. The exchange of a node's
gradients starts once the node's backward pass and the exchanges before it are over, beside the backward passes that are
left. Seconds in which both run cost `contention` more: 0 where communication is free beside computation, 1 where both
share the same cores. Memory is held against the room at every node: what is held all through, what the nodes up to it
keep for their backward passes, and what it needs itself while it runs.
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
class Option:
    """One way to compute a node. Times in seconds, memory in bytes of one device."""

    label: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    sent_s: float = 0.0
    """Of both passes, collectives that they wait for."""

    weights_s: float = 0.0
    """Of the backward pass, gradients of weights that are computed apart from those of inputs."""

    exchange_s: float = 0.0
    """Exchange of its gradients, beside the backward passes of the nodes before it."""

    update_s: float = 0.0
    """After all gradients are there: the optimizer, and collectives that wait for it."""

    held: float = 0.0
    """All through the step: parameters, gradients, optimizer state."""

    kept: float = 0.0
    """From its forward to its backward pass."""

    owed: float = 0.0
    """From gradients of inputs to those of weights, which are computed from it, where these are apart."""

    working: float = 0.0
    """While it runs."""

    @property
    def fills_s(self) -> Fills:
        """What its gradients of weights may fill of idle time."""
        return fills_s(self.forward_s, self.backward_s, self.weights_s)


def fills_s(forward_s: float, backward_s: float, weights_s: float) -> Fills:
    """Return what gradients of weights may fill of the idle time of stages; the smallest of three sums it is.

    Args:
        forward_s: Of the forward pass.
        backward_s: Of the whole backward pass.
        weights_s: Of it, those that are computed apart.
    """
    return 2 * weights_s, weights_s + forward_s, backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A part of a step, and the ways to compute it."""

    name: str
    decision: str
    """Nodes of one decision take the option of the same place: repeated blocks are cut alike."""

    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What the options of two decisions cost together; pairs that are not named cost nothing."""

    first: str
    second: str
    seconds: Mapping[tuple[int, int], float]
    """By the places of both options; infinity forbids the pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """All ways to compute a step."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
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
        found: dict[str, int] = {}
        for node in self.nodes:
            if found.setdefault(node.decision, len(node.options)) != len(node.options):
                raise ValueError(f"nodes of decision {node.decision!r} have different numbers of options")
        object.__setattr__(self, "decisions", found)

    def picked(self, pick: Mapping[str, int]) -> list[Option]:
        """Return the option of every node."""
        return [node.options[pick[node.decision]] for node in self.nodes]

    def seconds(self, pick: Mapping[str, int]) -> float:
        """Return the seconds of a step; infinity if the pick is forbidden."""
        if self.needed and self.needed.isdisjoint(pick.items()):
            return math.inf
        if any(one <= pick.items() for one in self.forbidden):
            return math.inf
        options = self.picked(pick)
        linked = sum(link.seconds.get((pick[link.first], pick[link.second]), 0.0) for link in self.links)
        together = max(ends(options), default=0.0)
        apart = sum(one.backward_s + one.exchange_s for one in options)
        backward = together + self.contention * (apart - together)
        return self.fixed_s + linked + backward + sum(one.forward_s + one.update_s for one in options)

    def peak(self, pick: Mapping[str, int]) -> float:
        """Return the most bytes that a device holds at a time."""
        options = self.picked(pick)
        held = sum(one.held for one in options)
        kept = itertools.accumulate(one.kept for one in options)
        return held + max((until + one.working for until, one in zip(kept, options, strict=True)), default=0.0)

    def fits(self, pick: Mapping[str, int]) -> bool:
        """Return whether a pick keeps to the room; a part in 10^9 more is rounding."""
        return self.peak(pick) <= self.room * (1 + ROUNDING)


def ends(options: Sequence[Option]) -> list[float]:
    """Return what the backward pass with its exchanges takes at least, once for every node that may hold it up.

    If the exchange of a node starts when its backward pass is over and never waits again, the step has seen the
    backward passes of this node and those after it, and the exchanges of this node and those before. The last end is
    the largest of these, or all backward passes.
    """
    after = list(itertools.accumulate(one.backward_s for one in reversed(options)))[::-1]
    before = list(itertools.accumulate(one.exchange_s for one in options))
    return [*(b + e for b, e in zip(after, before, strict=True)), *after[:1]]

"""`find_pipeline_seconds`: all passes of one stage per rank, from sums over stages (pure).

Every stage gives a time that a step takes at least: until its first input is there, its own passes, and what it waits
for in between and at the end. The step takes the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class StagePasses(NamedTuple):
    """Seconds of the passes of a micro-batch through one stage."""

    forward: float
    backward: float
    """Of inputs and weights, or of inputs where those of weights are apart."""

    weights: float = 0.0
    """Of gradients of weights, which zero bubble computes apart."""


def find_pipeline_seconds(stages: Sequence[StagePasses], micro_batches: float, *, in_turn: bool = True) -> float:
    """Return the seconds of all passes of a step.

    Args:
        stages: In the model's order, one a rank.
        micro_batches: How many.
        in_turn: Whether a stage begins backward passes as soon as it can (1F1B, zero bubble); else after all forward
            passes (GPipe).
    """
    if not in_turn:
        ways = [own.forward for own in stages], [own.backward for own in stages]
        return sum(sum(way) + max(0.0, micro_batches - 1) * max(way) for way in ways)
    longest, before_forward, before_backward = 0.0, 0.0, 0.0
    to_end = list(accumulate((own.forward + own.backward for own in reversed(stages)), initial=0.0))
    for rank, own in enumerate(stages):
        behind = len(stages) - 1 - rank
        # So many more forward passes are before its first backward pass, and as many backward passes after its last
        # forward pass.
        queued, back = min(behind, micro_batches - 1), to_end[behind]
        at_start = max(0.0, back - queued * own.forward)
        at_end = max(0.0, back - queued * (own.backward + own.weights))
        # Where all forward passes are before all backward passes, both are one wait.
        waits = at_start + at_end if micro_batches - 1 > behind else max(at_start, at_end)
        # Of zero bubble, so many gradients of weights are left to compute while the last one goes to the first stage.
        left = own.weights * (1 + min(rank, micro_batches - 1))
        after = before_backward + (stages[0].weights if rank else own.weights)
        work = micro_batches * (own.forward + own.backward + own.weights)
        longest = max(longest, before_forward + work + waits + max(0.0, after - left))
        before_forward, before_backward = before_forward + own.forward, before_backward + own.backward
    return longest

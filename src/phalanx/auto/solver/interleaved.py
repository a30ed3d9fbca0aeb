"""`find_rank_ends`: when ranks that take turns at several stages each are through with all passes (pure).

A rank has a fixed order of passes (`plan/pipeline_order`): forward passes until the first gradient can be back, then
one forward and one backward pass in turn, its slots, then the rest. So what a pass waits for is known beforehand, and
the times of a step are sums and maxima.

Slot k of rank r is in *wave* k - r. Each pass then waits only for the one before it on its rank, and for a neighbour's
pass of the wave before: for forward passes the rank before, for backward passes the rank behind, in a ring. The passes
of a wave are computed at once, for many cuts of a chain. A rank's sends leave by one port, one after the other; that is
free with the rank where none takes time beside its passes. Durations differ from wave to wave and repeat after a
*round*, as many micro-batches as there are ranks. As soon as a round makes all times later by the same, so do those
that follow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_STEADY = 1e-12
"""Share of a time by which rounds of the steady state may differ: that of rounding."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class PassTimes(NamedTuple):
    """Seconds of a micro-batch's passes one way, by stage and cut; stage s is on rank s modulo the number of ranks."""

    seconds: Floats
    """In which a rank does nothing else."""

    delay: Floats
    """In which the rank sends what the pass gives to the next stage, which then begins; beside other passes, and after
    all sends of passes before it, of both ways. Negative where the next stage can begin before the pass ends."""


class StageTimes(NamedTuple):
    """Seconds of the stages of several cuts, by cut and stage; passes and sends of one micro-batch."""

    forward: Floats
    backward: Floats
    sends: Floats
    """By cut and border: what each of two ranks sends and receives, there and back."""

    after: Floats
    """Gradient synchronisation and update."""


def find_rank_ends(forward: PassTimes, backward: PassTimes, ranks: int, micro_batches: int) -> Floats:
    """Return the seconds after which ranks are through, by rank and cut.

    Args:
        forward: Forward passes.
        backward: Backward passes.
        ranks: Ranks along the stages, at least 2.
        micro_batches: A multiple of `ranks`.
    """
    stages, cuts = forward.seconds.shape
    none = np.zeros((1, cuts))  # for ranks without a pass
    there, back = (PassTimes(*(np.concatenate([times, none]) for times in way)) for way in (forward, backward))
    order = _Waves(stages // ranks, ranks, micro_batches)
    rank = np.arange(ranks)
    free, port, output, gradient = np.zeros((4, ranks, cuts))
    before_round: Floats | None = None
    wave = 0
    while wave < len(order.forward):
        if wave in order.rounds:
            state = np.stack([free, port, output, gradient])
            if before_round is not None:
                later = state - before_round
                if (np.ptp(later, axis=(0, 1)) <= _STEADY * state.max(axis=(0, 1))).all():
                    left = len(order.rounds) - 1 - order.rounds.index(wave)
                    free, port, output, gradient = state + left * later
                    wave += left * order.rounds.step
            before_round = state
        stage = order.forward[wave]
        free = np.maximum(free, output[rank - 1] + order.forward_waits[wave]) + there.seconds[stage]
        output = port = np.maximum(free, port) + there.delay[stage]
        stage = order.backward[wave]
        free = np.maximum(free, gradient[rank + 1 - ranks] + order.backward_waits[wave]) + back.seconds[stage]
        gradient = port = np.maximum(free, port) + back.delay[stage]
        wave += 1
    return free


class _Waves:
    """The stages whose passes are in each wave, by wave and rank; the number of stages where a rank has none."""

    def __init__(self, virtual: int, ranks: int, micro_batches: int) -> None:
        stages, total, rank = virtual * ranks, virtual * micro_batches, np.arange(ranks)
        ahead = stages - ranks + 2 * (ranks - 1)  # forward passes of the first rank before its slots
        waves = np.arange(-ahead, total)[:, None]
        number = waves + ahead - rank
        turn = number // ranks % virtual
        self.forward: Ints = np.where((number >= 0) & (number < total), turn * ranks + rank, stages)
        number = waves + rank
        turn = virtual - 1 - number // ranks % virtual
        self.backward: Ints = np.where((number >= 0) & (number < total), turn * ranks + rank, stages)
        # Nobody sends to the first stage, nor back to the last.
        self.forward_waits: Floats = np.where(self.forward % stages == 0, -math.inf, 0.0)[..., None]
        self.backward_waits: Floats = np.where(self.backward >= stages - 1, -math.inf, 0.0)[..., None]
        self.rounds = range(ahead, max(ahead, total) + 1, stages)
        """The waves with which rounds begin in which all ranks have slots, and with which the last of these ends."""

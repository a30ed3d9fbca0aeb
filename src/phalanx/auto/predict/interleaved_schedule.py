"""`interleaved_seconds`: all passes of several stages per rank, in the order of their schedule (pure)."""

from __future__ import annotations

from collections.abc import Sequence

_WHOLE_ROUNDS, _MOST_PASSES = 8, 4096
"""Rounds of as many micro-batches as ranks that are computed pass by pass: so many, and more until all have so many
passes. All that follow take as long as the last one, or as the work of the busiest rank."""


def interleaved_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    send: float,
    *,
    contention: float | None,
    ranks: int,
    rounds: int,
) -> float:
    """Return the seconds of all passes and sends of a step whose stages differ.

    Args:
        forward: Seconds of a forward pass of each stage, in the model's order.
        backward: Seconds of a backward pass of each.
        send: Seconds of a send to the next stage.
        contention: Seconds that a send and a pass beside it cost each other, for each that they share; None where
            sends hold up ranks.
        ranks: Ranks, each with as many stages.
        rounds: Micro-batches, over the ranks.
    """
    import numpy as np  # which most predictions do without

    from phalanx.auto.solver.interleaved import PassTimes, find_rank_ends

    passes = np.array([forward, backward])[:, :, None]
    sends = np.full(passes.shape, send)
    sends[0, -1] = sends[1, 0] = 0.0
    if contention is None:
        passes, delays = passes + sends, np.zeros_like(sends)
    else:
        passes, delays = passes + contention * np.minimum(sends, passes), sends
    ways = PassTimes(passes[0], delays[0]), PassTimes(passes[1], delays[1])
    whole = min(rounds, max(_WHOLE_ROUNDS, _MOST_PASSES // len(forward)))
    last = float(find_rank_ends(*ways, ranks, ranks * whole).max())
    if rounds == whole:
        return last
    later = last - float(find_rank_ends(*ways, ranks, ranks * (whole - 1)).max())
    busiest = ranks * float(passes.sum(axis=0).reshape(-1, ranks).sum(axis=0).max())
    return last + (rounds - whole) * max(later, busiest)

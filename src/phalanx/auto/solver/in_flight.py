"""`list_in_flight`, `least_in_flight`: of how many micro-batches stages keep activations at a time (pure).

The stages of a rank are not fullest together: with several, the first has most micro-batches when the last has fewest.
So what a rank keeps is the largest of a few sums, one for each *moment* at which it may be fullest.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.pipeline_order import Action, Pass, order_of
from phalanx.plan.value import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 3
"""Rounds of micro-batches after which a rank with several stages has been as full as it gets."""


@cache
def list_in_flight(ranks: int, virtual: int, micro_batches: int, *, zero_bubble: bool = False) -> Ints:
    """Return how many micro-batches each stage has in flight, by moment and stage; ranks have moments of their own.

    At any time of a step, what a rank keeps is no more than at one of its moments, whatever the sizes of its stages.

    Args:
        ranks: Ranks along the stages; stage s is on rank s modulo `ranks`.
        virtual: Stages of each.
        micro_batches: A multiple of `ranks` where ranks have several stages.
        zero_bubble: Whether activations are kept until gradients of weights are computed.
    """
    if zero_bubble:
        moments = np.full((1, ranks * virtual), min(micro_batches, ranks))
    elif virtual == 1:
        # With fewer micro-batches than stages all go forward before one goes back.
        has_fewer = micro_batches < ranks
        moments = np.array([[micro_batches if has_fewer else ranks - rank for rank in range(ranks)]])
    else:
        schedule = Schedule(kind="interleaved", virtual=virtual, microbatches=min(micro_batches, _ROUNDS * ranks))
        fullest = [_list_fullest(actions, ranks, virtual) for actions in order_of(schedule, ranks)]
        rows = [list(itertools.islice(itertools.cycle(own), max(map(len, fullest)))) for own in fullest]
        moments = np.array(rows).transpose(1, 2, 0).reshape(-1, virtual * ranks)
    moments.setflags(write=False)
    return moments


def least_in_flight(moments: Ints, ranks: int) -> Floats:
    """Return numbers by stage with which no rank seems fuller than it is at one of its moments.

    That is one of its moments or their mean: the one of which the smallest number of a stage is largest.

    Args:
        moments: By moment and stage, as `list_in_flight` gives them.
        ranks: Ranks along the stages.
    """
    by_rank = moments.reshape(len(moments), -1, ranks)
    means = np.concatenate([by_rank, by_rank.mean(axis=0, keepdims=True)])
    fullest = means.min(axis=1).argmax(axis=0)
    return np.asarray(np.take_along_axis(means, fullest[None, None], axis=0)[0].ravel())


def _list_fullest(actions: list[Action], ranks: int, virtual: int) -> list[tuple[int, ...]]:
    """Return the micro-batches in flight by stage of a rank, at the moments at which it may be fullest."""
    now, after_forward = np.zeros(virtual, dtype=np.int64), []
    for action in actions:
        now[action.stage // ranks] += 1 if action.kind is Pass.FORWARD else -1
        if action.kind is Pass.FORWARD:
            after_forward.append(now.copy())
    every = np.array(after_forward)
    change = np.diff(every, axis=0)
    # Between two others on a straight line, no sum is larger than at one of its ends.
    is_end = np.concatenate([[True], (change[1:] != change[:-1]).any(axis=1), [True]])[: len(every)]
    ends = np.unique(every[is_end], axis=0)
    is_less = (ends[:, None] <= ends).all(axis=2).sum(axis=1) > 1  # than another in every stage
    return list(map(tuple, ends[~is_less].tolist()))

"""`interleaved_seconds`: all passes of several stages per rank, in the order of their schedule (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.plan.pipeline_order import Action, OrderRules, Pass, order_of
from phalanx.plan.value import Schedule

_WHOLE_ROUNDS, _MOST_PASSES = 8, 4096
"""Rounds of micro-batches that are computed: so many, and in waves more until all have so many passes. All that follow
take as long as the last one, or as the work of the busiest rank."""

_LEAST_ROUNDS, _MANY_PASSES = 3, 8192
"""Where passes are computed one by one, so many rounds are enough if they have so many passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Seconds of a micro-batch's passes through one stage."""

    forward: float
    backward: float
    """Of inputs and weights, or of inputs where those of weights are apart."""

    weights: float = 0.0
    """Of gradients of weights, which zero bubble computes apart."""

    send: float = 0.0
    """To another rank."""


def interleaved_seconds(
    stages: Sequence[StageSeconds],
    schedule: Schedule,
    rules: OrderRules,
    *,
    contention: float | None,
    ranks: int,
    round_size: int,
) -> float:
    """Return the seconds of all passes and sends of a step.

    Args:
        stages: In the model's order.
        schedule: Which passes follow which.
        rules: How software orders them.
        contention: Seconds that a send and a pass beside it cost each other, for each that they share; None where
            sends hold up ranks.
        ranks: Ranks, each with as many stages.
        round_size: Micro-batches that a rank takes through one of its stages before the next.
    """
    moves = _build_moves(stages, schedule, contention, ranks)
    rounds, count = schedule.microbatches // round_size, schedule.microbatches
    is_wave = (
        schedule.kind == "interleaved" and round_size == ranks and not count % ranks and not rules.all_forward_first
    )
    find_end = _find_end_of_waves if is_wave else partial(_find_end_one_by_one, rules)
    if is_wave:
        computed = max(_WHOLE_ROUNDS, _MOST_PASSES // len(stages))
    else:
        computed = max(_LEAST_ROUNDS, min(_WHOLE_ROUNDS, _MANY_PASSES // (len(moves) * round_size)))
    computed = min(rounds, computed)
    count -= round_size * (rounds - computed)
    end = find_end(moves, _with_count(schedule, count), ranks)
    if rounds == computed:
        return end
    later = end - find_end(moves, _with_count(schedule, count - round_size), ranks)
    work = [0.0] * ranks
    for (_, stage), move in moves.items():
        work[schedule.holder(stage, ranks)] += move.seconds
    return end + (rounds - computed) * max(later, round_size * max(work))


@dataclass(frozen=True, slots=True)
class _Move:
    """A pass of one kind through one stage."""

    seconds: float
    """In which its rank does nothing else."""

    send: float
    """Seconds until the next stage has what it gives, beside other passes."""


_Moves = dict[tuple[Pass, int], _Move]


def _build_moves(stages: Sequence[StageSeconds], schedule: Schedule, contention: float | None, ranks: int) -> _Moves:
    splits, moves = schedule.kind == "zero_bubble", _Moves()
    for stage, own in enumerate(stages):
        back = Pass.INPUTS if splits else Pass.BACKWARD
        for kind, seconds, target in ((Pass.FORWARD, own.forward, stage + 1), (back, own.backward, stage - 1)):
            crosses = 0 <= target < len(stages) and schedule.holder(target, ranks) != schedule.holder(stage, ranks)
            send = own.send if crosses else 0.0
            if contention is None:
                moves[kind, stage] = _Move(seconds + send, 0.0)
            else:
                moves[kind, stage] = _Move(seconds + contention * min(send, seconds), send)
        if splits:
            moves[Pass.WEIGHTS, stage] = _Move(own.weights, 0.0)
    return moves


def _with_count(schedule: Schedule, micro_batches: int) -> Schedule:
    return schedule.model_copy(update={"microbatches": micro_batches})


def _find_end_of_waves(moves: _Moves, schedule: Schedule, ranks: int) -> float:
    """Return when the last pass ends, of rounds of as many micro-batches as ranks."""
    import numpy as np  # which most predictions do without

    from phalanx.auto.solver.interleaved import PassTimes, find_rank_ends

    def list_times(kind: Pass) -> PassTimes:
        way = [moves[kind, stage] for stage in range(ranks * schedule.virtual)]
        return PassTimes(*np.array([(move.seconds, move.send) for move in way]).T[:, :, None])

    forward, backward = list_times(Pass.FORWARD), list_times(Pass.BACKWARD)
    return float(find_rank_ends(forward, backward, ranks, schedule.microbatches).max())


def _find_end_one_by_one(rules: OrderRules, moves: _Moves, schedule: Schedule, ranks: int) -> float:
    """Return the same of any order."""
    orders = [iter(actions) for actions in order_of(schedule, ranks, rules)]
    free, port, stages = [0.0] * ranks, [0.0] * ranks, ranks * schedule.virtual
    arrival: dict[tuple[Pass, int, int], float] = {}
    waiting: dict[tuple[Pass, int, int], tuple[int, Action]] = {}
    ready = [(rank, next(actions)) for rank, actions in enumerate(orders)]
    while ready:
        rank, action = ready.pop()
        kind, stage, micro_batch = action
        source = kind, stage + (-1 if kind is Pass.FORWARD else 1), micro_batch
        begins = free[rank]
        if kind is not Pass.WEIGHTS and 0 <= source[1] < stages:
            if source not in arrival:
                waiting[source] = rank, action
                continue
            begins = max(begins, arrival[source])
        move = moves[kind, stage]
        free[rank] = arrival[action] = begins + move.seconds
        if move.send:
            port[rank] = arrival[action] = max(free[rank], port[rank]) + move.send
        if action in waiting:
            ready.append(waiting.pop(action))
        if (following := next(orders[rank], None)) is not None:
            ready.append((rank, following))
    return max(free)

"""`find_min_memory`: find the strategy assignment with the least peak memory, and what fills it (pure).

One program as that of the fastest choice, with the peak as its goal. Of stages, one for each rank, whose decisions are
few once merged (`auto/solver/dominance`), every pick is tried: the cut with the least peak is computed stage after
stage, from the least peak of the stages before that end at each piece.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.dominance import reduce_problem
from phalanx.auto.solver.in_flight import least_in_flight
from phalanx.auto.solver.problem import StepProblem, StrategyCost, TransitionCost, sum_in_blocks
from phalanx.auto.solver.step_program import build_program

MemoryPart: TypeAlias = Literal[
    "parameters, gradients and optimizer state", "inputs, outputs and borders", "activations", "what one layer needs"
]
Floats = NDArray[np.float64]

_MOST_PICKS = 20_000
"""Merged picks that are tried; more are left to a program."""

_TILTS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMemory:
    """The choice that needs the least of its peak rank."""

    pick: Mapping[str, int]
    peak: float
    bound: float
    """Bytes that no choice needs less than."""

    stage_of: tuple[int, ...] = ()
    """Stage of every piece; empty with one stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMemoryOfSpace:
    """What a space needs at least."""

    bound: float
    """Bytes that every choice of it needs; infinity if nothing can be chosen."""

    index: int = 0
    """Of the problem with the smallest peak so far."""

    least: MinMemory | None = None
    """None if there is none, or none in time."""

    @property
    def is_proved(self) -> bool:
        """Whether nothing needs less than `least`."""
        return self.least is not None and self.least.peak <= self.bound * (1 + 1e-6)


def find_min_memory(space: Sequence[StepProblem], time_limit: float) -> MinMemoryOfSpace:
    """Return the least that any of several choices needs.

    Args:
        space: All of them.
        time_limit: Seconds after which the least so far is returned with its bound.
    """
    stop = time.monotonic() + time_limit
    lows = [peak_lower_bound(problem) for problem in space]
    result, bound = MinMemoryOfSpace(bound=math.inf), math.inf
    for index in sorted(range(len(space)), key=lows.__getitem__):
        best = math.inf if result.least is None else result.least.peak
        left = stop - time.monotonic()
        if lows[index] >= best or left <= 0:
            bound = min(bound, lows[index])
            break
        try:
            least = minimize_peak(space[index], below=best, time_limit=left)
        except TimeoutError:
            bound = min(bound, lows[index])
            continue
        if least is not None:
            bound = min(bound, max(lows[index], least.bound))
        if least is not None and least.peak < best:
            result = MinMemoryOfSpace(bound=0.0, index=index, least=least)
    return replace(result, bound=bound if result.least is None else min(bound, result.least.peak))


def peak_lower_bound(problem: StepProblem) -> float:
    """Return bytes that every choice needs, without regard to what goes together."""
    if problem.stages == 1:
        before, most = 0.0, max((min(o.update_bytes for o in node.options) for node in problem.nodes), default=0.0)
        again = [min(o.recomputed_bytes for o in node.options) for node in problem.nodes]
        until = sum_in_blocks(again, [node.block for node in problem.nodes])
        for node, size, recomputed in zip(problem.nodes, again, until, strict=True):
            own = min(o.activation_bytes + o.recomputed_bytes + o.workspace_bytes for o in node.options)
            most = max(most, before + recomputed - size + own)
            before += min(o.activation_bytes - o.late_bytes for o in node.options)
        return _least_sum(problem, "persistent_bytes") + most
    largest = max(
        min(o.persistent_bytes + o.activation_bytes + o.workspace_bytes for o in node.options) for node in problem.nodes
    )
    by_stage = least_in_flight(problem.in_flight, problem.ranks)
    in_flight = by_stage.reshape(problem.virtual, problem.ranks).min(axis=0).tolist()
    persistent, activation = _least_sum(problem, "persistent_bytes"), _least_sum(problem, "activation_bytes")
    return max(largest, *(_spread_bound(persistent, activation, in_flight, tilt) for tilt in _TILTS))


def _spread_bound(persistent: float, activation: float, in_flight: Sequence[float], tilt: float) -> float:
    """Return what the peak rank has at least, of sums over all: no less than any weighted mean of the ranks."""
    weights = [1 / (1 + tilt * times) for times in in_flight]
    least_passing = min(weight * times for weight, times in zip(weights, in_flight, strict=True))
    return (persistent * min(weights) + activation * least_passing) / sum(weights)


def _least_sum(problem: StepProblem, name: Literal["persistent_bytes", "activation_bytes"]) -> float:
    sums = {decision: [0.0] * count for decision, count in problem.decisions.items()}
    for node in problem.nodes:
        for index, option in enumerate(node.options):
            sums[node.decision][index] += getattr(option, name)
    return sum(map(min, sums.values()))


def minimize_peak(
    problem: StepProblem, *, below: float = math.inf, time_limit: float | None = None
) -> MinMemory | None:
    """Return the choice with the least peak; None if there is none, or none that needs less than `below`.

    Args:
        problem: What can be chosen; their room does not count.
        below: Bytes that others need.
        time_limit: Seconds after which the least so far is returned with a bound.

    Raises:
        TimeoutError: If none was found in time.
    """
    if problem.piece_count < problem.stages:
        return None
    only = _without_times(problem)
    smaller = reduce_problem(only)
    if smaller is None:
        return _by_program(only, below, time_limit)
    if not all(smaller.picks.values()):
        return None
    few = math.prod(smaller.problem.decisions.values()) <= _MOST_PICKS
    if few and problem.virtual == 1:
        least = _by_trying(smaller.problem, below, time_limit)
    else:
        least = _by_program(smaller.problem, below, time_limit)
    return None if least is None else replace(least, pick=smaller.original(least.pick))


def _without_times(problem: StepProblem) -> StepProblem:
    """Return the same choices of which all take the same time, with a room that leaves nothing out."""
    nodes = tuple(replace(node, options=tuple(map(_without_time, node.options))) for node in problem.nodes)
    most = sum(
        o.persistent_bytes
        + problem.micro_batches * (o.activation_bytes + o.deferred_bytes)
        + max(o.workspace_bytes, o.update_bytes)
        + o.recomputed_bytes
        for n in nodes
        for o in n.options
    ) + 2 * sum(problem.border_bytes)
    transitions = _forbidden_pairs(problem.transitions)
    return replace(problem, nodes=nodes, transitions=transitions, sends=(0.0,) * len(problem.sends), room=most or 1.0)


def _without_time(option: StrategyCost) -> StrategyCost:
    return StrategyCost(
        label=option.label,
        persistent_bytes=option.persistent_bytes,
        late_bytes=option.late_bytes,
        update_bytes=option.update_bytes,
        recomputed_bytes=option.recomputed_bytes,
        activation_bytes=option.activation_bytes,
        deferred_bytes=option.deferred_bytes,
        workspace_bytes=option.workspace_bytes,
    )


def _forbidden_pairs(transitions: Sequence[TransitionCost]) -> tuple[TransitionCost, ...]:
    pairs = ({pair: s for pair, s in transition.seconds.items() if s == math.inf} for transition in transitions)
    return tuple(
        replace(transition, seconds=never) for transition, never in zip(transitions, pairs, strict=True) if never
    )


def _by_program(problem: StepProblem, below: float, time_limit: float | None) -> MinMemory | None:
    unit = peak_lower_bound(problem) or 1.0
    program = build_program(problem, goal_bytes=unit)
    answer = program.solve(time_limit=time_limit, below=below / unit)
    if answer is None:
        return None
    pick, stage_of = program.pick(answer.values), program.stage_of(answer.values)
    peak = problem.peak(pick, stage_of)
    return MinMemory(pick=pick, peak=peak, bound=min(peak, answer.bound * unit), stage_of=stage_of)


def _by_trying(problem: StepProblem, below: float, time_limit: float | None) -> MinMemory | None:
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    costs, names = _costs(problem), list(problem.decisions)
    best: MinMemory | None = None
    for indices in itertools.product(*(range(count) for count in problem.decisions.values())):
        pick = dict(zip(names, indices, strict=True))
        if problem.transition_s(pick) == math.inf:
            continue
        if time.monotonic() > stop:
            if best is None:
                raise TimeoutError("no choice was found in time")
            return replace(best, bound=min(best.peak, peak_lower_bound(problem)))
        peak, stages = _best_partition(problem, [costs[option] for option in pick.items()], below)
        if peak < below:
            below = peak
            best = MinMemory(pick=pick, peak=peak, bound=peak, stage_of=stages)
    return best


def _costs(problem: StepProblem) -> dict[tuple[str, int], Floats]:
    """Return what each option holds, keeps, owes, and needs while it runs and while the optimizer does, by piece."""
    count = problem.piece_count
    costs = {(name, o): np.zeros((5, count)) for name, size in problem.decisions.items() for o in range(size)}
    for node, piece in zip(problem.nodes, problem.pieces, strict=True):
        for o, option in enumerate(node.options):
            cost = costs[node.decision, o]
            cost[:3, piece] += option.persistent_bytes, option.activation_bytes, option.deferred_bytes
            cost[3:, piece] = np.maximum(cost[3:, piece], (option.workspace_bytes, option.update_bytes))
    return costs


def _best_partition(problem: StepProblem, option_costs: list[Floats], below: float) -> tuple[float, tuple[int, ...]]:
    """Return the least peak over cuts of one pick, one stage a rank, and the stage of every piece."""
    sums = np.sum([costs[:3] for costs in option_costs], axis=0)
    workspace, update = map(_most_between, np.max([costs[3:] for costs in option_costs], axis=0))
    prefix = np.concatenate([np.zeros((3, 1)), np.cumsum(sums, axis=1)], axis=1)
    sums_between = prefix[:, None, :] - prefix[:, :, None]  # by what, first piece and end
    count = sums.shape[1]
    arriving = np.array([0.0, *problem.border_bytes, 0.0])
    workspace, update = (most + arriving[:, None] + arriving for most in (workspace, update))
    best, starts_by_stage = np.full(count + 1, math.inf), list[NDArray[np.int64]]()
    best[0] = 0.0
    for stage in range(problem.stages):
        persistent, activation, deferred = sums_between
        passing = problem.in_flight[0, stage] * activation + problem.in_debt(stage) * deferred
        peaks = persistent + np.maximum(passing + workspace, update)
        reached = np.maximum(best[:, None], peaks)
        starts_by_stage.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
        if best.min() >= below:
            return math.inf, ()
    return float(best[-1]), _stages(starts_by_stage, count)


def _most_between(values: Floats) -> Floats:
    """Return the largest value of the pieces from each to each end; infinity where there is none."""
    count = len(values)
    most = np.full((count + 1, count + 1), math.inf)
    for start in range(count):
        most[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return most


def _stages(starts_by_stage: list[NDArray[np.int64]], count: int) -> tuple[int, ...]:
    """Return the stage of every piece from where each stage begins, by its end."""
    stages, end = [0] * count, count
    for stage in reversed(range(len(starts_by_stage))):
        start = int(starts_by_stage[stage][end])
        stages[start:end] = [stage] * (end - start)
        end = start
    return tuple(stages)


def largest_part(problem: StepProblem, least: MinMemory) -> MemoryPart:
    """Return what the peak rank holds most of, where it is fullest."""
    memory, ranks = problem.memory(least.pick, least.stage_of), problem.ranks
    rank = max(range(ranks), key=lambda rank: memory[rank].total)
    stage_of, batch = least.stage_of or (0,) * problem.piece_count, 0.0
    for cost, piece in zip(problem.list_costs(least.pick), problem.pieces, strict=True):
        batch += cost.batch_bytes if stage_of[piece] % ranks == rank else 0.0
    for size, ends in zip(problem.border_bytes, itertools.pairwise(stage_of), strict=True):
        batch += size * sum(end % ranks == rank for end in ends) if ends[0] != ends[1] else 0.0
    persistent, *others = memory[rank]
    parts = dict(zip(get_args(MemoryPart), (persistent - batch, batch, *others), strict=True))
    return max(parts, key=lambda name: parts[name])

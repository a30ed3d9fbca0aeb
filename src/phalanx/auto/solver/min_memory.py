"""The least bytes that a step needs on its fullest rank, over all choices, and what most of them are (pure).

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

from phalanx.auto.solver.dominance import merged
from phalanx.auto.solver.milp import Program
from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import Choices, Link, Node, Option
from phalanx.auto.solver.solve import add_memory
from phalanx.auto.solver.solve_pipeline import StagedProgram

AnyChoices: TypeAlias = Choices | StagedChoices
Held: TypeAlias = Literal["parameters, gradients and optimizer state", "activations", "what one layer needs"]
Floats = NDArray[np.float64]

_MOST_PICKS = 20_000
"""Merged picks that are tried; more are left to a program."""

_TILTS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """The choice that needs the least of its fullest rank."""

    pick: Mapping[str, int]
    peak: float
    bound: float
    """Bytes that no choice needs less than."""

    stages: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOfSpace:
    """What a space needs at least."""

    bound: float
    """Bytes that every choice of it needs; infinity if nothing can be chosen."""

    place: int = 0
    """Of the choices with the least peak that was found."""

    least: Least | None = None
    """None if none was found in time, or there is none."""

    @property
    def is_proved(self) -> bool:
        """Whether nothing needs less than what was found."""
        return self.least is not None and self.least.peak <= self.bound * (1 + 1e-6)


def least_of_space(space: Sequence[AnyChoices], time_limit: float) -> LeastOfSpace:
    """Return the least that any of several choices needs.

    Args:
        space: All of them.
        time_limit: Seconds after which the least so far is returned with its bound.
    """
    stop = time.monotonic() + time_limit
    lows = [low_peak(choices) for choices in space]
    found, bound = LeastOfSpace(bound=math.inf), math.inf
    for place in sorted(range(len(space)), key=lows.__getitem__):
        best = math.inf if found.least is None else found.least.peak
        left = stop - time.monotonic()
        if lows[place] >= best or left <= 0:
            bound = min(bound, lows[place])
            break
        try:
            least = least_peak(space[place], below=best, time_limit=left)
        except TimeoutError:
            bound = min(bound, lows[place])
            continue
        if least is not None:
            bound = min(bound, max(lows[place], least.bound))
        if least is not None and least.peak < best:
            found = LeastOfSpace(bound=0.0, place=place, least=least)
    return replace(found, bound=bound if found.least is None else min(bound, found.least.peak))


def low_peak(choices: AnyChoices) -> float:
    """Return bytes that every choice needs, found without asking what goes together."""
    if isinstance(choices, Choices):
        until = itertools.accumulate(min(o.kept for o in node.options) for node in choices.nodes)
        working = (min(o.working for o in node.options) for node in choices.nodes)
        return _least_sum(choices, "held") + max((k + w for k, w in zip(until, working, strict=True)), default=0.0)
    largest = max(min(o.held + o.kept + o.working for o in node.options) for node in choices.nodes)
    flying = [choices.in_flight(rank) for rank in range(choices.ranks)]
    held, kept = _least_sum(choices, "held"), _least_sum(choices, "kept")
    return max(largest, *(_spread(held, kept, flying, tilt) for tilt in _TILTS))


def _spread(held: float, kept: float, flying: Sequence[int], tilt: float) -> float:
    """Return what the fullest rank has at least, of sums over all: no less than any weighted mean of the ranks."""
    weights = [1 / (1 + tilt * times) for times in flying]
    passing = min(weight * times for weight, times in zip(weights, flying, strict=True))
    return (held * min(weights) + kept * passing) / sum(weights)


def _least_sum(choices: AnyChoices, name: Literal["held", "kept"]) -> float:
    sums = {decision: [0.0] * count for decision, count in choices.decisions.items()}
    for node in choices.nodes:
        for place, option in enumerate(node.options):
            sums[node.decision][place] += getattr(option, name)
    return sum(map(min, sums.values()))


def least_peak(choices: AnyChoices, *, below: float = math.inf, time_limit: float | None = None) -> Least | None:
    """Return the choice with the least peak; None if there is none, or none that needs less than `below`.

    Args:
        choices: What can be chosen; their room does not count.
        below: Bytes that others need.
        time_limit: Seconds after which the least so far is returned with a bound.

    Raises:
        TimeoutError: If none was found in time.
    """
    if isinstance(choices, Choices):
        return _together(choices, below, time_limit)
    if choices.pieces[-1] + 1 < choices.stages:
        return None
    return _in_stages(choices, below, time_limit)


def _together(choices: Choices, below: float, time_limit: float | None) -> Least | None:
    unit = low_peak(choices) or 1.0
    program = Program(replace(choices, links=_forbidden_pairs(choices.links)), 1.0)
    add_memory(program, choices, unit, program.column(1.0))
    answer = program.solved(time_limit=time_limit, below=below / unit)
    if answer is None:
        return None
    pick = program.pick(answer.values)
    peak = choices.peak(pick)
    return Least(pick=pick, peak=peak, bound=min(peak, answer.bound * unit))


def _in_stages(choices: StagedChoices, below: float, time_limit: float | None) -> Least | None:
    only = _without_times(choices)
    smaller = merged(only)
    if smaller is None:
        return _by_program(only, below, time_limit)
    if not all(smaller.picks.values()):
        return None
    few = math.prod(smaller.choices.decisions.values()) <= _MOST_PICKS
    if few and choices.virtual == 1:
        least = _by_trying(smaller.choices, below, time_limit)
    else:
        least = _by_program(smaller.choices, below, time_limit)
    return None if least is None else replace(least, pick=smaller.original(least.pick))


def _without_times(choices: StagedChoices) -> StagedChoices:
    """Return the same choices of which all take the same time, with a room that leaves nothing out."""
    nodes = tuple(
        Node(name=node.name, decision=node.decision, options=tuple(map(_without_time, node.options)))
        for node in choices.nodes
    )
    most = sum(o.held + choices.micro_batches * (o.kept + o.owed) + o.working for n in nodes for o in n.options)
    links = _forbidden_pairs(choices.links)
    return replace(choices, nodes=nodes, links=links, sends=(0.0,) * len(choices.sends), room=most or 1.0)


def _without_time(option: Option) -> Option:
    return Option(label=option.label, held=option.held, kept=option.kept, owed=option.owed, working=option.working)


def _forbidden_pairs(links: Sequence[Link]) -> tuple[Link, ...]:
    pairs = ({pair: s for pair, s in link.seconds.items() if s == math.inf} for link in links)
    return tuple(replace(link, seconds=never) for link, never in zip(links, pairs, strict=True) if never)


def _by_program(choices: StagedChoices, below: float, time_limit: float | None) -> Least | None:
    unit = low_peak(choices) or 1.0
    made = StagedProgram(choices, goal_bytes=unit)
    answer = made.program.solved(time_limit=time_limit, below=below / unit)
    if answer is None:
        return None
    pick, stages = made.program.pick(answer.values), made.stages(answer.values)
    peak = max(choices.peaks(pick, stages))
    return Least(pick=pick, peak=peak, bound=min(peak, answer.bound * unit), stages=stages)


def _by_trying(choices: StagedChoices, below: float, time_limit: float | None) -> Least | None:
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    costs, names = _costs(choices), list(choices.decisions)
    best: Least | None = None
    for places in itertools.product(*(range(count) for count in choices.decisions.values())):
        pick = dict(zip(names, places, strict=True))
        if not _is_allowed(choices, pick):
            continue
        if time.monotonic() > stop:
            if best is None:
                raise TimeoutError("no choice was found in time")
            return replace(best, bound=min(best.peak, low_peak(choices)))
        peak, stages = _best_cut(choices, [costs[one] for one in pick.items()], below)
        if peak < below:
            below = peak
            best = Least(pick=pick, peak=peak, bound=peak, stages=stages)
    return best


def _is_allowed(choices: StagedChoices, pick: Mapping[str, int]) -> bool:
    if choices.needed and choices.needed.isdisjoint(pick.items()):
        return False
    linked = (link.seconds.get((pick[link.first], pick[link.second]), 0.0) for link in choices.links)
    return math.inf not in linked and not any(one <= pick.items() for one in choices.forbidden)


def _costs(choices: StagedChoices) -> dict[tuple[str, int], Floats]:
    """Return what each option holds, keeps, owes and needs while it runs, by piece."""
    count = choices.pieces[-1] + 1
    costs = {(name, o): np.zeros((4, count)) for name, size in choices.decisions.items() for o in range(size)}
    for node, piece in zip(choices.nodes, choices.pieces, strict=True):
        for o, option in enumerate(node.options):
            cost = costs[node.decision, o]
            cost[:3, piece] += option.held, option.kept, option.owed
            cost[3, piece] = max(cost[3, piece], option.working)
    return costs


def _best_cut(choices: StagedChoices, picked: list[Floats], below: float) -> tuple[float, tuple[int, ...]]:
    """Return the least peak over cuts of one pick, one stage a rank, and the stage of every piece."""
    sums = np.sum([one[:3] for one in picked], axis=0)
    working = _most_between(np.max([one[3] for one in picked], axis=0))
    until = np.concatenate([np.zeros((3, 1)), np.cumsum(sums, axis=1)], axis=1)
    between = until[:, None, :] - until[:, :, None]  # by what, first piece and end
    count = sums.shape[1]
    best, came = np.full(count + 1, math.inf), list[NDArray[np.int64]]()
    best[0] = 0.0
    for stage in range(choices.stages):
        held, kept, owed = between
        peaks = held + choices.in_flight(stage) * kept + choices.in_debt(stage) * owed + working
        reached = np.maximum(best[:, None], peaks)
        came.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
        if best.min() >= below:
            return math.inf, ()
    return float(best[-1]), _stages(came, count)


def _most_between(values: Floats) -> Floats:
    """Return the largest value of the pieces from each to each end; infinity where there is none."""
    count = len(values)
    most = np.full((count + 1, count + 1), math.inf)
    for start in range(count):
        most[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return most


def _stages(came: list[NDArray[np.int64]], count: int) -> tuple[int, ...]:
    """Return the stage of every piece from where each stage begins, by its end."""
    found, end = [0] * count, count
    for stage in reversed(range(len(came))):
        start = int(came[stage][end])
        found[start:end] = [stage] * (end - start)
        end = start
    return tuple(found)


def most_held(choices: AnyChoices, least: Least) -> Held:
    """Return what the fullest rank holds most of, where it is fullest."""
    fullest = _fullest(choices, least) if isinstance(choices, Choices) else _fullest_in_stages(choices, least)
    parts = dict(zip(get_args(Held), fullest, strict=True))
    return max(parts, key=lambda name: parts[name])


def _fullest(choices: Choices, least: Least) -> tuple[float, float, float]:
    options = choices.picked(least.pick)
    kept = list(itertools.accumulate(one.kept for one in options))
    place = max(range(len(options)), key=lambda i: kept[i] + options[i].working)
    return sum(one.held for one in options), kept[place], options[place].working


def _fullest_in_stages(choices: StagedChoices, least: Least) -> tuple[float, float, float]:
    peaks = choices.peaks(least.pick, least.stages)
    rank, held, kept, working = peaks.index(max(peaks)), 0.0, 0.0, 0.0
    for node, piece in zip(choices.nodes, choices.pieces, strict=True):
        one, stage = node.options[least.pick[node.decision]], least.stages[piece]
        if stage % choices.ranks == rank:
            held += one.held
            kept += choices.in_flight(stage) * one.kept + choices.in_debt(stage) * one.owed
            working = max(working, one.working)
    return held, kept, working

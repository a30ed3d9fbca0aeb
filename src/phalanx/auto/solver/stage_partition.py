"""`find_best_partition`: find the fastest stage boundaries and strategies by enumeration, for small problems.

Picks are taken in the order of what they take at least. Of one pick, the cuts are tried in which no rank works more
than a little over its share, then more: a cut that is left out has a rank that works longer, which says what it takes
at least. Where there are few cuts all are tried, and where many equal pieces follow each other
`auto/solver/uniform_chain` finds the best.

With several stages a rank, the schedule is computed for cuts that may be the best by the formula, which bounds all
others. Where these are too many, the best of some is improved piece by piece, and the bound is that of the formula.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.solver.cut_moves import even_cut, list_neighbours
from phalanx.auto.solver.in_flight import least_in_flight
from phalanx.auto.solver.interleaved import StageTimes
from phalanx.auto.solver.problem import ROUNDING, Solution, StepProblem, StrategyCost
from phalanx.auto.solver.uniform_chain import ChainCosts, Stages, UniformChain, find_equal_pieces

_MOST_PICKS = 100_000
_MOST_CUTS = 50_000
"""Cuts of one pick that are tried at once."""

_ALL_CUTS = 4_000
"""Cuts that are all tried, without looking for the best of them."""

_OVER = (1.001, *(1.005**step for step in range(1, 70)), 2.0, 4.0, math.inf)
"""Work of the rank that works the most, over what one has to at least."""

_CUTS_AT_ONCE = 256
"""Cuts whose schedules are computed at once, the fastest by the formula first."""

_BEAM = 20_000
"""Partitions that are kept where there are too many, of all kinds."""

_CLOSE = 0.005
"""How far from its bound the best of these may be."""

_Cut: TypeAlias = tuple[float, Stages]
"""Seconds of a step, infinity if it does not fit, and the stage of every piece."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TooManyError(Exception):
    """There are more picks or cuts than are sooner tried than solved."""


def find_best_partition(problem: StepProblem, below: float, time_limit: float | None = None) -> Solution | None:
    """Return the fastest choice that fits; None if none is faster than `below`.

    Where there are too many cuts to try, the one that is returned is within 0.5 % of the fastest with one stage a rank.
    With several it may be further away. Its bound says how far, and it may be slower than `below` where the bound is
    not.

    Args:
        problem: What can be chosen.
        below: Seconds that others have reached.
        time_limit: Seconds after which the best so far is returned with a bound.

    Raises:
        TooManyError: If it is better left to a program.
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    if math.prod(problem.decisions.values()) > _MOST_PICKS:
        raise TooManyError
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    search, names = _PartitionSearch(problem), list(problem.decisions)
    picks = np.indices(tuple(problem.decisions.values())).reshape(len(names), -1)
    least = search.least_s(picks)
    best, solution = below, None
    bound = math.inf
    for number in np.argsort(least, kind="stable"):
        if least[number] >= best:
            break
        if time.monotonic() > stop:
            if solution is None:
                raise TimeoutError("no choice was found in time")
            bound = min(bound, float(least[number]))
            break
        pick = dict(zip(names, map(int, picks[:, number]), strict=True))
        seconds, stages, low = search.best_of(pick, float(least[number]), best)
        bound = min(bound, low)
        # The fastest is returned if its bound is below the mark, even if its time is not: others of its cuts may be.
        if low < best and seconds < (math.inf if solution is None else solution.seconds):
            solution = Solution(pick=pick, seconds=seconds, bound=seconds, stage_of=stages)
            best = min(best, seconds)
    if solution is None:
        if bound < below:
            raise TooManyError  # none of the cuts that were tried fits, and others may
        return None
    return replace(solution, bound=min(bound, solution.seconds))


class _PartitionSearch:
    def __init__(self, problem: StepProblem) -> None:
        self._problem = problem
        self._count = count = problem.piece_count
        self._all: Ints | None = None
        self._costs: dict[tuple[str, int], ChainCosts] = {}
        self._fills = {name: np.zeros((3, size)) for name, size in problem.decisions.items()}
        for node, piece in zip(problem.nodes, problem.pieces, strict=True):
            for o, option in enumerate(node.options):
                new = ChainCosts(np.zeros((6, count)), np.zeros((2, count)))
                sums, largest = self._costs.setdefault((node.decision, o), new)
                sums[:, piece] += _sums(option)
                self._fills[node.decision][:, o] += option.fills_s
                largest[:, piece] = np.maximum(largest[:, piece], (option.workspace_bytes, option.update_bytes))
        self._sends = np.array(problem.sends, dtype=np.float64)
        self._border_bytes = np.array(problem.border_bytes, dtype=np.float64)
        self._passes = problem.micro_batches - 1 / problem.virtual
        borders = list(zip(problem.sends, problem.border_bytes, strict=True))
        equal = find_equal_pieces(list(self._costs.values()), borders)
        are_few = math.comb(count - 1, problem.stages - 1) <= _ALL_CUTS
        # With several stages a rank it matters which of them has a piece.
        is_counted = UniformChain.is_for(problem, equal) and not (are_few and problem.virtual > 1)
        self._chains: list[UniformChain] = []
        if is_counted:
            # With several stages a rank, what it keeps depends on which of them has a piece. The first chain never
            # takes it for more than it is, for the bound; the second is right where stages have equal numbers.
            moments = problem.in_flight.reshape(-1, problem.virtual, problem.ranks)
            fullest = np.tile(moments.mean(axis=1).max(axis=0), problem.virtual)
            least = least_in_flight(problem.in_flight, problem.ranks)
            is_exact = problem.virtual == 1 or problem.room == math.inf
            self._chains = [
                UniformChain(problem, equal, counts) for counts in ([least] if is_exact else [least, fullest])
            ]
        if not self._chains and are_few:
            cuts = list(itertools.combinations(range(1, count), problem.stages - 1))
            self._all = np.array([(0, *cut, count) for cut in cuts], dtype=np.int64)

    def least_s(self, picks: Ints) -> Floats:
        """Return seconds that each pick takes at least; infinity for those forbidden.

        Some rank works as long as an even share, and as the longest piece, at least; so with what comes after it.

        Args:
            picks: Place of the option by decision and pick.
        """
        problem, row_of = self._problem, {name: row for row, name in enumerate(self._problem.decisions)}
        least_s: Floats = np.zeros(picks.shape[1])
        work: Floats = np.zeros((picks.shape[1], self._count))
        after = work.copy()
        for name, size in problem.decisions.items():
            sums = np.array([self._costs[name, o].sums for o in range(size)])
            work += sums[picks[row_of[name]], 0]
            after += sums[picks[row_of[name]], 1]
        most = self._least_most(work)
        idle = (work.sum(axis=1) - most) / problem.virtual
        if problem.zero_bubble:
            fills = sum(self._fills[name][:, picks[row]] for name, row in row_of.items())
            idle -= (1 - 1 / problem.ranks) * np.min(fills, axis=0)
        least_s += self._least_most(after) + problem.micro_batches * most + np.maximum(idle, 0.0)
        for transition in problem.transitions:
            table = np.zeros((problem.decisions[transition.first], problem.decisions[transition.second]))
            for pair, seconds in transition.seconds.items():
                table[pair] = seconds
            least_s += table[picks[row_of[transition.first]], picks[row_of[transition.second]]]
        for combination in problem.forbidden:
            least_s[np.all([picks[row_of[name]] == o for name, o in combination], axis=0)] = math.inf
        if problem.needed:
            least_s[~np.any([picks[row_of[name]] == o for name, o in problem.needed], axis=0)] = math.inf
        return least_s * (1 - 1e-12)  # what rounding may add

    def best_of(self, pick: Mapping[str, int], least: float, below: float) -> tuple[float, Stages, float]:
        """Return the least seconds of a pick, the stage of every piece, and seconds that none of its cuts is below.

        Args:
            pick: Place of the option by decision.
            least: Seconds that it takes at least.
            below: What others take: slower cuts need not be found.

        Raises:
            TooManyError: If the best that was found may be far from the best, with one stage a rank; with several, if
                none was found that fits.
        """
        sums = np.asarray(sum(self._costs[entry].sums for entry in pick.items()))
        if self._chains:
            return self._best_of_chain(pick, ChainCosts(sums, self._largest_bytes(pick)), least, below)
        if self._all is not None:
            seconds, stages = self._best_among(self._all, pick, sums, below)
            return seconds, stages, min(seconds, below)
        best: _Cut = math.inf, ()
        is_interleaved = self._problem.virtual > 1
        if is_interleaved:
            best = self._improve(best, pick, sums)
        most, left_out, is_all = float(self._least_most(sums[:1])[0]), least, True
        for over in _OVER:
            bounds, has_all = self._bounds(sums[0], most * over)
            is_all = is_all and has_all
            best = min(best, self._best_among(bounds, pick, sums, min(best[0], below if is_all else math.inf)))
            # A cut that is left out has a rank with more work than that.
            longer = least + self._passes * most * (over - 1) if over < math.inf else math.inf
            if is_all:
                left_out = longer
            elif best[1] and (is_interleaved or best[0] <= left_out * (1 + _CLOSE)):
                return *best, min(best[0], left_out)
            elif longer > left_out * (1 + _CLOSE):
                raise TooManyError
            if left_out >= min(best[0], below):
                break
        return *best, min(best[0], below)

    def _least_most(self, work: Floats) -> Floats:
        """Return the work of the rank that works the most, at least, from that of pieces in rows."""
        return np.asarray(np.maximum(work.sum(axis=1) / self._problem.ranks, work.max(axis=1)))

    def _bounds(self, work: Floats, most: float) -> tuple[Ints, bool]:
        """Return where stages begin, and the last ends, in cuts in which no rank works more than `most`; if in all."""
        problem, count = self._problem, self._count
        until = np.concatenate([[0.0], np.cumsum(work)])
        bounds: Ints = np.zeros((1, 1), dtype=np.int64)
        load: Floats = np.zeros((1, problem.ranks))
        is_all = True
        for stage in range(problem.stages):
            left, rank = problem.stages - 1 - stage, stage % problem.ranks
            ends = np.arange(1, count - left + 1) if left else np.array([count])
            starts = bounds[:, -1:]
            own = load[:, rank : rank + 1] + until[ends] - until[starts]
            # What is left must go to ranks with stages to come; those of this turn and before have theirs.
            room = most - load
            room[:, rank] = 0.0
            later = sorted({other % problem.ranks for other in range(stage + 1, problem.stages)})
            free = room[:, [other for other in later if other != rank]].sum(axis=1, keepdims=True)
            free = free + (most - own if rank in later else 0.0)
            slack = most * 1e-9 if most < math.inf else 0.0
            good = (ends > starts) & (own <= most + slack) & (until[count] - until[ends] <= free + slack)
            state, end = np.nonzero(good)
            if len(state) > _MOST_CUTS:
                chosen = np.linspace(0, len(state) - 1, _BEAM).astype(np.int64)
                state, end, is_all = state[chosen], end[chosen], False
            load = load[state]
            load[:, rank] = own[state, end]
            bounds = np.concatenate([bounds[state], ends[end][:, None]], axis=1)
        return bounds, is_all

    def _best_among(self, bounds: Ints, pick: Mapping[str, int], sums: Floats, below: float) -> _Cut:
        """Return the least seconds over cuts, and the stage of every piece in the best; infinity if none fits.

        Cuts that take `below` or longer need not be found.
        """
        if not len(bounds):
            return math.inf, ()
        problem = self._problem
        self._starts, self._ends = bounds[:, :-1], bounds[:, 1:]
        work, after, persistent, activation, deferred, forward = (self._by_stage(values) for values in sums)
        times = StageTimes(forward, work - forward, self._sends[self._starts[:, 1:] - 1], after)
        seconds = problem.formula_s(times, problem.saved(pick))
        if problem.room < math.inf:
            arriving = self._border_bytes[self._starts[:, 1:] - 1]
            persistent[:, :-1] += arriving
            persistent[:, 1:] += arriving
            in_debt = np.array([problem.in_debt(stage) for stage in range(problem.stages)])
            workspace, update = map(self._most_by_rank, self._largest_bytes(pick))
            passing = problem.by_rank(in_debt * deferred) + problem.most_in_flight(activation)
            peaks = problem.by_rank(persistent) + np.maximum(passing + workspace, update)
            seconds[peaks.max(axis=1) > problem.room * (1 + ROUNDING)] = math.inf
        if problem.virtual > 1:
            seconds = self._interleaved_s(seconds, times, below - problem.transition_s(pick))
        chosen = int(seconds.argmin())
        if seconds[chosen] == math.inf:
            return math.inf, ()
        starts = self._starts[chosen]
        stages = tuple(int((starts <= piece).sum()) - 1 for piece in range(self._count))
        return self._check_seconds(pick, stages), stages

    def _largest_bytes(self, pick: Mapping[str, int]) -> Floats:
        """Return `ChainCosts.largest_bytes` of a pick."""
        return np.asarray(np.maximum.reduce([self._costs[entry].largest_bytes for entry in pick.items()]))

    def _best_of_chain(
        self, pick: Mapping[str, int], costs: ChainCosts, least: float, below: float
    ) -> tuple[float, Stages, float]:
        """See `best_of`."""
        linked, saved, border = self._problem.transition_s(pick), self._problem.saved(pick), self._problem.stages + 1

        def price(cuts: list[Stages], mark: float) -> _Cut:
            bounds = np.array([np.searchsorted(stages, np.arange(border)) for stages in cuts])
            seconds, stages = self._best_among(bounds, pick, costs.sums, mark + linked)
            return seconds - linked, stages

        # With one stage a rank the first price is the least of all, or close to it.
        at_once = _CUTS_AT_ONCE if self._problem.virtual > 1 else 1
        formula_s, stages = self._chains[0].best_of(costs, saved, below - linked, price, at_once)
        best, bound = (self._check_seconds(pick, stages), stages), formula_s + linked
        if formula_s >= below - linked:
            return math.inf, (), below
        for chain in self._chains[1:]:
            if best[0] > bound * (1 + _CLOSE):
                _, stages = chain.best_of(costs, saved, below - linked, price, at_once)
                best = min(best, (self._check_seconds(pick, stages), stages))
        if self._problem.virtual > 1 and best[0] > bound:
            best = self._improve(best, pick, costs.sums)
        mark = min(best[0], below)
        if bound * (1 + _CLOSE) < mark:
            # The formula is far below the schedule. A rank of a faster cut works no longer than that.
            most = float(self._least_most(costs.sums[:1])[0]) + (mark - least) / self._passes
            bounds, has_all = self._bounds(costs.sums[0], most)
            if has_all or best[0] == math.inf:
                best = min(best, self._best_among(bounds, pick, costs.sums, mark))
            if has_all:
                bound = mark
        return *best, min(best[0], bound)

    def _improve(self, best: _Cut, pick: Mapping[str, int], sums: Floats) -> _Cut:
        """Return a cut from which no piece can be moved from one stage to another to advantage."""
        better = self._best_among(even_cut(sums[0], self._problem.stages)[None], pick, sums, best[0])
        best = min(best, better)
        while best[1]:
            cut = np.searchsorted(best[1], np.arange(self._problem.stages + 1))
            better = self._best_among(list_neighbours(cut), pick, sums, best[0])
            if better[0] >= best[0]:
                break
            best = better
        return best

    def _interleaved_s(self, formula_s: Floats, times: StageTimes, below: float) -> Floats:
        """Return the seconds of cuts of several stages a rank; infinity for cuts that cannot be the fastest."""
        seconds: Floats = np.full(len(formula_s), math.inf)
        order = np.argsort(formula_s, kind="stable")
        for start in range(0, len(order), _CUTS_AT_ONCE):
            some = order[start : start + _CUTS_AT_ONCE]
            some = some[formula_s[some] < below]
            if not len(some):
                break
            schedule_s = self._problem.schedule_s(StageTimes(*(values[some] for values in times)))
            seconds[some] = np.maximum(formula_s[some], schedule_s)
            below = min(below, float(seconds[some].min()))
        return seconds

    def _check_seconds(self, pick: Mapping[str, int], stages: Stages) -> float:
        """Return seconds as the choices say them: sums in another order are not the same to the last digit."""
        return self._problem.seconds(pick, stages) if stages and self._problem.fits(pick, stages) else math.inf

    def _by_stage(self, values: Floats) -> Floats:
        until = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(until[self._ends] - until[self._starts])

    def _most_by_rank(self, values: Floats) -> Floats:
        """Return the largest value of any piece of each rank."""
        most = np.zeros((self._count + 1, self._count + 1))
        for start in range(self._count):
            most[start, start + 1 :] = np.maximum.accumulate(values[start:])
        largest = most[self._starts, self._ends]
        return np.asarray(largest.reshape(len(largest), self._problem.virtual, self._problem.ranks).max(axis=1))


def _sums(option: StrategyCost) -> tuple[float, ...]:
    work, after = option.forward_s + option.backward_s, option.grad_sync_s + option.update_s
    return work, after, option.persistent_bytes, option.activation_bytes, option.deferred_bytes, option.forward_s

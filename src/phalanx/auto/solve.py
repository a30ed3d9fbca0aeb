"""The best of all choices of a step by mixed-integer programming, with a bound on what any choice can reach (pure).

Every option is a binary variable, every pair of a link a continuous one whose sums are those of its options (the tight
form of L. Zheng et al., "Alpa", OSDI 2022, section 4). The larger of several ends is one variable that all of them
bound from below. HiGHS solves it (Q. Huangfu and J. Hall, Math. Prog. Comp. 10, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from phalanx.auto.choices import Choices

if TYPE_CHECKING:
    import highspy

_TOLERANCE = 1e-9
"""How far HiGHS may miss a row, of rows scaled to about 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The best choice found."""

    pick: dict[str, int]
    """Place of the option by decision."""

    seconds: float
    bound: float
    """Seconds that no choice beats."""


def solve(choices: Choices, *, time_limit: float | None = None, below: float = math.inf) -> Solved | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        choices: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound; None if there is none so far.
        below: Seconds that others have reached: slower choices are of no interest.
    """
    import highspy  # 0.1 s that only a planner waits for

    program = _Program(choices)
    while True:
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        for name in ("mip_feasibility_tolerance", "primal_feasibility_tolerance"):
            solver.setOptionValue(name, _TOLERANCE)
        solver.setOptionValue("presolve", "off")  # versions 1.12 to 1.15 of HiGHS end with a segmentation fault there
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        if time_limit is not None:
            solver.setOptionValue("time_limit", time_limit)
        if below < math.inf:
            solver.setOptionValue("objective_bound", (below - choices.fixed_s) / program.second)
        solver.passModel(program.model())
        solver.run()
        info, values = solver.getInfo(), solver.getSolution().col_value
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        pick = program.pick(values)
        if choices.fits(pick):
            seconds = choices.seconds(pick)
            bound = min(choices.fixed_s + info.mip_dual_bound * program.second, seconds)
            return Solved(pick=pick, seconds=seconds, bound=bound) if seconds < below else None
        program.forbid(pick)  # within the solver's tolerance of the room, and over it


@dataclass
class _Rows:
    """Rows of a linear program, as they are added."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        summed: dict[int, float] = {}
        for column, value in terms:
            summed[column] = summed.get(column, 0.0) + value
        self.columns += summed
        self.values += summed.values()
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


class _Program:
    """The choices as columns and rows, in units near 1."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        first = {name: choices.decisions[name] for name in choices.decisions}
        starts = np.cumsum([0, *first.values()])
        self._start = dict(zip(first, (int(s) for s in starts), strict=False))
        self._binaries = int(starts[-1])
        self._cost: list[float] = [0.0] * self._binaries
        self._rows = _Rows()
        self.second = _scale(
            option.forward_s + option.backward_s + option.exchange_s + option.update_s
            for node in choices.nodes
            for option in node.options
        )
        """Seconds of one unit of the objective."""
        for name, count in choices.decisions.items():
            self._rows.add(((self._start[name] + o, 1.0) for o in range(count)), 1.0, 1.0)
        if choices.needed:
            self._rows.add(((self._start[name] + o, 1.0) for name, o in choices.needed), 1.0, math.inf)
        for one in choices.forbidden:
            self.forbid(dict(one))
        self._add_links()
        self._add_times()
        self._add_memory()

    def pick(self, values: list[float]) -> dict[str, int]:
        """Return the options that are on."""
        return {
            name: max(range(count), key=lambda o: values[self._start[name] + o])
            for name, count in self._choices.decisions.items()
        }

    def forbid(self, pick: dict[str, int]) -> None:
        """Take one pick out of the program."""
        self._rows.add(((self._start[name] + o, 1.0) for name, o in pick.items()), -math.inf, len(pick) - 1.0)

    def model(self) -> highspy.HighsLp:
        """Return the program as HiGHS takes it."""
        import highspy

        lp, count = highspy.HighsLp(), len(self._cost)
        lp.num_col_, lp.num_row_ = count, len(self._rows.lower)
        lp.col_cost_ = np.array(self._cost)
        lp.col_lower_ = np.zeros(count)
        lp.col_upper_ = np.array([1.0] * self._binaries + [math.inf] * (count - self._binaries))
        lp.row_lower_, lp.row_upper_ = np.array(self._rows.lower), np.array(self._rows.upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._rows.starts)
        lp.a_matrix_.index_ = np.array(self._rows.columns)
        lp.a_matrix_.value_ = np.array(self._rows.values)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger] * self._binaries + [kinds.kContinuous] * (count - self._binaries)
        return lp

    def _column(self, cost: float) -> int:
        self._cost.append(cost)
        return len(self._cost) - 1

    def _add_links(self) -> None:
        decisions = self._choices.decisions
        for link in self._choices.links:
            pairs: dict[tuple[int, int], int] = {}
            for one in range(decisions[link.first]):
                for two in range(decisions[link.second]):
                    seconds = link.seconds.get((one, two), 0.0)
                    if seconds < math.inf:
                        pairs[one, two] = self._column(seconds / self.second)
            for place, name in enumerate((link.first, link.second)):
                for option in range(decisions[name]):
                    sums = [(column, 1.0) for pair, column in pairs.items() if pair[place] == option]
                    self._rows.add([*sums, (self._start[name] + option, -1.0)], 0.0, 0.0)

    def _add_times(self) -> None:
        choices, contention = self._choices, self._choices.contention
        end = self._column(1.0 - contention)
        terms: list[list[tuple[int, float]]] = [[(end, 1.0)] for _ in (*choices.nodes, None)]
        for place, node in enumerate(choices.nodes):
            for o, option in enumerate(node.options):
                column = self._start[node.decision] + o
                backward, exchange = option.backward_s / self.second, option.exchange_s / self.second
                alone = (option.forward_s + option.update_s) / self.second
                self._cost[column] += alone + contention * (backward + exchange)
                for other in range(len(terms)):
                    is_last = other == len(choices.nodes)  # all backward passes, and no exchange
                    if backward and (is_last or place >= other):
                        terms[other].append((column, -backward))
                    if exchange and not is_last and place <= other:
                        terms[other].append((column, -exchange))
        for row in terms:
            self._rows.add(row, 0.0, math.inf)

    def _add_memory(self) -> None:
        choices = self._choices
        if choices.room == math.inf:
            return
        for place in range(len(choices.nodes)):
            terms = []
            for other, node in enumerate(choices.nodes):
                for o, option in enumerate(node.options):
                    needed = option.held + (option.kept if other <= place else 0.0)
                    needed += option.working if other == place else 0.0
                    terms.append((self._start[node.decision] + o, needed / choices.room))
            self._rows.add(terms, -math.inf, 1.0)


def _scale(values: Iterable[float]) -> float:
    return max(values, default=0.0) or 1.0

"""`Program`: mixed-integer linear programs solved with HiGHS (pure).

Every option is a binary variable, every pair of a link a continuous one whose sums are those of its options (the tight
form of L. Zheng et al., "Alpa", OSDI 2022, section 4). Solver: Q. Huangfu and J. Hall, Math. Prog. Comp. 10, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import highspy

    from phalanx.auto.solver.problem import StepProblem, TransitionCost

_TOLERANCE = 1e-9
"""How far HiGHS may miss a row, of rows scaled to about 1."""

Term = tuple[int, float]
"""Number of a column, and its coefficient."""


@dataclass(frozen=True, slots=True)
class ProgramSolution:
    """What a solver says: values of all columns, and what no values reach."""

    values: Sequence[float]
    bound: float
    is_proved: bool
    """Whether no values are better; else time was over."""


class Program:
    """Columns and rows, in units near 1. Columns of options come first."""

    def __init__(self, problem: StepProblem, second: float) -> None:
        """Add what all choices have in common.

        Args:
            problem: What can be chosen.
            second: Seconds of one unit of the objective.
        """
        self.second = second
        self._decisions = problem.decisions
        self._start: dict[str, int] = {}
        self._cost: list[float] = []
        self._is_whole: list[bool] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._starts = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        for name, count in self._decisions.items():
            self._start[name] = self.add_binaries(count)
            self.add_row(((self.option(name, o), 1.0) for o in range(count)), 1.0, 1.0)
        if problem.needed:
            self.add_row(((self.option(*combination), 1.0) for combination in problem.needed), 1.0, math.inf)
        for combination in problem.forbidden:
            self.forbid(dict(combination))
        for transition in problem.transitions:
            self._add_link(transition)

    def __len__(self) -> int:
        """Return the number of columns so far."""
        return len(self._cost)

    def option(self, decision: str, index: int) -> int:
        """Return the column of an option."""
        return self._start[decision] + index

    def add_binaries(self, count: int) -> int:
        """Add columns that are 0 or 1; return the first."""
        first = len(self._cost)
        self._cost += [0.0] * count
        self._is_whole += [True] * count
        return first

    def add_column(self, cost: float = 0.0) -> int:
        """Add a column of any value from 0 up, with its cost in units; return it."""
        self._cost.append(cost)
        self._is_whole.append(False)
        return len(self._cost) - 1

    def add_cost(self, column: int, cost: float) -> None:
        """Add to the cost of a column, in units."""
        self._cost[column] += cost

    def add_row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        """Add a row; terms of one column are added up, and those of 0 left out."""
        summed: dict[int, float] = {}
        for column, value in terms:
            if value:
                summed[column] = summed.get(column, 0.0) + value
        self._columns += summed
        self._values += summed.values()
        self._starts.append(len(self._columns))
        self._lower.append(lower)
        self._upper.append(upper)

    def forbid(self, pick: Mapping[str, int]) -> None:
        """Take one set of options out of the program."""
        self.add_row(((self.option(name, o), 1.0) for name, o in pick.items()), -math.inf, len(pick) - 1.0)

    def pick(self, values: Sequence[float]) -> dict[str, int]:
        """Return the options that are on."""
        return {
            name: max(range(count), key=lambda o: values[self.option(name, o)])
            for name, count in self._decisions.items()
        }

    def solve(self, *, time_limit: float | None, below: float) -> ProgramSolution | None:
        """Return the best values; None if there are none, or none of less cost than `below`, in units.

        Raises:
            TimeoutError: If there are none so far.
        """
        import highspy  # 0.1 s that only a planner waits for

        # Its binding alone: from 1.16 on, Highs() prints a banner before output_flag can be set.
        solver: Any = highspy.Highs.mro()[1]()
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "mip_feasibility_tolerance": _TOLERANCE,
            "primal_feasibility_tolerance": _TOLERANCE,
            "presolve": "off",  # versions 1.12 to 1.15 of HiGHS end with a segmentation fault there
            "mip_rel_gap": 0.0,
            "threads": 1,
            "random_seed": 0,
        }
        if time_limit is not None:
            options["time_limit"] = max(0.0, time_limit)
        if below < math.inf:
            options["objective_bound"] = below
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model())
        solver.run()
        info, is_late = solver.getInfo(), solver.getModelStatus() == highspy.HighsModelStatus.kTimeLimit
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            if is_late:
                raise TimeoutError("no values were found in time")
            return None
        return ProgramSolution(solver.getSolution().col_value, info.mip_dual_bound, not is_late)

    def _add_link(self, transition: TransitionCost) -> None:
        pairs: dict[tuple[int, int], int] = {}
        names = (transition.first, transition.second)
        for i in range(self._decisions[transition.first]):
            for j in range(self._decisions[transition.second]):
                seconds = transition.seconds.get((i, j), 0.0)
                if seconds < math.inf:
                    pairs[i, j] = self.add_column(seconds / self.second)
        for end, name in enumerate(names):
            for option in range(self._decisions[name]):
                sums = [(column, 1.0) for pair, column in pairs.items() if pair[end] == option]
                self.add_row([*sums, (self.option(name, option), -1.0)], 0.0, 0.0)

    def _model(self) -> highspy.HighsLp:
        import highspy

        lp, count = highspy.HighsLp(), len(self._cost)
        kinds = highspy.HighsVarType
        lp.num_col_, lp.num_row_ = count, len(self._lower)
        lp.col_cost_ = np.array(self._cost)
        lp.col_lower_ = np.zeros(count)
        lp.col_upper_ = np.array([1.0 if is_whole else math.inf for is_whole in self._is_whole])
        lp.row_lower_, lp.row_upper_ = np.array(self._lower), np.array(self._upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts)
        lp.a_matrix_.index_ = np.array(self._columns)
        lp.a_matrix_.value_ = np.array(self._values)
        lp.integrality_ = [kinds.kInteger if is_whole else kinds.kContinuous for is_whole in self._is_whole]
        return lp

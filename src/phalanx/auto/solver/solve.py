"""The best of all choices of a step, with a bound on what any choice can reach (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phalanx.auto.solver.milp import Program, Term
from phalanx.auto.solver.problem import IntraStageProblem, LayerNode


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The best pick so far."""

    pick: Mapping[str, int]
    """Place of the option by decision."""

    seconds: float
    bound: float
    """Seconds that no choice beats."""

    stages: tuple[int, ...] = field(default=())
    """Stage of every piece of a model that is cut into stages."""


def solve(problem: IntraStageProblem, *, time_limit: float | None = None, below: float = math.inf) -> Solution | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        problem: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound.
        below: Seconds that others have reached: slower choices are of no interest.

    Raises:
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    program = Program(problem, time_unit(problem.nodes))
    _add_times(program, problem)
    if problem.room < math.inf:
        add_memory(program, problem, problem.room)
    while True:
        answer = program.solve(time_limit=time_limit, below=(below - problem.fixed_s) / program.second)
        if answer is None:
            return None
        pick = program.pick(answer.values)
        if problem.fits(pick):
            seconds = problem.seconds(pick)
            bound = min(problem.fixed_s + answer.bound * program.second, seconds)
            return check_faster(Solution(pick=pick, seconds=seconds, bound=bound), below, is_proved=answer.is_proved)
        program.forbid(pick)  # within the solver's tolerance of the room, and over it


def check_faster(solution: Solution, below: float, *, is_proved: bool) -> Solution | None:
    """Return a solution if it is faster than `below`.

    Raises:
        TimeoutError: If it is not, and a better one may be.
    """
    if solution.seconds < below:
        return solution
    if not is_proved:
        raise TimeoutError("nothing faster was found in time")
    return None


def time_unit(nodes: tuple[LayerNode, ...]) -> float:
    """Return the seconds that a program counts in."""
    every = (option for node in nodes for option in node.options)
    return max((o.forward_s + o.backward_s + o.grad_sync_s + o.update_s for o in every), default=0.0) or 1.0


def _add_times(program: Program, problem: IntraStageProblem) -> None:
    """Add the ends of the backward pass, the largest of which is one column that all of them bound from below."""
    contention, nodes = problem.contention, problem.nodes
    end = program.add_column(1.0 - contention)
    backward, exchange = _Sums(len(program)), _Sums(len(program))
    for node in nodes:
        for o, option in enumerate(node.options):
            column = program.option(node.decision, o)
            program.add_cost(column, (option.forward_s + option.update_s) / program.second)
            program.add_cost(column, contention * (option.backward_s + option.grad_sync_s) / program.second)
            backward.add(column, option.backward_s / program.second)
    program.add_row([(end, 1.0), *backward.terms(-1.0)], 0.0, math.inf)  # all backward passes, and no exchange
    for node in nodes:
        for o, option in enumerate(node.options):
            exchange.add(program.option(node.decision, o), option.grad_sync_s / program.second)
        # A node without exchange ends no later than the one before it.
        if any(option.grad_sync_s for option in node.options):
            program.add_row([(end, 1.0), *backward.terms(-1.0), *exchange.terms(-1.0)], 0.0, math.inf)
        for o, option in enumerate(node.options):
            backward.add(program.option(node.decision, o), -option.backward_s / program.second)


class _Sums:
    """Coefficients of columns, which change from row to row."""

    def __init__(self, columns: int) -> None:
        self._values = [0.0] * columns

    def add(self, column: int, value: float) -> None:
        self._values[column] += value

    def terms(self, factor: float) -> Iterator[Term]:
        return ((column, factor * value) for column, value in enumerate(self._values) if value > _ROUNDING)


_ROUNDING = 1e-12
"""What differences of sums leave where they should be 0, in units near 1."""


def add_memory(program: Program, problem: IntraStageProblem, unit: float, most: int | None = None) -> None:
    """Add a row for each node that may be the one that needs the most.

    Of nodes of one decision that need the same while they run, that is the last: what is kept only grows.

    Args:
        program: What the rows are added to.
        problem: What can be chosen.
        unit: Bytes that a program counts in.
        most: The column that no row is above, in units; one unit when None.
    """
    limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
    needed = _Sums(len(program))
    for node in problem.nodes:
        for o, option in enumerate(node.options):
            needed.add(program.option(node.decision, o), option.persistent_bytes / unit)
    last = {
        (node.decision, tuple(o.workspace_bytes for o in node.options)): index
        for index, node in enumerate(problem.nodes)
    }
    for index, node in enumerate(problem.nodes):
        working = tuple(option.workspace_bytes for option in node.options)
        for o, option in enumerate(node.options):
            needed.add(program.option(node.decision, o), option.activation_bytes / unit)
        if last[node.decision, working] == index:
            own = [(program.option(node.decision, o), size / unit) for o, size in enumerate(working)]
            program.add_row([*needed.terms(1.0), *own, *limit], -math.inf, upper)

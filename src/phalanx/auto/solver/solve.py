"""The best of all choices of a step, with a bound on what any choice can reach (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phalanx.auto.solver.milp import Program, Term
from phalanx.auto.solver.problem import Choices, Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The best choice found."""

    pick: Mapping[str, int]
    """Place of the option by decision."""

    seconds: float
    bound: float
    """Seconds that no choice beats."""

    stages: tuple[int, ...] = field(default=())
    """Stage of every piece of a model that is cut into stages."""


def solve(choices: Choices, *, time_limit: float | None = None, below: float = math.inf) -> Solved | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        choices: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound.
        below: Seconds that others have reached: slower choices are of no interest.

    Raises:
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    program = Program(choices, unit_of(choices.nodes))
    _add_times(program, choices)
    if choices.room < math.inf:
        add_memory(program, choices, choices.room)
    while True:
        answer = program.solved(time_limit=time_limit, below=(below - choices.fixed_s) / program.second)
        if answer is None:
            return None
        pick = program.pick(answer.values)
        if choices.fits(pick):
            seconds = choices.seconds(pick)
            bound = min(choices.fixed_s + answer.bound * program.second, seconds)
            return faster(Solved(pick=pick, seconds=seconds, bound=bound), below, is_proved=answer.is_proved)
        program.forbid(pick)  # within the solver's tolerance of the room, and over it


def faster(found: Solved, below: float, *, is_proved: bool) -> Solved | None:
    """Return what was found if it is faster than `below`.

    Raises:
        TimeoutError: If it is not, and a better one may be.
    """
    if found.seconds < below:
        return found
    if not is_proved:
        raise TimeoutError("nothing faster was found in time")
    return None


def unit_of(nodes: tuple[Node, ...]) -> float:
    """Return the seconds that a program counts in."""
    every = (option for node in nodes for option in node.options)
    return max((o.forward_s + o.backward_s + o.exchange_s + o.update_s for o in every), default=0.0) or 1.0


def _add_times(program: Program, choices: Choices) -> None:
    """Add the ends of the backward pass, the largest of which is one column that all of them bound from below."""
    contention, nodes = choices.contention, choices.nodes
    end = program.column(1.0 - contention)
    backward, exchange = _Sums(len(program)), _Sums(len(program))
    for node in nodes:
        for o, option in enumerate(node.options):
            column = program.option(node.decision, o)
            program.add_cost(column, (option.forward_s + option.update_s) / program.second)
            program.add_cost(column, contention * (option.backward_s + option.exchange_s) / program.second)
            backward.add(column, option.backward_s / program.second)
    program.row([(end, 1.0), *backward.terms(-1.0)], 0.0, math.inf)  # all backward passes, and no exchange
    for node in nodes:
        for o, option in enumerate(node.options):
            exchange.add(program.option(node.decision, o), option.exchange_s / program.second)
        # A node without exchange ends no later than the one before it.
        if any(option.exchange_s for option in node.options):
            program.row([(end, 1.0), *backward.terms(-1.0), *exchange.terms(-1.0)], 0.0, math.inf)
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


def add_memory(program: Program, choices: Choices, unit: float, most: int | None = None) -> None:
    """Add a row for each node that may be the one that needs the most.

    Of nodes of one decision that need the same while they run, that is the last: what is kept only grows.

    Args:
        program: What the rows are added to.
        choices: What can be chosen.
        unit: Bytes that a program counts in.
        most: The column that no row is above, in units; one unit when None.
    """
    limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
    needed = _Sums(len(program))
    for node in choices.nodes:
        for o, option in enumerate(node.options):
            needed.add(program.option(node.decision, o), option.held / unit)
    last = {(node.decision, tuple(o.working for o in node.options)): place for place, node in enumerate(choices.nodes)}
    for place, node in enumerate(choices.nodes):
        working = tuple(option.working for option in node.options)
        for o, option in enumerate(node.options):
            needed.add(program.option(node.decision, o), option.kept / unit)
        if last[node.decision, working] == place:
            own = [(program.option(node.decision, o), size / unit) for o, size in enumerate(working)]
            program.row([*needed.terms(1.0), *own, *limit], -math.inf, upper)

"""The best of all choices of a step, with a bound on what any choice can reach (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.auto.choices import Choices, Node
from phalanx.auto.program import Program, Term


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
    _add_memory(program, choices)
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
    contention, last = choices.contention, len(choices.nodes)
    end = program.column(1.0 - contention)
    terms: list[list[Term]] = [[(end, 1.0)] for _ in range(last + 1)]
    for place, node in enumerate(choices.nodes):
        for o, option in enumerate(node.options):
            column = program.option(node.decision, o)
            backward, exchange = option.backward_s / program.second, option.exchange_s / program.second
            alone = (option.forward_s + option.update_s) / program.second
            program.add_cost(column, alone + contention * (backward + exchange))
            for other in range(last + 1):
                # The last row is all backward passes, and no exchange.
                if backward and (other == last or place >= other):
                    terms[other].append((column, -backward))
                if exchange and other < last and place <= other:
                    terms[other].append((column, -exchange))
    for row in terms:
        program.row(row, 0.0, math.inf)


def _add_memory(program: Program, choices: Choices) -> None:
    if choices.room == math.inf:
        return
    for place in range(len(choices.nodes)):
        terms = []
        for other, node in enumerate(choices.nodes):
            for o, option in enumerate(node.options):
                needed = option.held + (option.kept if other <= place else 0.0)
                needed += option.working if other == place else 0.0
                terms.append((program.option(node.decision, o), needed / choices.room))
        program.row(terms, -math.inf, 1.0)

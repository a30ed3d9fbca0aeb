"""`solve`: find the fastest strategies and stages that fit the memory, and a lower bound on any (pure).

In stages, decisions of the same pieces are merged first (`auto/solver/dominance`), and what is left is tried if it is
little (`auto/solver/stage_partition`). Everything else is a program (`auto/solver/step_program`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.auto.solver.dominance import reduce_problem
from phalanx.auto.solver.problem import Solution, StepProblem
from phalanx.auto.solver.stage_partition import TooManyError, find_best_partition
from phalanx.auto.solver.step_program import build_program

_ROUNDING = 1e-12
"""What sums in another order may differ by, as a part of them."""


def solve(problem: StepProblem, *, time_limit: float | None = None, below: float = math.inf) -> Solution | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        problem: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound.
        below: Seconds that others have reached: slower choices are of no interest.

    Raises:
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    if problem.piece_count < problem.stages:
        return None
    smaller = reduce_problem(problem)
    if smaller is None:
        return _solve_program(problem, time_limit, below)
    if not all(smaller.picks.values()):
        return None
    try:
        solution = find_best_partition(smaller.problem, below, time_limit)
    except TooManyError:
        solution = _solve_program(smaller.problem, time_limit, below)
    if solution is None or solution.bound >= below * (1 - _ROUNDING):
        return None
    pick = smaller.original(solution.pick)
    seconds = problem.seconds(pick, solution.stage_of)
    return replace(solution, pick=pick, seconds=seconds, bound=min(solution.bound, seconds))


def _solve_program(problem: StepProblem, time_limit: float | None, below: float) -> Solution | None:
    program = build_program(problem)
    while True:
        answer = program.solve(time_limit=time_limit, below=below / program.second)
        if answer is None:
            return None
        pick, stage_of = program.pick(answer.values), program.stage_of(answer.values)
        if problem.fits(pick, stage_of):
            break
        program.forbid_choice(pick, stage_of)  # within the solver's tolerance of the room, and over it
    seconds = problem.seconds(pick, stage_of)
    bound = min(answer.bound * program.second, seconds)
    if seconds < below or (answer.is_proved and bound < below * (1 - _ROUNDING)):
        return Solution(pick=pick, seconds=seconds, bound=bound, stage_of=stage_of)
    if not answer.is_proved:
        raise TimeoutError("nothing faster was found in time")
    return None

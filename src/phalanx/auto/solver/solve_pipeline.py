"""The best of all choices of a step in stages, with a bound: where stages begin is decided with everything else (pure).

Decisions of the same pieces are merged first (`auto/solver/dominance`), and what is left is tried if it is little
(`auto/solver/stage_partition`). Else it is a program: a piece's stage is a set of binary columns; stages rise by one
at most from piece to piece, and none is empty. What a node costs in a stage is the product of its option
and its piece's stage: one continuous column for each pair, whose sums are those of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.auto.solver.dominance import reduce_problem
from phalanx.auto.solver.milp import Program, Term
from phalanx.auto.solver.pipeline_problem import PipelineProblem
from phalanx.auto.solver.problem import StrategyCost
from phalanx.auto.solver.solve import Solution, check_faster, time_unit
from phalanx.auto.solver.stage_partition import TooManyError, find_best_partition

_ROUNDING = 1e-12
"""What sums in another order may differ by, as a part of them."""


def solve_pipeline(
    problem: PipelineProblem, *, time_limit: float | None = None, below: float = math.inf
) -> Solution | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        problem: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound.
        below: Seconds that others have reached.

    Raises:
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    if problem.pieces[-1] + 1 < problem.stages:
        return None
    smaller = reduce_problem(problem)
    if smaller is None:
        return _by_program(problem, time_limit, below)
    if not all(smaller.picks.values()):
        return None
    try:
        solution = find_best_partition(smaller.problem, below, time_limit)
    except TooManyError:
        solution = _by_program(smaller.problem, time_limit, below)
    if solution is None or solution.bound >= below * (1 - _ROUNDING):
        return None
    pick = smaller.original(solution.pick)
    seconds = problem.seconds(pick, solution.stages)
    return Solution(pick=pick, seconds=seconds, bound=min(solution.bound, seconds), stages=solution.stages)


def _by_program(problem: PipelineProblem, time_limit: float | None, below: float) -> Solution | None:
    model = PipelineProgram(problem)
    program = model.program
    while True:
        answer = program.solve(time_limit=time_limit, below=below / program.second)
        if answer is None:
            return None
        pick, stages = program.pick(answer.values), model.stages(answer.values)
        if problem.fits(pick, stages):
            seconds = problem.seconds(pick, stages)
            bound = min(answer.bound * program.second, seconds)
            solution = Solution(pick=pick, seconds=seconds, bound=bound, stages=stages)
            return check_faster(solution, below, is_proved=answer.is_proved)
        model.forbid(pick, stages)


class _Cell(NamedTuple):
    """What nodes of one piece and one decision cost together under one option."""

    piece: int
    decision: str
    option_index: int
    work: float
    after: float
    persistent_bytes: float
    activation_bytes: float
    deferred_bytes: float
    workspace_bytes: float


class PipelineProgram:
    """A step in stages as a program, whose goal is its seconds within the room, or the bytes of its peak rank."""

    def __init__(self, problem: PipelineProblem, goal_bytes: float | None = None) -> None:
        """Build it.

        Args:
            problem: What can be chosen.
            goal_bytes: Bytes of one unit of the goal, if that is bytes.
        """
        self._problem = problem
        self.program = Program(problem, time_unit(problem.nodes))
        self._count = problem.pieces[-1] + 1
        self._first = [self.program.add_binaries(problem.stages) for _ in range(self._count)]
        self._cells = list(self._sum_cells())
        self._columns = [[self.program.add_column() for _ in range(problem.stages)] for _ in self._cells]
        self._add_stages()
        self._add_products()
        if goal_bytes is not None:
            self._add_memory(goal_bytes, self.program.add_column(1.0))
            return
        self._add_times(self._add_borders())
        if problem.room < math.inf:
            self._add_memory(problem.room)

    def stages(self, values: Sequence[float]) -> tuple[int, ...]:
        """Return the stage of every piece."""
        return tuple(max(range(self._problem.stages), key=lambda stage: values[first + stage]) for first in self._first)

    def forbid(self, pick: dict[str, int], stages: tuple[int, ...]) -> None:
        """Take one choice out of the program."""
        on = [self.program.option(name, o) for name, o in pick.items()]
        on += [first + stage for first, stage in zip(self._first, stages, strict=True)]
        self.program.add_row(((column, 1.0) for column in on), -math.inf, len(on) - 1.0)

    def _sum_cells(self) -> Iterator[_Cell]:
        sums: dict[tuple[int, str, int], list[StrategyCost]] = {}
        for node, piece in zip(self._problem.nodes, self._problem.pieces, strict=True):
            for option_index, option in enumerate(node.options):
                sums.setdefault((piece, node.decision, option_index), []).append(option)
        second = self.program.second
        for (piece, decision, option_index), options in sums.items():
            yield _Cell(
                piece=piece,
                decision=decision,
                option_index=option_index,
                work=sum(cost.forward_s + cost.backward_s for cost in options) / second,
                after=sum(cost.grad_sync_s + cost.update_s for cost in options) / second,
                persistent_bytes=sum(cost.persistent_bytes for cost in options),
                activation_bytes=sum(cost.activation_bytes for cost in options),
                deferred_bytes=sum(cost.deferred_bytes for cost in options),
                workspace_bytes=max(cost.workspace_bytes for cost in options),
            )

    def _add_stages(self) -> None:
        program, stages = self.program, self._problem.stages
        for first in self._first:
            program.add_row(((first + stage, 1.0) for stage in range(stages)), 1.0, 1.0)
        program.add_row([(self._first[0], 1.0)], 1.0, 1.0)
        program.add_row([(self._first[-1] + stages - 1, 1.0)], 1.0, 1.0)
        for before, after in zip(self._first, self._first[1:], strict=False):
            for stage in range(stages):
                # After a piece of this stage comes one of it or the next.
                allowed = [(after + stage, 1.0)] + ([(after + stage + 1, 1.0)] if stage + 1 < stages else [])
                program.add_row([*allowed, (before + stage, -1.0)], 0.0, math.inf)

    def _add_products(self) -> None:
        """Tie every column of a cell and a stage to its option and its piece's stage."""
        program, by_piece = self.program, dict[tuple[int, str], list[int]]()
        for number, cell in enumerate(self._cells):
            program.add_row(
                [
                    *((column, 1.0) for column in self._columns[number]),
                    (program.option(cell.decision, cell.option_index), -1.0),
                ],
                0.0,
                0.0,
            )
            by_piece.setdefault((cell.piece, cell.decision), []).append(number)
        for (piece, _), numbers in by_piece.items():
            for stage in range(self._problem.stages):
                terms = [(self._columns[number][stage], 1.0) for number in numbers]
                program.add_row([*terms, (self._first[piece] + stage, -1.0)], 0.0, 0.0)

    def _add_borders(self) -> list[list[int]]:
        """Add columns that are 1 where a stage ends after a piece; return them by piece and stage."""
        borders = []
        for piece in range(self._count - 1):
            row = []
            for stage in range(self._problem.stages - 1):
                border = self.program.add_column()
                ends = [(self._first[piece] + stage, -1.0), (self._first[piece + 1] + stage + 1, -1.0)]
                self.program.add_row([(border, 1.0), *ends], -1.0, math.inf)
                row.append(border)
            borders.append(row)
        return borders

    def _add_times(self, borders: list[list[int]]) -> None:
        problem, program = self._problem, self.program
        rest = 1.0 / problem.virtual
        most, last = program.add_column(problem.micro_batches), program.add_column(1.0)
        total: list[Term] = [(most, -rest)]
        work: list[list[Term]] = [[(most, 1.0)] for _ in range(problem.ranks)]
        after: list[list[Term]] = [[(last, 1.0)] for _ in range(problem.ranks)]
        for cell, columns in zip(self._cells, self._columns, strict=True):
            for stage, column in enumerate(columns):
                total.append((column, rest * cell.work))
                work[stage % problem.ranks].append((column, -cell.work))
                after[stage % problem.ranks].append((column, -cell.after))
        for piece, row in enumerate(borders):
            send = problem.sends[piece] / program.second
            for stage, border in enumerate(row):
                total.append((border, 2 * rest * send))
                for end in (stage, stage + 1):
                    work[end % problem.ranks].append((border, -send))
        for terms in (*work, *after):
            program.add_row(terms, 0.0, math.inf)
        self._add_idle(total)

    def _add_idle(self, idle: list[Term]) -> None:
        """Add the cost of what ranks are idle, less what gradients of weights fill: the smallest of three sums."""
        problem, program = self._problem, self.program
        if not problem.zero_bubble:
            for column, seconds in idle:
                program.add_cost(column, seconds)
            return
        share, left = 1 - 1 / problem.ranks, program.add_column(1.0)
        rows: list[list[Term]] = [[(left, 1.0), *((column, -seconds) for column, seconds in idle)] for _ in range(3)]
        for node in problem.nodes:
            for index, option in enumerate(node.options):
                column = program.option(node.decision, index)
                for row, fills in zip(rows, option.fills_s, strict=True):
                    row.append((column, share * fills / program.second))
        for row in rows:
            program.add_row(row, 0.0, math.inf)

    def _add_memory(self, unit: float, most: int | None = None) -> None:
        """Add rows that no rank holds more than a unit, or than a column says."""
        problem = self._problem
        limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
        for rank in range(problem.ranks):
            mine = range(rank, problem.stages, problem.ranks)
            always: list[Term] = [
                (columns[stage], (cell.persistent_bytes + passing) / unit)
                for cell, columns in zip(self._cells, self._columns, strict=True)
                for stage in mine
                for passing in (
                    problem.in_flight(stage) * cell.activation_bytes + problem.in_debt(stage) * cell.deferred_bytes,
                )
            ]
            groups: dict[tuple[int, str], list[Term]] = {}
            for cell, columns in zip(self._cells, self._columns, strict=True):
                terms = groups.setdefault((cell.piece, cell.decision), [])
                terms += [(columns[stage], cell.workspace_bytes / unit) for stage in mine]
            for terms in groups.values():
                self.program.add_row([*always, *terms, *limit], -math.inf, upper)

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

from phalanx.auto.solver.dominance import merged
from phalanx.auto.solver.milp import Program, Term
from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import Option
from phalanx.auto.solver.solve import Solved, faster, unit_of
from phalanx.auto.solver.stage_partition import TooManyError, best_cut

_ROUNDING = 1e-12
"""What sums in another order may differ by, as a part of them."""


def solve_staged(choices: StagedChoices, *, time_limit: float | None = None, below: float = math.inf) -> Solved | None:
    """Return the fastest choice that fits; None if none does, or none is faster than `below`.

    Args:
        choices: What can be chosen.
        time_limit: Seconds after which the best so far is returned with a bound.
        below: Seconds that others have reached.

    Raises:
        TimeoutError: If none is known to be faster than `below` when time is over, and one may be.
    """
    if choices.pieces[-1] + 1 < choices.stages:
        return None
    smaller = merged(choices)
    if smaller is None:
        return _by_program(choices, time_limit, below)
    if not all(smaller.picks.values()):
        return None
    try:
        found = best_cut(smaller.choices, below, time_limit)
    except TooManyError:
        found = _by_program(smaller.choices, time_limit, below)
    if found is None or found.bound >= below * (1 - _ROUNDING):
        return None
    pick = smaller.original(found.pick)
    seconds = choices.seconds(pick, found.stages)
    return Solved(pick=pick, seconds=seconds, bound=min(found.bound, seconds), stages=found.stages)


def _by_program(choices: StagedChoices, time_limit: float | None, below: float) -> Solved | None:
    made = StagedProgram(choices)
    program = made.program
    while True:
        answer = program.solved(time_limit=time_limit, below=below / program.second)
        if answer is None:
            return None
        pick, stages = program.pick(answer.values), made.stages(answer.values)
        if choices.fits(pick, stages):
            seconds = choices.seconds(pick, stages)
            bound = min(answer.bound * program.second, seconds)
            found = Solved(pick=pick, seconds=seconds, bound=bound, stages=stages)
            return faster(found, below, is_proved=answer.is_proved)
        made.forbid(pick, stages)


class _Cell(NamedTuple):
    """What nodes of one piece and one decision cost together under one option."""

    piece: int
    decision: str
    place: int
    work: float
    after: float
    held: float
    kept: float
    owed: float
    working: float


class StagedProgram:
    """A step in stages as a program, whose goal is its seconds within the room, or the bytes of its fullest rank."""

    def __init__(self, choices: StagedChoices, goal_bytes: float | None = None) -> None:
        """Build it.

        Args:
            choices: What can be chosen.
            goal_bytes: Bytes of one unit of the goal, if that is bytes.
        """
        self._choices = choices
        self.program = Program(choices, unit_of(choices.nodes))
        self._count = choices.pieces[-1] + 1
        self._first = [self.program.whole(choices.stages) for _ in range(self._count)]
        self._cells = list(self._summed())
        self._columns = [[self.program.column() for _ in range(choices.stages)] for _ in self._cells]
        self._add_stages()
        self._add_products()
        if goal_bytes is not None:
            self._add_memory(goal_bytes, self.program.column(1.0))
            return
        self._add_times(self._add_borders())
        if choices.room < math.inf:
            self._add_memory(choices.room)

    def stages(self, values: Sequence[float]) -> tuple[int, ...]:
        """Return the stage of every piece."""
        return tuple(max(range(self._choices.stages), key=lambda stage: values[first + stage]) for first in self._first)

    def forbid(self, pick: dict[str, int], stages: tuple[int, ...]) -> None:
        """Take one choice out of the program."""
        on = [self.program.option(name, o) for name, o in pick.items()]
        on += [first + stage for first, stage in zip(self._first, stages, strict=True)]
        self.program.row(((column, 1.0) for column in on), -math.inf, len(on) - 1.0)

    def _summed(self) -> Iterator[_Cell]:
        sums: dict[tuple[int, str, int], list[Option]] = {}
        for node, piece in zip(self._choices.nodes, self._choices.pieces, strict=True):
            for place, option in enumerate(node.options):
                sums.setdefault((piece, node.decision, place), []).append(option)
        second = self.program.second
        for (piece, decision, place), options in sums.items():
            yield _Cell(
                piece=piece,
                decision=decision,
                place=place,
                work=sum(one.forward_s + one.backward_s for one in options) / second,
                after=sum(one.exchange_s + one.update_s for one in options) / second,
                held=sum(one.held for one in options),
                kept=sum(one.kept for one in options),
                owed=sum(one.owed for one in options),
                working=max(one.working for one in options),
            )

    def _add_stages(self) -> None:
        program, stages = self.program, self._choices.stages
        for first in self._first:
            program.row(((first + stage, 1.0) for stage in range(stages)), 1.0, 1.0)
        program.row([(self._first[0], 1.0)], 1.0, 1.0)
        program.row([(self._first[-1] + stages - 1, 1.0)], 1.0, 1.0)
        for before, after in zip(self._first, self._first[1:], strict=False):
            for stage in range(stages):
                # After a piece of this stage comes one of it or the next.
                allowed = [(after + stage, 1.0)] + ([(after + stage + 1, 1.0)] if stage + 1 < stages else [])
                program.row([*allowed, (before + stage, -1.0)], 0.0, math.inf)

    def _add_products(self) -> None:
        """Tie every column of a cell and a stage to its option and its piece's stage."""
        program, by_piece = self.program, dict[tuple[int, str], list[int]]()
        for number, cell in enumerate(self._cells):
            program.row(
                [
                    *((column, 1.0) for column in self._columns[number]),
                    (program.option(cell.decision, cell.place), -1.0),
                ],
                0.0,
                0.0,
            )
            by_piece.setdefault((cell.piece, cell.decision), []).append(number)
        for (piece, _), numbers in by_piece.items():
            for stage in range(self._choices.stages):
                terms = [(self._columns[number][stage], 1.0) for number in numbers]
                program.row([*terms, (self._first[piece] + stage, -1.0)], 0.0, 0.0)

    def _add_borders(self) -> list[list[int]]:
        """Add columns that are 1 where a stage ends after a piece; return them by piece and stage."""
        borders = []
        for piece in range(self._count - 1):
            row = []
            for stage in range(self._choices.stages - 1):
                border = self.program.column()
                ends = [(self._first[piece] + stage, -1.0), (self._first[piece + 1] + stage + 1, -1.0)]
                self.program.row([(border, 1.0), *ends], -1.0, math.inf)
                row.append(border)
            borders.append(row)
        return borders

    def _add_times(self, borders: list[list[int]]) -> None:
        choices, program = self._choices, self.program
        rest = 1.0 / choices.virtual
        most, last = program.column(choices.micro_batches), program.column(1.0)
        total: list[Term] = [(most, -rest)]
        work: list[list[Term]] = [[(most, 1.0)] for _ in range(choices.ranks)]
        after: list[list[Term]] = [[(last, 1.0)] for _ in range(choices.ranks)]
        for cell, columns in zip(self._cells, self._columns, strict=True):
            for stage, column in enumerate(columns):
                total.append((column, rest * cell.work))
                work[stage % choices.ranks].append((column, -cell.work))
                after[stage % choices.ranks].append((column, -cell.after))
        for piece, row in enumerate(borders):
            send = choices.sends[piece] / program.second
            for stage, border in enumerate(row):
                total.append((border, 2 * rest * send))
                for end in (stage, stage + 1):
                    work[end % choices.ranks].append((border, -send))
        for terms in (*work, *after):
            program.row(terms, 0.0, math.inf)
        self._add_idle(total)

    def _add_idle(self, idle: list[Term]) -> None:
        """Add the cost of what ranks are idle, less what gradients of weights fill: the smallest of three sums."""
        choices, program = self._choices, self.program
        if not choices.zero_bubble:
            for column, seconds in idle:
                program.add_cost(column, seconds)
            return
        share, left = 1 - 1 / choices.ranks, program.column(1.0)
        rows: list[list[Term]] = [[(left, 1.0), *((column, -seconds) for column, seconds in idle)] for _ in range(3)]
        for node in choices.nodes:
            for place, option in enumerate(node.options):
                column = program.option(node.decision, place)
                for row, fills in zip(rows, option.fills_s, strict=True):
                    row.append((column, share * fills / program.second))
        for row in rows:
            program.row(row, 0.0, math.inf)

    def _add_memory(self, unit: float, most: int | None = None) -> None:
        """Add rows that no rank holds more than a unit, or than a column says."""
        choices = self._choices
        limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
        for rank in range(choices.ranks):
            mine = range(rank, choices.stages, choices.ranks)
            always: list[Term] = [
                (columns[stage], (cell.held + passing) / unit)
                for cell, columns in zip(self._cells, self._columns, strict=True)
                for stage in mine
                for passing in (choices.in_flight(stage) * cell.kept + choices.in_debt(stage) * cell.owed,)
            ]
            groups: dict[tuple[int, str], list[Term]] = {}
            for cell, columns in zip(self._cells, self._columns, strict=True):
                terms = groups.setdefault((cell.piece, cell.decision), [])
                terms += [(columns[stage], cell.working / unit) for stage in mine]
            for terms in groups.values():
                self.program.row([*always, *terms, *limit], -math.inf, upper)

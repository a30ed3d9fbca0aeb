"""`StepProgram`: a `StepProblem` as a mixed-integer program that minimises step time or peak memory (pure).

Of one stage, the ends of the backward pass and the bytes at each node are rows. Of several, a piece's stage is a set of
binary columns; stages rise by one at most from piece to piece, and none is empty. What a node costs in a stage is the
product of its option and its piece's stage: one continuous column for each pair, whose sums are those of both. With
several stages a rank, a program minimises the formula of `auto/solver/problem`, which bounds the schedule from below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.auto.solver.milp import Program, Term
from phalanx.auto.solver.problem import LayerNode, StepProblem, StrategyCost

_ROUNDING = 1e-12
"""What differences of sums leave where they should be 0, in units near 1."""


def build_program(problem: StepProblem, goal_bytes: float | None = None) -> StepProgram:
    """Return the program of a step.

    Args:
        problem: What can be chosen.
        goal_bytes: Bytes of one unit of the goal, if that is bytes.
    """
    step = StepProgram(problem) if problem.stages == 1 else _PipelineProgram(problem)
    if goal_bytes is not None:
        step.add_memory(goal_bytes, step.add_column(1.0))
        return step
    step.add_times()
    if problem.room < math.inf:
        step.add_memory(problem.room)
    return step


class StepProgram(Program):
    """The columns and rows of a step of one stage."""

    def __init__(self, problem: StepProblem) -> None:
        super().__init__(problem, _time_unit(problem))
        self._problem = problem

    def stage_of(self, values: Sequence[float]) -> tuple[int, ...]:
        """Return the stage of every piece; nothing of one stage."""
        return ()

    def forbid_choice(self, pick: Mapping[str, int], stage_of: tuple[int, ...]) -> None:
        """Take one choice out of the program."""
        self.forbid(pick)

    def add_times(self) -> None:
        """Add the ends of the backward pass, the largest of which is one column that all of them bound from below."""
        contention, nodes = self._problem.contention, self._problem.nodes
        end = self.add_column(1.0 - contention)
        backward, exchange = _Sums(len(self)), _Sums(len(self))
        for node in nodes:
            for o, option in enumerate(node.options):
                column = self.option(node.decision, o)
                self.add_cost(column, (option.forward_s + option.update_s) / self.second)
                self.add_cost(column, contention * (option.backward_s + option.grad_sync_s) / self.second)
                backward.add(column, option.backward_s / self.second)
        self.add_row([(end, 1.0), *backward.terms(-1.0)], 0.0, math.inf)  # all backward passes, and no exchange
        for node in nodes:
            for o, option in enumerate(node.options):
                exchange.add(self.option(node.decision, o), option.grad_sync_s / self.second)
            # A node without exchange ends no later than the one before it.
            if any(option.grad_sync_s for option in node.options):
                self.add_row([(end, 1.0), *backward.terms(-1.0), *exchange.terms(-1.0)], 0.0, math.inf)
            for o, option in enumerate(node.options):
                backward.add(self.option(node.decision, o), -option.backward_s / self.second)

    def add_memory(self, unit: float, most: int | None = None) -> None:
        """Add rows that a rank never holds more than a unit: one for each node at which it may be fullest.

        Of nodes of one decision that need the same while they run, those are left out where others hold as much under
        every option: activations grow from node to node, and gradients that are not there yet become fewer.

        Args:
            unit: Bytes.
            most: The column that no row is above, in units; one unit when None.
        """
        limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
        for (decision, sizes), alike in self._list_memory(unit).items():
            own = [(self.option(decision, o), size) for o, size in enumerate(sizes)]
            for total in alike:
                self.add_row([*total.terms(1.0), *own, *limit], -math.inf, upper)

    def _list_memory(self, unit: float) -> dict[tuple[str, tuple[float, ...]], list[_Sums]]:
        """Return what a rank holds where it may be fullest, by a decision and what its options need there besides."""
        nodes, total = self._problem.nodes, _Sums(len(self))
        for node in nodes:
            for column, size in self._terms(node, lambda option: option.persistent_bytes):
                total.add(column, size / unit)
        rows: dict[tuple[str, tuple[float, ...]], list[_Sums]] = {}
        for node in nodes:  # while the optimizer runs
            if any(option.update_bytes for option in node.options):
                rows[node.decision, tuple(option.update_bytes / unit for option in node.options)] = [total.copy()]
        for index, node in enumerate(nodes):
            for column, size in self._list_changes(index):
                total.add(column, size / unit)
            alike = rows.setdefault((node.decision, tuple(o.workspace_bytes / unit for o in node.options)), [])
            if not any(total.is_within(other) for other in alike):
                alike[:] = [*(other for other in alike if not other.is_within(total)), total.copy()]
        return rows

    def _list_changes(self, index: int) -> Iterator[Term]:
        """Yield by how many bytes more is held at a node than at the one before, by column."""
        nodes = self._problem.nodes
        yield from self._terms(nodes[index], lambda option: option.activation_bytes + option.recomputed_bytes)
        if not index:
            return
        before = nodes[index - 1]
        yield from self._terms(before, lambda option: -option.late_bytes)
        if nodes[index].block != before.block:
            for node in itertools.takewhile(lambda node: node.block == before.block, reversed(nodes[:index])):
                yield from self._terms(node, lambda option: -option.recomputed_bytes)

    def _terms(self, node: LayerNode, size: Callable[[StrategyCost], float]) -> Iterator[Term]:
        return ((self.option(node.decision, o), size(option)) for o, option in enumerate(node.options))


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
    update_bytes: float


class _PipelineProgram(StepProgram):
    """The columns and rows of a step of several stages."""

    def __init__(self, problem: StepProblem) -> None:
        super().__init__(problem)
        self._first = [self.add_binaries(problem.stages) for _ in range(problem.piece_count)]
        self._cells = list(self._sum_cells())
        self._products = [[self.add_column() for _ in range(problem.stages)] for _ in self._cells]
        self._add_stages()
        self._add_products()
        self._borders = self._add_borders()

    def stage_of(self, values: Sequence[float]) -> tuple[int, ...]:
        """Return the stage of every piece."""
        return tuple(max(range(self._problem.stages), key=lambda stage: values[first + stage]) for first in self._first)

    def forbid_choice(self, pick: Mapping[str, int], stage_of: tuple[int, ...]) -> None:
        """Take one choice out of the program."""
        on = [self.option(name, o) for name, o in pick.items()]
        on += [first + stage for first, stage in zip(self._first, stage_of, strict=True)]
        self.add_row(((column, 1.0) for column in on), -math.inf, len(on) - 1.0)

    def add_times(self) -> None:
        """Add the work of the busiest rank, what comes after the passes, and what ranks are idle."""
        problem = self._problem
        rest = 1.0 / problem.virtual
        most, last = self.add_column(problem.micro_batches), self.add_column(1.0)
        total: list[Term] = [(most, -rest)]
        work: list[list[Term]] = [[(most, 1.0)] for _ in range(problem.ranks)]
        after: list[list[Term]] = [[(last, 1.0)] for _ in range(problem.ranks)]
        for cell, columns in zip(self._cells, self._products, strict=True):
            for stage, column in enumerate(columns):
                total.append((column, rest * cell.work))
                work[stage % problem.ranks].append((column, -cell.work))
                after[stage % problem.ranks].append((column, -cell.after))
        for piece, row in enumerate(self._borders):
            send = problem.sends[piece] / self.second
            for stage, border in enumerate(row):
                total.append((border, 2 * rest * send))
                for end in (stage, stage + 1):
                    work[end % problem.ranks].append((border, -send))
        for terms in (*work, *after):
            self.add_row(terms, 0.0, math.inf)
        self._add_idle(total)

    def _sum_cells(self) -> Iterator[_Cell]:
        sums: dict[tuple[int, str, int], list[StrategyCost]] = {}
        for node, piece in zip(self._problem.nodes, self._problem.pieces, strict=True):
            for option_index, option in enumerate(node.options):
                sums.setdefault((piece, node.decision, option_index), []).append(option)
        second = self.second
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
                update_bytes=max(cost.update_bytes for cost in options),
            )

    def _add_stages(self) -> None:
        stages = self._problem.stages
        for first in self._first:
            self.add_row(((first + stage, 1.0) for stage in range(stages)), 1.0, 1.0)
        self.add_row([(self._first[0], 1.0)], 1.0, 1.0)
        self.add_row([(self._first[-1] + stages - 1, 1.0)], 1.0, 1.0)
        for before, after in zip(self._first, self._first[1:], strict=False):
            for stage in range(stages):
                # After a piece of this stage comes one of it or the next.
                allowed = [(after + stage, 1.0)] + ([(after + stage + 1, 1.0)] if stage + 1 < stages else [])
                self.add_row([*allowed, (before + stage, -1.0)], 0.0, math.inf)

    def _add_products(self) -> None:
        """Tie every column of a cell and a stage to its option and its piece's stage."""
        by_piece = dict[tuple[int, str], list[int]]()
        for number, cell in enumerate(self._cells):
            self.add_row(
                [
                    *((column, 1.0) for column in self._products[number]),
                    (self.option(cell.decision, cell.option_index), -1.0),
                ],
                0.0,
                0.0,
            )
            by_piece.setdefault((cell.piece, cell.decision), []).append(number)
        for (piece, _), numbers in by_piece.items():
            for stage in range(self._problem.stages):
                terms = [(self._products[number][stage], 1.0) for number in numbers]
                self.add_row([*terms, (self._first[piece] + stage, -1.0)], 0.0, 0.0)

    def _add_borders(self) -> list[list[int]]:
        """Add columns that are 1 where a stage ends after a piece; return them by piece and stage."""
        borders = []
        for piece in range(self._problem.piece_count - 1):
            row = []
            for stage in range(self._problem.stages - 1):
                border = self.add_column()
                ends = [(self._first[piece] + stage, -1.0), (self._first[piece + 1] + stage + 1, -1.0)]
                self.add_row([(border, 1.0), *ends], -1.0, math.inf)
                row.append(border)
            borders.append(row)
        return borders

    def _add_idle(self, idle: list[Term]) -> None:
        """Add the cost of what ranks are idle, less what gradients of weights fill: the smallest of three sums."""
        problem = self._problem
        if not problem.zero_bubble:
            for column, seconds in idle:
                self.add_cost(column, seconds)
            return
        share, left = 1 - 1 / problem.ranks, self.add_column(1.0)
        rows: list[list[Term]] = [[(left, 1.0), *((column, -seconds) for column, seconds in idle)] for _ in range(3)]
        for node in problem.nodes:
            for index, option in enumerate(node.options):
                column = self.option(node.decision, index)
                for row, fills in zip(rows, option.fills_s, strict=True):
                    row.append((column, share * fills / self.second))
        for row in rows:
            self.add_row(row, 0.0, math.inf)

    def add_memory(self, unit: float, most: int | None = None) -> None:
        """Add rows that no rank holds more than a unit, or than a column."""
        problem = self._problem
        limit, upper = ([], 1.0) if most is None else ([(most, -1.0)], 0.0)
        for rank in range(problem.ranks):
            mine = range(rank, problem.stages, problem.ranks)
            moments = sorted(set(map(tuple, problem.in_flight[:, rank :: problem.ranks].tolist())))
            working, updating = (dict[tuple[int, str], list[Term]]() for _ in range(2))
            for cell, columns in zip(self._cells, self._products, strict=True):
                for groups, size in ((working, cell.workspace_bytes), (updating, cell.update_bytes)):
                    if size or groups is working:  # an update that needs nothing is no fuller than the passes
                        terms = groups.setdefault((cell.piece, cell.decision), [])
                        terms += [(columns[stage], size / unit) for stage in mine]
            by_moment = [self._list_bytes(dict(zip(mine, in_flight, strict=True)), unit) for in_flight in moments]
            arriving = [
                (border, self._problem.border_bytes[piece] / unit)
                for piece, row in enumerate(self._borders)
                for stage, border in enumerate(row)
                for end in (stage, stage + 1)
                if end % problem.ranks == rank
            ]
            in_update = [
                (columns[stage], cell.persistent_bytes / unit)
                for cell, columns in zip(self._cells, self._products, strict=True)
                for stage in mine
            ]
            rows = [
                *itertools.product(by_moment, working.values()),
                *((in_update, terms) for terms in updating.values()),
            ]
            for always, terms in rows:
                self.add_row([*always, *arriving, *terms, *limit], -math.inf, upper)

    def _list_bytes(self, in_flight: Mapping[int, int], unit: float) -> list[Term]:
        """Return what stages hold while they have so many micro-batches in flight, in units."""
        in_debt = {stage: self._problem.in_debt(stage) for stage in in_flight}
        return [
            (columns[stage], (cell.persistent_bytes + count * cell.activation_bytes + owed) / unit)
            for cell, columns in zip(self._cells, self._products, strict=True)
            for stage, count in in_flight.items()
            for owed in (in_debt[stage] * cell.deferred_bytes,)
        ]


class _Sums:
    """Coefficients of columns, which change from row to row."""

    def __init__(self, columns: int) -> None:
        self._values = [0.0] * columns

    def add(self, column: int, value: float) -> None:
        self._values[column] += value

    def copy(self) -> _Sums:
        other = _Sums(0)
        other._values = self._values.copy()
        return other

    def is_within(self, other: _Sums) -> bool:
        """Return whether no column has more than in another."""
        return all(value <= most for value, most in zip(self._values, other._values, strict=True))

    def terms(self, factor: float) -> Iterator[Term]:
        return ((column, factor * value) for column, value in enumerate(self._values) if abs(value) > _ROUNDING)


def _time_unit(problem: StepProblem) -> float:
    """Return the seconds that a program counts in."""
    every = (option for node in problem.nodes for option in node.options)
    return max((o.forward_s + o.backward_s + o.grad_sync_s + o.update_s for o in every), default=0.0) or 1.0

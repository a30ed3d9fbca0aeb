"""`PartitionPoints`: where a model can be split into pipeline stages (pure).

A stage begins at a unit (`plan/stages`). What belongs together, as units that share a parameter or take turns do, is
one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from phalanx.auto.capture.blocks import is_inside
from phalanx.auto.capture.graph import CapturedStep, Operator
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.parallel.pipeline.partition import record  # needs torch alone
from phalanx.plan.shape import ModelShape
from phalanx.plan.stages import units


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPoints:
    """A chain of pieces."""

    starts: tuple[str, ...]
    """The unit that each piece begins with."""

    of: tuple[int, ...]
    """The piece of every call, rising."""

    crossing: tuple[float, ...]
    """Bytes of a global batch that pass the border after each piece but the last."""


def find_partition_points(model: nn.Module, captured: CapturedStep, calls: tuple[ModuleCall, ...]) -> PartitionPoints:
    """Return the pieces of a model.

    Raises:
        PlanError: If its forward pass cannot be cut; says why.
    """
    names = units(ModelShape(captured.parameters))
    if not names:
        raise PlanError(tr("the model holds no modules with parameters"))
    visits = [unit_of(call.path, names) for call in calls]
    visited = [position for position in dict.fromkeys(visits) if position is not None]
    if visited != list(range(len(names))):
        raise PlanError(tr("the forward pass does not call the model's units in the order in which they were made"))
    together = _joined_with_next(visits, calls, len(names))
    piece_of = [sum(not joined for joined in together[:position]) for position in range(len(names))]
    starts = tuple(name for position, name in enumerate(names) if position == 0 or not together[position - 1])
    record(model, dict(zip(names, piece_of, strict=True)), len(starts))  # the finest cut: others are coarser
    of, now = [], 0
    for visit in visits:
        now = now if visit is None else max(now, piece_of[visit])
        of.append(now)
    crossing = _border_bytes(captured.operators, calls, of, len(starts))
    return PartitionPoints(starts=starts, of=tuple(of), crossing=tuple(crossing))


def find_parameter_outside_units(captured: CapturedStep) -> str | None:
    """Return a parameter that no unit holds, or that several do: stages cannot shard it. None if there is none."""
    names = units(ModelShape(captured.parameters))
    for name, first_name in [*((param.name, param.name) for param in captured.parameters), *captured.tied]:
        if unit_of(name, names) is None or unit_of(name, names) != unit_of(first_name, names):
            return name
    return None


def unit_of(path: str, names: list[str]) -> int | None:
    """Return the place of the unit that a module or parameter is in, of several the innermost; None outside all."""
    inside = (unit for unit, name in enumerate(names) if is_inside(path, (name,)))
    return max(inside, key=lambda unit: len(names[unit]), default=None)


def _joined_with_next(visits: list[int | None], calls: tuple[ModuleCall, ...], count: int) -> list[bool]:
    """Return for every unit but the last whether it has to be in one piece with the next."""
    runs: list[tuple[int, int]] = []
    latest, users = 0, dict[str, list[int]]()
    for visit, call in zip(visits, calls, strict=True):
        unit = latest if visit is None else visit
        runs.append((unit, latest))  # back at a unit that was left: they take turns
        latest = max(latest, unit)
        for param in call.parameters:
            users.setdefault(param.name, []).append(unit)
    runs += [(min(those), max(those)) for those in users.values()]
    return [any(first <= unit_before < last for first, last in runs) for unit_before in range(count - 1)]


def _border_bytes(
    operators: Sequence[Operator], calls: tuple[ModuleCall, ...], of: list[int], count: int
) -> Iterable[float]:
    """Yield the bytes that are made up to a piece and read after it, or returned by the last.

    The loss reads its target where it is.
    """
    home: dict[int | str, int] = {at: piece for call, piece in zip(calls, of, strict=True) for at in call.operators}
    sizes: dict[tuple[int | str, int], int] = {}
    last_use: dict[tuple[int | str, int], int] = {}
    for call, piece in zip(calls, of, strict=True):
        for at in call.operators:
            for read in operators[at].reads():
                tensor = read.source, read.output
                if read.source in home or (call.kind != "loss" and str(read.source).startswith("sample")):
                    sizes[tensor], last_use[tensor] = read.value.bytes, max(last_use.get(tensor, 0), piece)
            if operators[at].returned:
                for number, output in enumerate(operators[at].outputs):
                    sizes[at, number], last_use[at, number] = output.bytes, count - 1
    spans = [(home.get(tensor[0], 0), last_use[tensor], size) for tensor, size in sizes.items()]
    for border in range(count - 1):
        yield float(sum(size for piece, last, size in spans if piece <= border < last))

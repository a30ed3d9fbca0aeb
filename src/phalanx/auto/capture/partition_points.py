"""Where a model may be cut into pipeline stages: its units in the order of the forward pass, as pieces (pure).

A stage begins at a unit (`plan/stages`). What belongs together, as units that share a parameter or take turns do, is
one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from phalanx.auto.capture.blocks import is_inside
from phalanx.auto.capture.graph import Captured
from phalanx.auto.capture.module_calls import Segment
from phalanx.cluster.messages.messages import text
from phalanx.errors import PlanError
from phalanx.parallel.pipeline.partition import record  # needs torch alone
from phalanx.plan.shape import ModelShape
from phalanx.plan.stages import units


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A chain of pieces."""

    starts: tuple[str, ...]
    """The unit that each piece begins with."""

    of: tuple[int, ...]
    """The piece of every segment, rising."""

    crossing: tuple[float, ...]
    """Bytes of a global batch that pass the border after each piece but the last."""


def pieces_of(model: nn.Module, captured: Captured, found: tuple[Segment, ...]) -> Pieces:
    """Return the pieces of a model.

    Raises:
        PlanError: If its forward pass cannot be cut; says why.
    """
    names = units(ModelShape(captured.parameters))
    if not names:
        raise PlanError(text("stages of nothing"))
    visits = [unit_of(segment.path, names) for segment in found]
    met = [place for place in dict.fromkeys(visits) if place is not None]
    if met != list(range(len(names))):
        raise PlanError(text("stages out of order"))
    together = _together(visits, found, len(names))
    piece_of = [sum(not joined for joined in together[:place]) for place in range(len(names))]
    starts = tuple(name for place, name in enumerate(names) if place == 0 or not together[place - 1])
    record(model, dict(zip(names, piece_of, strict=True)), len(starts))  # the finest cut: others are coarser
    of, now = [], 0
    for visit in visits:
        now = now if visit is None else max(now, piece_of[visit])
        of.append(now)
    return Pieces(starts=starts, of=tuple(of), crossing=tuple(_crossing(found, of, len(starts))))


def in_no_unit_alone(captured: Captured) -> str | None:
    """Return a parameter that no unit holds, or that several do: stages cannot shard it. None if there is none."""
    names = units(ModelShape(captured.parameters))
    for name, other in [*((param.name, param.name) for param in captured.parameters), *captured.tied]:
        if unit_of(name, names) is None or unit_of(name, names) != unit_of(other, names):
            return name
    return None


def unit_of(path: str, names: list[str]) -> int | None:
    """Return the place of the unit that a module or parameter is in, of several the innermost; None outside all."""
    inside = (place for place, name in enumerate(names) if is_inside(path, (name,)))
    return max(inside, key=lambda place: len(names[place]), default=None)


def _together(visits: list[int | None], found: tuple[Segment, ...], count: int) -> list[bool]:
    """Return for every unit but the last whether it has to be in one piece with the next."""
    runs: list[tuple[int, int]] = []
    latest, users = 0, dict[str, list[int]]()
    for visit, segment in zip(visits, found, strict=True):
        here = latest if visit is None else visit
        runs.append((here, latest))  # back at a unit that was left: they take turns
        latest = max(latest, here)
        for param in segment.parameters:
            users.setdefault(param.name, []).append(here)
    runs += [(min(those), max(those)) for those in users.values()]
    return [any(first <= place < last for first, last in runs) for place in range(count - 1)]


def _crossing(found: tuple[Segment, ...], of: list[int], count: int) -> Iterable[float]:
    """Yield the bytes that are made up to a piece and read after it; the loss reads its target where it is."""
    last_use: dict[int | str, int] = {}
    sizes: dict[int | str, tuple[int, float]] = {}
    for place, segment in enumerate(found):
        sizes[place] = of[place], float(sum(one.bytes for one in segment.outputs))
        for source in segment.inputs:
            if isinstance(source.source, str) and (segment.kind == "loss" or not source.source.startswith("sample")):
                continue
            sizes.setdefault(source.source, (0, float(source.value.bytes)))
            last_use[source.source] = max(last_use.get(source.source, 0), of[place])
    for border in range(count - 1):
        yield sum(size for made, (piece, size) in sizes.items() if piece <= border < last_use.get(made, 0))

"""What a planner found as a person reads it, in 80 columns too: the answer, the runners-up, and what was searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.auto.planner.planner import Candidate, Searched
from phalanx.auto.units import percent
from phalanx.cluster.messages.messages import text
from phalanx.units import format_bytes, format_seconds


def planned_table(
    where: str,
    found: Searched,
    space: Mapping[str, Iterable[object]],
    notes: Iterable[str],
    cut: Callable[[Candidate], str],
) -> RenderableType:
    """Return a planner's answer in the user's language (PHALANX_LANG).

    Args:
        where: The cluster, in words.
        found: What was found.
        space: The dimensions that were searched, and their values.
        notes: What else is to be known, such as what was not searched.
        cut: Says which layers of a candidate are cut.
    """
    best = found.best
    head = text(
        "plan head",
        where=where,
        step=format_seconds(best.seconds),
        gap=percent(found.gap),
        memory=format_bytes(best.peak),
        cause=text(f"plan {max(best.parts, key=lambda name: best.parts[name])}"),
    )
    grid = Table(box=box.SIMPLE, pad_edge=False, title=text("plan fastest"), title_justify="left")
    grid.add_column(text("plan arrangement"))
    grid.add_column(text("plan step"), justify="right", no_wrap=True)
    grid.add_column(text("plan a rank"), justify="right", no_wrap=True)
    for one in found.candidates:
        said = (Padding(Text(line, style="dim", overflow="fold"), (0, 0, 0, 2)) for line in _lines(one, cut(one)))
        grid.add_row(Group(str(one.arrangement), *said), format_seconds(one.seconds), format_bytes(one.peak))
    dimensions = (f"{text(f'space {name}')} {', '.join(map(str, values))}" for name, values in space.items())
    searched = text(
        "plan searched",
        count=len(found.arrangements),
        listed=found.solved,
        space=text("space between").join(dimensions),
    )
    return Group(Text(head), grid, Text(searched, style="dim"), *map(Text, notes))


def _lines(candidate: Candidate, cut: str) -> Iterable[str]:
    """Yield where the seconds go, and the layers that are cut."""
    parts = {name: seconds for name, seconds in candidate.parts.items() if seconds >= 0.0005 * candidate.seconds}
    yield text("list between").join(
        f"{text(f'plan {name}')} {format_seconds(seconds)}" for name, seconds in parts.items()
    )
    if cut:
        yield text("plan cut", layers=cut)

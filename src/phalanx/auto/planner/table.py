"""The result of the planner as a table, in 80 columns too: the answer, the runners-up, and what was searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.auto.planner.planner import Candidate, PlanSearch
from phalanx.auto.units import format_percent
from phalanx.cluster.messages.messages import text
from phalanx.units import format_bytes, format_seconds


def build_result_table(
    where: str,
    search: PlanSearch,
    space: Mapping[str, Iterable[object]],
    notes: Iterable[str],
    cut: Callable[[Candidate], str],
) -> RenderableType:
    """Return a planner's answer in the user's language (PHALANX_LANG).

    Args:
        where: The cluster, in words.
        search: What was found.
        space: The dimensions that were searched, and their values.
        notes: What else is to be known, such as what was not searched.
        cut: Says which layers of a candidate are cut.
    """
    best = search.best
    head = text(
        "plan head",
        where=where,
        step=format_seconds(best.step_time_s),
        gap=format_percent(search.gap),
        memory=format_bytes(best.memory_bytes),
        cause=text(f"plan {max(best.parts, key=lambda name: best.parts[name])}"),
    )
    grid = Table(box=box.SIMPLE, pad_edge=False, title=text("plan fastest"), title_justify="left")
    grid.add_column(text("plan arrangement"))
    grid.add_column(text("plan step"), justify="right", no_wrap=True)
    grid.add_column(text("plan a rank"), justify="right", no_wrap=True)
    for candidate in search.top_k:
        lines = (
            Padding(Text(line, style="dim", overflow="fold"), (0, 0, 0, 2))
            for line in _lines(candidate, cut(candidate))
        )
        grid.add_row(
            Group(str(candidate.config), *lines),
            format_seconds(candidate.step_time_s),
            format_bytes(candidate.memory_bytes),
        )
    dimensions = (f"{text(f'space {name}')} {', '.join(map(str, values))}" for name, values in space.items())
    searched = text(
        "plan searched",
        count=len(search.configs),
        listed=search.listed,
        space=text("space between").join(dimensions),
    )
    return Group(Text(head), grid, Text(searched, style="dim"), *map(Text, notes))


def _lines(candidate: Candidate, cut: str) -> Iterable[str]:
    """Yield where the seconds go, and the layers that are cut."""
    parts = {name: seconds for name, seconds in candidate.parts.items() if seconds >= 0.0005 * candidate.step_time_s}
    yield text("list between").join(
        f"{text(f'plan {name}')} {format_seconds(seconds)}" for name, seconds in parts.items()
    )
    if cut:
        yield text("plan cut", layers=cut)

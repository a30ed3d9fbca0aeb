"""`build_result_table`: format the planner's result as a terminal table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.planner import PlanSearch
from phalanx.auto.search.result import format_percent
from phalanx.i18n import Labels, tr
from phalanx.units import format_bytes, format_seconds

_SPACE: Labels = {
    "data": "data",
    "context": "context",
    "attention": "attention",
    "experts": "experts",
    "model": "model",
    "stages": "stages",
    "virtual": "virtual",
    "micro_batches": "micro_batches (how many, of stages)",
    "schedule": "schedule",
    "zero": "zero",
    "recompute": "recompute",
    "outermost": "outermost",
    "layers": "layers",
}
"""What the dimensions of a search are called."""


def build_result_table(
    where: str,
    search: PlanSearch,
    space: Mapping[str, Iterable[object]],
    notes: Iterable[str],
    describe_sharded: Callable[[Candidate], str],
) -> RenderableType:
    """Return a planner's answer in the user's language (PHALANX_LANG).

    Args:
        where: The cluster, in words.
        search: What was found.
        space: The dimensions that were searched, and their values.
        notes: What else is to be known, such as what was not searched.
        describe_sharded: Returns which layers of a candidate are sharded, in words.
    """
    best = search.best
    head = tr(
        "{where}: {step} a step, at most {gap} % over the optimum; {memory} a rank; mostly {cause}",
        where=where,
        step=format_seconds(best.step_time_s),
        gap=format_percent(search.gap),
        memory=format_bytes(best.memory_bytes),
        cause=best.part_label(max(best.parts, key=lambda name: best.parts[name])),
    )
    grid = Table(box=box.SIMPLE, pad_edge=False, title=tr("Fastest Plan of each configuration"), title_justify="left")
    grid.add_column(tr("configuration"))
    grid.add_column(tr("a step"), justify="right", no_wrap=True)
    grid.add_column(tr("a rank"), justify="right", no_wrap=True)
    for candidate in search.top_k:
        lines = (
            Padding(Text(line, style="dim", overflow="fold"), (0, 0, 0, 2))
            for line in _lines(candidate, describe_sharded(candidate))
        )
        grid.add_row(
            Group(str(candidate), *lines),
            format_seconds(candidate.step_time_s),
            format_bytes(candidate.memory_bytes),
        )
    dimensions = (f"{tr(_SPACE[name])} {', '.join(map(str, values))}" for name, values in space.items())
    searched = tr(
        "searched: {count} configurations, {listed} of them layer by layer; {space}",
        count=len(search.configs),
        listed=search.listed,
        space=tr("; ").join(dimensions),
    )
    return Group(Text(head), grid, Text(searched, style="dim"), *map(Text, notes))


def _lines(candidate: Candidate, sharded: str) -> Iterable[str]:
    """Yield where the seconds go, and the layers that are sharded."""
    parts = {name: seconds for name, seconds in candidate.parts.items() if seconds >= 0.0005 * candidate.step_time_s}
    yield tr(", ").join(f"{candidate.part_label(name)} {format_seconds(seconds)}" for name, seconds in parts.items())
    if candidate.shares:
        yield tr(
            "{unit} of a global batch by speed: {shares}", unit=candidate.share_unit, shares=candidate.describe_shares()
        )
    if sharded:
        yield tr("sharded layers: {layers}", layers=sharded)

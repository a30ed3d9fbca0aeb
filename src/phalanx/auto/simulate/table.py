"""`build_step_table`: format a simulated step as a terminal table: step time, and time of each rank by category."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.auto.simulate.values import SimulatedStep
from phalanx.i18n import Labels, tr
from phalanx.units import format_bytes, format_seconds

_RATES: Labels = {
    "tokens": "{rate} tokens/s",
    "rows": "{rate} samples/s",
}
"""By what a simulated step counts."""

_ROUNDING = 1e-9
"""What sums in another order leave of a step."""


def build_step_table(simulated: SimulatedStep) -> RenderableType:
    """Return a row for each place along the stage axis: what its ranks do in a step, and hold at their fullest."""
    grid = Table(box=box.SIMPLE, pad_edge=False)
    grid.add_column(tr("ranks"))
    for name in (tr("compute"), tr("waits"), tr("idle"), tr("peak memory")):
        grid.add_column(name, justify="right", no_wrap=True)
    simulation = simulated.simulation
    for rank, (seconds, peak) in enumerate(zip(simulation.ranks, simulation.peaks, strict=True)):
        idle_s = seconds.idle if seconds.idle > _ROUNDING * simulation.step_time_s else 0.0
        times = map(format_seconds, (seconds.busy, seconds.exposed, idle_s))
        grid.add_row(format_rank(simulated, rank), *times, format_bytes(peak))
    return Group(Text(format_title(simulated)), grid, Text(format_facts(simulated)))


def format_title(simulated: SimulatedStep) -> str:
    """Return which step it is, and how long it takes."""
    step = format_seconds(simulated.simulation.step_time_s)
    return tr("{name}: {step} a step", name=simulated.name, step=step)


def format_facts(simulated: SimulatedStep) -> str:
    """Return what all ranks together get through, and how they are arranged."""
    pipeline = simulated.simulation.pipeline
    facts = tr(
        "{rate}; all {copies} ranks do the same"
        if simulated.layers
        else "{rate}, idle {idle}; {schedule}, micro-batches: {microbatches}, ranks per row: {copies}",
        rate=format_rate(simulated),
        idle=f"{simulated.simulation.idle_share:.1%}",
        microbatches=pipeline.schedule.microbatches,
        schedule=pipeline.schedule.kind,
        copies=pipeline.copies,
    )
    if simulated.usd_per_step is not None:
        facts += tr("; {usd} USD a step", usd=f"{simulated.usd_per_step:.4g}")
    return facts


def format_rank(simulated: SimulatedStep, rank: int) -> str:
    """Return the stages of a rank, of many the first and the last."""
    if simulated.layers:
        return tr("each rank")
    stages = simulated.simulation.pipeline.stages_by_rank[rank]
    names = ", ".join(map(str, stages)) if len(stages) < 4 else f"{stages[0]}, {stages[1]} … {stages[-1]}"
    return tr("stage {stages}", stages=names)


def format_rate(simulated: SimulatedStep) -> str:
    """Return what all ranks get through in a second."""
    return tr(_RATES[simulated.unit], rate=f"{simulated.per_s:,.0f}")

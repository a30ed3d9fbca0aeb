"""The command `phalanx predict`, and `phalanx plan` of a described transformer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.auto.predict.prediction import Prediction, predict
from phalanx.auto.predict.run_file import described_in, read_run
from phalanx.auto.predict.run_spec import Run
from phalanx.auto.search.request import read_limit
from phalanx.auto.search.search import Choice, Found, search
from phalanx.auto.simulate.files import check_folders, draw, drawn_options
from phalanx.auto.units import percent
from phalanx.cluster.messages.messages import text
from phalanx.errors import ConfigError


@click.command("predict")
@click.argument("file", type=click.File("r", encoding="utf-8", lazy=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
@drawn_options
def command(file: TextIO, as_json: bool, trace: Path | None, timeline: Path | None) -> None:
    """Predict step time and memory of described runs, a JSON object each; - reads them from standard input.

    Needs no model and no devices. The format is that of docs/predict.md.
    """
    check_folders(trace, timeline)
    runs = [read_run(one, place) for place, one in _described(file)]
    if len(runs) > 1 and (trace or timeline):
        raise click.UsageError(text("one run", options=text("show"), path=file.name, count=len(runs)))
    found = [predict(run) for run in runs]
    if as_json:
        for prediction in found:
            click.echo(json.dumps(asdict(prediction)))
    else:
        Console().print(_table(runs, found))
    draw(runs[0], trace, timeline)


def _described(file: TextIO) -> list[tuple[str, Any]]:
    """Return the runs of a file as `described_in` does, and say on standard error what else it has.

    Raises:
        UsageError: If it has none.
    """
    runs, collectives = described_in(file, file.name)
    said = {"path": file.name, "count": collectives.total()}
    said["kinds"] = ", ".join(f"{count} {kind}" for kind, count in collectives.most_common())
    if not runs:
        raise click.UsageError(text("no run but collectives" if collectives else "no run", **said))
    if collectives:
        click.echo(text("collectives skipped", **said), err=True)
    return runs


def _table(runs: Sequence[Run], found: Sequence[Prediction]) -> Table:
    grid = Table(box=box.SIMPLE, pad_edge=False, caption=text("predicted caption"))
    grid.add_column(text("predicted run"), overflow="fold")
    grid.add_column(text("predicted on"), no_wrap=True)
    for name in (text("predicted step"), "tokens/s", "TFLOP/s", "GiB"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column(text("predicted mostly"), no_wrap=True)
    has_measured = any(run.measured_step_time_s for run in runs)
    if has_measured:
        grid.add_column(text("predicted off"), justify="right", no_wrap=True)
    for run, one in zip(runs, found, strict=True):
        cells = [
            escape(run.name),
            f"{run.parallel.ranks} {run.cluster.device.split('-')[0]}",
            f"{one.step_time_s:.3g}",
            f"{one.tokens_per_s_per_device:,.0f}",
            f"{one.model_tflops_per_device:.0f}",
            f"{one.memory_gib:.1f}" if one.fits else f"[red]{one.memory_gib:.1f}![/red]",
            _cause(one),
        ]
        if has_measured:
            measured = run.measured_step_time_s
            cells.append(f"{one.step_time_s / measured - 1:+.0%}" if measured else "")
        grid.add_row(*cells)
    if not all(one.fits for one in found):
        grid.caption = text("predicted caption") + text("predicted too large")
    return grid


def _cause(one: Prediction) -> str:
    """Return what takes most of the step."""
    seconds = {name.removesuffix("_s"): value for name, value in one.breakdown.items() if name.endswith("_s")}
    largest = max(seconds, key=lambda name: seconds[name])
    return f"{text(f'spent {largest}')} {seconds[largest] / one.step_time_s:.0%}"


def plan_described(
    file: TextIO,
    *,
    cluster: str | None,
    limits: tuple[str, ...],
    alternatives: tuple[str, ...],
    top: int,
    time_limit: float | None,
    as_json: bool,
    trace: Path | None,
    timeline: Path | None,
) -> None:
    """Print the fastest ways to cut a transformer that a file describes.

    Args:
        file: One run as `phalanx predict` takes it, without what is searched.
        cluster: Words; the file's own when None.
        limits: What to keep to.
        alternatives: Further limits whose cost is said.
        top: How many choices to show.
        time_limit: Seconds.
        as_json: Whether to print one JSON object.
        trace: Where to write the events of the best.
        timeline: Where to draw it.

    Raises:
        ConfigError: If the file describes no run.
    """
    runs = _described(file)
    if len(runs) > 1:
        raise click.UsageError(text("one run", options=text("plan takes"), path=file.name, count=len(runs)))
    place, described = runs[0]
    if not isinstance(described, dict):
        raise ConfigError(text("not an object", place=place, found=type(described).__name__))
    for one in alternatives:
        read_limit(one)  # a wrong word is to be said before the search
    found = search(described, cluster, limits=limits, top_k=top, time_limit=time_limit)
    reasons = [found.why_not(one) for one in alternatives]
    if as_json:
        click.echo(json.dumps(_as_json(found) | {"why_not": reasons}))
    else:
        _print(found, reasons)
    draw(found.best.run, trace, timeline)


def _print(found: Found, reasons: Sequence[str]) -> None:
    console = Console()
    console.print(_choices(found))
    spaces = (f"{_searched(name)} {', '.join(map(str, values))}" for name, values in found.dimensions.items())
    proved = text(
        "choices proved",
        choices=f"{found.choices:,}",
        priced=f"{found.priced:,}",
        simulated=found.simulated,
        bound=f"{found.bound:.4g}",
        gap=percent(found.gap),
    )
    console.print(proved, highlight=False)
    if (usd := found.best.usd_per_step) is not None:
        console.print(text("choices price", usd=f"{usd:.4g}"), highlight=False)
    console.print(text("choices searched", space="; ".join(spaces)), style="dim", highlight=False)
    console.print(text("plan not searched", why=found.not_searched), style="dim", highlight=False)
    for reason in reasons:
        console.print(reason, highlight=False)


def _searched(name: str) -> str:
    """Return what a dimension is; `micro` is a number elsewhere (`auto/search/request`)."""
    return text("choices micro") if name == "micro" else name


def _choices(found: Found) -> Table:
    grid = Table(box=box.SIMPLE, pad_edge=False, padding=0)  # twelve columns in eighty places
    for name in (*found.best.values, text("predicted step"), text("choices formula"), "tokens/s", "GiB"):
        grid.add_column(name, justify="right", no_wrap=True)
    for choice in found.top_k:
        one = choice.prediction
        grid.add_row(
            *map(str, choice.values.values()),
            "-" if choice.simulated_s is None else f"{choice.simulated_s:.4g}",
            f"{one.step_time_s:.4g}",
            f"{one.tokens_per_s_per_device * one.step_time_s / choice.step_time_s:,.0f}",
            f"{one.memory_gib:.1f}",
        )
    return grid


def _as_json(found: Found) -> dict[str, object]:
    return {
        "bound_s": found.bound,
        "gap_percent": found.gap,
        "choices": found.choices,
        "priced": found.priced,
        "simulated": found.simulated,
        "dimensions": found.dimensions,
        "not_searched": found.not_searched,
        "top": [_choice_as_json(choice) for choice in found.top_k],
    }


def _choice_as_json(choice: Choice) -> dict[str, object]:
    return choice.values | {
        "simulated_step_time_s": choice.simulated_s,
        "usd_per_step": choice.usd_per_step,
        "prediction": asdict(choice.prediction),
    }

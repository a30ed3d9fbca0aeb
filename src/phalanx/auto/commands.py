"""The command `phalanx predict`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

import click
from rich import box
from rich.console import Console
from rich.table import Table

from phalanx.auto.described_run import Run, read_runs
from phalanx.auto.predict import Prediction, predict


@click.command("predict")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
def command(file: TextIO, as_json: bool) -> None:
    """Predict step time and memory of described runs, one JSON object a line; - reads them from standard input.

    Needs no model and no devices. The format is that of docs/predict.md.
    """
    runs = read_runs(file, file.name)
    if not runs:
        raise click.UsageError(f"{file.name} has no run. Write one JSON object a line.")
    found = [predict(run) for run in runs]
    if as_json:
        for prediction in found:
            click.echo(json.dumps(asdict(prediction)))
        return
    Console().print(_table(runs, found))


def _table(runs: Sequence[Run], found: Sequence[Prediction]) -> Table:
    grid = Table(box=box.SIMPLE, pad_edge=False, caption="tokens/s, TFLOP/s and GiB are those of one device")
    for name in ("run", "on", "step s", "tokens/s", "TFLOP/s", "GiB", "mostly"):
        grid.add_column(name, justify="left" if name in ("run", "on", "mostly") else "right", no_wrap=name != "run")
    has_measured = any(run.measured_step_time_s for run in runs)
    if has_measured:
        grid.add_column("off by", justify="right", no_wrap=True)
    for run, one in zip(runs, found, strict=True):
        cells = [
            run.name,
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
        grid.caption = f"{grid.caption}; ! does not fit"
    return grid


def _cause(one: Prediction) -> str:
    """Return what takes most of the step."""
    seconds = {name.removesuffix("_s"): value for name, value in one.breakdown.items() if name.endswith("_s")}
    largest = max(seconds, key=lambda name: seconds[name])
    return f"{largest.replace('_', ' ')} {seconds[largest] / one.step_time_s:.0%}"

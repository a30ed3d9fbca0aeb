"""The command `phalanx predict`, and `phalanx plan` for transformer run files."""

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

from phalanx.auto.predict.prediction import BREAKDOWN, Prediction, predict
from phalanx.auto.predict.run_file import parse_runs, read_run
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.search.request import read_limit
from phalanx.auto.search.result import format_percent
from phalanx.auto.search.search import RunCandidate, RunSearch, search
from phalanx.auto.simulate.files import check_folders, simulation_options, write_simulation
from phalanx.errors import ConfigError
from phalanx.i18n import tr


@click.command("predict", epilog="\b\nExample:\n  phalanx predict run.json\n  phalanx predict run.json --json")
@click.argument("file", type=click.File("r", encoding="utf-8", lazy=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
@click.option("--strict", is_flag=True, help="Exit with 1 if one of the runs cannot be predicted.")
@simulation_options
def command(file: TextIO, as_json: bool, strict: bool, trace: Path | None, timeline: Path | None) -> None:
    """Predict step time and memory of run specs, a JSON object each; - reads them from standard input.

    Needs no model and no devices. The format is that of docs/predict.md. A run that cannot be predicted is an error of
    its own, and the others are printed.
    """
    check_folders(trace, timeline)
    described = _read_described(file)
    if len(described) > 1 and (trace or timeline):
        raise click.UsageError(
            tr(
                "{options} one run, {path} has {count}. Give one of them.",
                options=tr("--trace and --timeline show"),
                path=file.name,
                count=len(described),
            )
        )
    outcomes = [_predict(description, position) for position, description in described]
    errors = [outcome for outcome in outcomes if isinstance(outcome, ConfigError)]
    predicted = [outcome for outcome in outcomes if not isinstance(outcome, ConfigError)]
    if not predicted and not as_json:
        raise errors[0]
    if as_json:
        for (_, description), outcome in zip(described, outcomes, strict=True):
            click.echo(json.dumps(_prediction_as_json(description, outcome)))
    else:
        Console().print(_table(predicted))
        for error in errors:
            click.echo(str(error), err=True)
    if predicted:
        write_simulation(predicted[0][0], trace, timeline)
    if errors and (strict or not predicted):
        raise SystemExit(1)


def _predict(description: Any, position: str) -> tuple[RunSpec, Prediction] | ConfigError:
    try:
        run = read_run(description, position)
        return run, predict(run)
    except ConfigError as error:
        return error


def _prediction_as_json(description: Any, outcome: tuple[RunSpec, Prediction] | ConfigError) -> dict[str, Any]:
    if isinstance(outcome, ConfigError):
        return {"name": description.get("name") if isinstance(description, dict) else None, "error": str(outcome)}
    return asdict(outcome[1])


def _read_described(file: TextIO) -> list[tuple[str, Any]]:
    """Return the runs of a file as `parse_runs` does, and say on standard error what else it has.

    Raises:
        UsageError: If it has none.
    """
    runs, collectives = parse_runs(file, file.name)
    facts = {"path": file.name, "count": collectives.total()}
    facts["kinds"] = ", ".join(f"{count} {kind}" for kind, count in collectives.most_common())
    if not runs:
        raise click.UsageError(
            tr(
                "{path} has no run, only single collectives: {count} ({kinds}). Write each run as a JSON object; "
                "docs/predict.md has the format."
                if collectives
                else "{path} has no run. Write each as a JSON object; docs/predict.md has the format.",
                **facts,
            )
        )
    if collectives:
        click.echo(tr("{path}: skipped single collectives, which are no runs: {count} ({kinds}).", **facts), err=True)
    return runs


def _table(predicted: Sequence[tuple[RunSpec, Prediction]]) -> Table:
    grid = Table(box=box.SIMPLE, pad_edge=False, padding=0, caption=tr("tokens/s and GiB are those of one device"))
    grid.add_column(tr("run"), overflow="fold")
    grid.add_column(tr("on"), no_wrap=True)
    for name in (tr("step s"), tr("4 of 5 in"), "tokens/s", "GiB"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column(tr("mostly"), no_wrap=True)
    has_measured = any(run.measured_step_time_s for run, _ in predicted)
    if has_measured:
        grid.add_column(tr("off by"), justify="right", no_wrap=True)
    for run, prediction in predicted:
        cells = [
            escape(run.name),
            f"{run.parallel.ranks} {run.cluster.device.split('-')[0]}",
            f"{prediction.step_time_s:.3g}",
            _format_interval(prediction),
            f"{prediction.tokens_per_s_per_device:,.0f}",
            f"{prediction.memory_gib:.1f}" if prediction.fits else f"[red]{prediction.memory_gib:.1f}![/red]",
            _describe_cause(prediction),
        ]
        if has_measured:
            measured = run.measured_step_time_s
            cells.append(f"{prediction.step_time_s / measured - 1:+.0%}" if measured else "")
        grid.add_row(*cells)
    if not all(prediction.fits for _, prediction in predicted):
        grid.caption = tr("tokens/s and GiB are those of one device") + tr("; ! does not fit")
    return grid


def _format_interval(prediction: Prediction) -> str:
    assert prediction.step_time_interval_s is not None
    low, high = prediction.step_time_interval_s
    return f"{low:.3g}-{high:.3g}"


def _describe_cause(prediction: Prediction) -> str:
    """Return what takes most of the step."""
    seconds = {name.removesuffix("_s"): value for name, value in prediction.breakdown.items() if name.endswith("_s")}
    largest = max(seconds, key=lambda name: seconds[name])
    return f"{tr(BREAKDOWN[largest])} {seconds[largest] / prediction.step_time_s:.0%}"


def plan_transformer(
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
    """Print the fastest parallel configurations of the transformer in a run file; the flags are `phalanx plan`'s.

    Raises:
        ConfigError: If the file describes no run.
    """
    runs = _read_described(file)
    if len(runs) > 1:
        raise click.UsageError(
            tr(
                "{options} one run, {path} has {count}. Give one of them.",
                options=tr("phalanx plan takes"),
                path=file.name,
                count=len(runs),
            )
        )
    position, described = runs[0]
    if not isinstance(described, dict):
        raise ConfigError(
            tr(
                "{place}: a run is a JSON object, found {found}. Write {{...}}.",
                place=position,
                found=type(described).__name__,
            )
        )
    for limit in alternatives:
        read_limit(limit)  # invalid limits raise before the search
    result = search(described, cluster, limits=limits, top_k=top, time_limit=time_limit)
    reasons = [result.why_not(limit) for limit in alternatives]
    if as_json:
        click.echo(json.dumps(_as_json(result) | {"why_not": reasons}))
    else:
        _print(result, reasons)
    write_simulation(result.best.run, trace, timeline)


def _print(result: RunSearch, reasons: Sequence[str]) -> None:
    console = Console()
    console.print(_candidates_table(result))
    spaces = (f"{_dimension_label(name)} {', '.join(map(str, values))}" for name, values in result.dimensions.items())
    proved = tr(
        "{choices} choices, {priced} priced by a formula: none is faster than {bound} s by it, and the fastest found "
        "is within {gap} % of the best by it. The {simulated} fastest by it were simulated event by event, and the "
        "choices are in the order of that time (step s). docs/predict.md says how good both are.",
        choices=f"{result.choices:,}",
        priced=f"{result.priced:,}",
        simulated=result.simulated,
        bound=f"{result.bound:.4g}",
        gap=format_percent(result.gap),
    )
    console.print(proved, highlight=False)
    if (usd := result.best.usd_per_step) is not None:
        console.print(tr("The first costs {usd} USD a step.", usd=f"{usd:.4g}"), highlight=False)
    console.print(tr("searched: {space}", space="; ".join(spaces)), style="dim", highlight=False)
    console.print(tr("not searched: {why}", why=result.not_searched), style="dim", highlight=False)
    for reason in reasons:
        console.print(reason, highlight=False)


def _dimension_label(name: str) -> str:
    """Return what a dimension is; `micro` is a number elsewhere (`auto/search/request`)."""
    return tr("micro (sequences of a micro-batch)") if name == "micro" else name


def _candidates_table(result: RunSearch) -> Table:
    grid = Table(box=box.SIMPLE, pad_edge=False, padding=0)  # twelve columns in eighty places
    for name in (*result.best.values, tr("step s"), tr("formula s"), "tokens/s", "GiB"):
        grid.add_column(name, justify="right", no_wrap=True)
    for candidate in result.top_k:
        prediction = candidate.prediction
        grid.add_row(
            *map(str, candidate.values.values()),
            "-" if candidate.simulated_s is None else f"{candidate.simulated_s:.4g}",
            f"{prediction.step_time_s:.4g}",
            f"{prediction.tokens_per_s_per_device * prediction.step_time_s / candidate.step_time_s:,.0f}",
            f"{prediction.memory_gib:.1f}",
        )
    return grid


def _as_json(result: RunSearch) -> dict[str, object]:
    return {
        "bound_s": result.bound,
        "gap_percent": result.gap,
        "choices": result.choices,
        "priced": result.priced,
        "simulated": result.simulated,
        "dimensions": result.dimensions,
        "not_searched": result.not_searched,
        "top": [_candidate_as_json(candidate) for candidate in result.top_k],
    }


def _candidate_as_json(candidate: RunCandidate) -> dict[str, object]:
    return candidate.values | {
        "simulated_step_time_s": candidate.simulated_s,
        "usd_per_step": candidate.usd_per_step,
        "prediction": asdict(candidate.prediction),
    }

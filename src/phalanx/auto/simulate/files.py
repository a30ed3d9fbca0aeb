"""`--trace` and `--timeline`: write a simulated step to a trace file or a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.simulate.picture import draw_step
from phalanx.auto.simulate.run import simulate_run
from phalanx.auto.simulate.table import format_rate
from phalanx.auto.simulate.trace import build_trace
from phalanx.auto.simulate.values import SimulatedStep
from phalanx.errors import ConfigError
from phalanx.i18n import tr
from phalanx.units import format_bytes, format_seconds

_FILE = click.Path(dir_okay=False, path_type=Path)


def simulation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options `--trace` and `--timeline`, which `draw` acts on."""
    timeline = "Simulate the step, and draw stages and micro-batches over time to this SVG file."
    trace = "Simulate the step, and write its events and memory to this file, for ui.perfetto.dev."
    command = click.option("--timeline", type=_FILE, metavar="FILE.svg", help=timeline)(command)
    return click.option("--trace", type=_FILE, metavar="FILE.json", help=trace)(command)


def write_simulation(run: RunSpec, trace: Path | None, timeline: Path | None) -> None:
    """Simulate a run if a trace or a picture is wanted, write them, and say so on standard error.

    Raises:
        ConfigError: If a file cannot be written.
        PlanError: If the run's schedule does not take so many stages or micro-batches.
    """
    if trace is not None or timeline is not None:
        write_simulated_step(simulate_run(run), predict(run, interval=False).step_time_s, trace, timeline)


def write_simulated_step(
    simulated: SimulatedStep, predicted_s: float | None, trace: Path | None, timeline: Path | None
) -> None:
    """Write the trace and the picture of a step, those that are wanted, and say so on standard error.

    Args:
        simulated: The step.
        predicted_s: Its seconds by the formula that searches go by; None where there is none.
        trace: Where its events and memory go.
        timeline: Where its picture goes.

    Raises:
        ConfigError: If a file cannot be written.
    """
    if trace is not None:
        write_file(trace, json.dumps(build_trace(simulated)))
        _echo_written(trace, simulated, predicted_s)
    if timeline is not None:
        write_file(timeline, draw_step(simulated))
        _echo_written(timeline, simulated, predicted_s)


def _echo_written(path: Path, simulated: SimulatedStep, predicted_s: float | None) -> None:
    price = "" if simulated.usd_per_step is None else tr("; {usd} USD a step", usd=f"{simulated.usd_per_step:.4g}")
    facts = {
        "step": format_seconds(simulated.simulation.step_time_s),
        "idle": f"{simulated.simulation.idle_share:.1%}",
        "memory": format_bytes(max(simulated.simulation.peaks)),
        "rate": format_rate(simulated),
        "price": price,
    }
    if predicted_s is None:
        message = tr("{path}: {step} a step, idle {idle}, peak rank {memory}, {rate}{price}", path=path, **facts)
    else:
        message = tr(
            "{path}: {step} a step (predicted {predicted}), idle {idle}, peak rank {memory}, {rate}{price}",
            path=path,
            predicted=format_seconds(predicted_s),
            **facts,
        )
    click.echo(message, err=True)


def check_folders(*files: Path | None) -> None:
    """Raise before work rather than after it where its answer could not be written.

    Raises:
        ConfigError: If one of the files that the user named is to be in a folder that is not there.
    """
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(
                tr(
                    "Asked to write {path}, and there is no folder {folder}. Make it, or name another.",
                    path=file,
                    folder=file.parent,
                )
            )


def write_file(path: Path, content: str) -> None:
    """Write a file that the user named.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            tr(
                "{path}: cannot be written ({why}). Give a file in a folder that exists and is yours.",
                path=path,
                why=error.strerror,
            )
        ) from None

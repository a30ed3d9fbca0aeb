"""The command `phalanx plan`: plan a training script, or a transformer run file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click
from rich.console import Console

from phalanx.auto.search.request import PLAN_KNOBS, is_config_limit, read_layer_limit, read_limit
from phalanx.auto.simulate.files import check_folders, simulation_options, write_file, write_simulated_step
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import ConfigError, nearest
from phalanx.i18n import tr
from phalanx.launch.cli.mistakes import flags_of

if TYPE_CHECKING:  # a described transformer needs no torch
    from phalanx.auto.planner.report.result import PlanResult

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    "plan",
    context_settings={"ignore_unknown_options": True},
    epilog="\b\nExample:\n"
    "  phalanx plan train.py --cluster h100x8,nodes=4\n"
    "  phalanx plan model.json --cluster a100x8 --save plan.json",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT ARGUMENTS]...")
@click.option(
    "--cluster",
    help="DEVICExCOUNT,nodes=N, such as h100x8,nodes=16,usd=2.5, or h100x8+a100x8,speed=0.9. Default: the file's own, "
    "or here.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    help="Something to keep to, such as tp<=8 or recompute=none; repeat it. In a script micro is the number of "
    "micro-batches, in a described run the sequences of one.",
)
@click.option("--why-not", "alternatives", multiple=True, help="Say what it would cost to keep to this limit too.")
@click.option("--top", type=click.IntRange(1), default=5, show_default=True, help="How many choices to show.")
@click.option(
    "--time-limit", type=click.FloatRange(0), help="Seconds after which the best so far is shown with its gap."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--optimizer", type=click.Choice(["sgd", "momentum", "adam"]), help="Default: the script's; adam if none."
)
@click.option(
    "--no-return-outputs",
    is_flag=True,
    help="The script's loop lets go of the model's outputs once it has the loss. Default: it does if px.Model trains.",
)
@click.option(
    "--plan",
    "plan_file",
    type=_FILE,
    metavar="FILE.json",
    help="Search for nothing: simulate a step of a script's model under this Plan, also one edited by hand.",
)
@click.option("--save", type=_FILE, metavar="FILE.json", help="Write a script's Plan to this file.")
@click.option("--picture", type=_FILE, metavar="FILE.svg", help="Draw a script's model with its placements.")
@simulation_options
def command(file: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Find the fastest way to train on a cluster, and prove how good it is. The cluster need not be there.

    FILE is a training script, which runs until it would train, with its own arguments after it; or one run as
    `phalanx predict` takes it, without what is searched (- reads it from standard input). With --plan, say what a
    step of the script's model takes under a Plan of yours.
    """
    check_folders(*(options[name] for name in ("save", "picture", "trace", "timeline")))
    plan_file = options.pop("plan_file")
    if file.suffix == ".py" and plan_file is not None:
        options.pop("top")
        _simulate_script(file, arguments, plan_file, **options)
        return
    if file.suffix == ".py":
        _plan_script(file, arguments, **options)
        return
    of_scripts = [options.pop(name) for name in ("optimizer", "no_return_outputs", "save", "picture")]
    if any([arguments, plan_file, *of_scripts]):
        raise click.UsageError(
            tr("Arguments, --optimizer, --no-return-outputs, --plan, --save and --picture are for a script, FILE.py.")
        )
    from phalanx.auto.commands import plan_transformer

    with click.open_file(str(file), encoding="utf-8") as opened:
        plan_transformer(cast(TextIO, opened), **options)


def _plan_script(
    script: Path,
    arguments: tuple[str, ...],
    *,
    cluster: str | None,
    limits: tuple[str, ...],
    alternatives: tuple[str, ...],
    top: int,
    time_limit: float | None,
    as_json: bool,
    optimizer: str | None,
    no_return_outputs: bool,
    save: Path | None,
    picture: Path | None,
    trace: Path | None,
    timeline: Path | None,
) -> None:
    _check_words(cluster, (*limits, *alternatives))
    from phalanx.train.model.plan_script import plan_script

    with _hint_at_own_flag(arguments):
        answer = plan_script(
            script,
            arguments,
            cluster=cluster,
            limits=limits,
            top_k=top,
            time_limit=time_limit,
            alternatives=alternatives,
            **_options_over_script(optimizer, no_return_outputs),
        )
    if as_json:
        click.echo(json.dumps(answer.to_json() | {"why_not": [answer.why_not(limit) for limit in alternatives]}))
    else:
        _print(answer, alternatives)
    if picture is not None:
        from phalanx.auto.planner.report.picture import draw_plan

        write_file(picture, draw_plan(answer))
        click.echo(tr("{path}: the model with its placements", path=picture), err=True)
    if trace is not None or timeline is not None:
        write_simulated_step(answer.simulate(), answer.seconds, trace, timeline)
    if save is not None:
        from phalanx.plan.files import save_plan

        save_plan(answer.plan, save)
        click.echo(
            tr("{path}: train with it, px.distribute(..., plan=phalanx.plan.load_plan('{path}'))", path=save), err=True
        )


def _simulate_script(
    script: Path,
    arguments: tuple[str, ...],
    plan_file: Path,
    *,
    cluster: str | None,
    as_json: bool,
    optimizer: str | None,
    no_return_outputs: bool,
    trace: Path | None,
    timeline: Path | None,
    **of_a_search: Any,
) -> None:
    """Print what a step of a script's model takes under a Plan."""
    flags = {"limits": "--limit", "alternatives": "--why-not", "time_limit": "--time-limit"}
    refused = [flags.get(name, f"--{name}") for name, value in of_a_search.items() if value not in (None, ())]
    if refused:
        raise click.UsageError(
            tr("--plan simulates that Plan and searches for none. Leave out {options}.", options=", ".join(refused))
        )
    _check_words(cluster, ())
    from phalanx.auto.simulate.table import build_step_table
    from phalanx.plan.files import load_plan

    plan = load_plan(plan_file)
    from phalanx.train.model.plan_script import simulate_script

    with _hint_at_own_flag(arguments):
        simulated = simulate_script(
            script, arguments, plan, cluster=cluster, **_options_over_script(optimizer, no_return_outputs)
        )
    if as_json:
        click.echo(json.dumps(simulated.to_json()))
    else:
        Console().print(build_step_table(simulated))
    write_simulated_step(simulated, None, trace, timeline)


def _options_over_script(optimizer: str | None, no_return_outputs: bool) -> dict[str, Any]:
    """Return the options that replace what the script says itself."""
    chosen = {} if optimizer is None else {"optimizer": optimizer}
    return chosen | ({"return_outputs": False} if no_return_outputs else {})


@contextmanager
def _hint_at_own_flag(arguments: Iterable[str]) -> Iterator[None]:
    """Where a script refuses its command line, name the flag of this command that an argument may be a slip for."""
    try:
        yield
    except ConfigError as error:
        ended = error.__context__
        if not (isinstance(ended, SystemExit) and ended.code == 2):  # as argparse and click end
            raise
        names = [argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("--")]
        own_flags = [flag.lstrip("-") for flag in flags_of(click.get_current_context())]
        hints = [
            tr("If --{flag} was meant for `phalanx plan`: did you mean '--{near}'?", flag=name, near=near)
            for name in names
            if name not in own_flags and (near := nearest(name, own_flags)) is not None
        ]
        raise ConfigError(" ".join([str(error), *hints[:1]])) from None


def _check_words(cluster: str | None, limits: Iterable[str]) -> None:
    """Raise before the script runs where words are wrong; those that name layers are read when these are known."""
    if cluster is not None:
        read_cluster(cluster)
    for limit in limits:
        if is_config_limit(limit):
            read_limit(limit, PLAN_KNOBS)
        else:
            read_layer_limit(limit)


def _print(answer: PlanResult, alternatives: Iterable[str]) -> None:
    console = Console()
    console.print(answer)
    for limit in alternatives:
        console.print(answer.why_not(limit), highlight=False, markup=False)

"""The command `phalanx verify`: does a script compute the same on N ranks as on one, or as before?"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import click

from phalanx.diagnose.verify.runs import ComparedRun, checked_out, record_run
from phalanx.diagnose.verify.verdict import RunVerdict
from phalanx.launch.reports.terminal import fit_terminal

_SCRIPT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("verify", context_settings={"allow_interspersed_args": False})
@click.option("-n", "--nproc-per-node", "ranks", type=click.IntRange(1), default=2, show_default=True, help="Ranks.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Optimizer steps to compare.")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Run with so many logical replicas: bits must agree, with dropout too. For scripts that call px.distribute.",
)
@click.option(
    "--plan",
    "plans",
    type=_SCRIPT,
    multiple=True,
    metavar="FILE.json",
    help="Compare two Plans on N ranks (give it twice), or one Plan on N ranks with the script alone on one.",
)
@click.option("--against", metavar="COMMIT", help="Compare with this commit of the script's repository, on N ranks.")
@click.option("--control/--no-control", default=True, help="Measure rounding by one more run of the first kind.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=900, show_default=True, help="Seconds a run.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep records and logs in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.argument("script", type=_SCRIPT)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    ranks: int,
    steps: int,
    replicas: int | None,
    plans: tuple[Path, ...],
    against: str | None,
    control: bool,
    timeout_s: float,
    keep: Path | None,
    as_json: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT, unchanged, on 1 rank and on N, and compare losses, gradients and weights step by step.

    \b
    Example:
      phalanx verify train.py -n 2 --steps 20        1 rank and 2 ranks
      phalanx verify -n 2 --against main train.py    2 ranks, now and at a commit
      phalanx verify -n 4 --plan a.json --plan b.json train.py

    Names the first step and tensor that differ, by how much, and the likely cause. Exits with 0 if the runs are equal
    but for rounding, with 1 if they differ.
    """  # noqa: D301
    if len(plans) > 2 or (plans and against):
        raise click.UsageError("Give --plan once or twice, or --against, not both.")
    with _work_folder(keep) as folder:
        alone = ComparedRun(label="1 rank", ranks=1, script=script.resolve(), arguments=arguments, replicas=replicas)
        several = replace(alone, label=f"{ranks} ranks", ranks=ranks)
        with checked_out(against, script, folder) if against else nullcontext(None) as before:
            first, second = _pair(alone, several, plans, against, before)
            verdict = _verify(first, second, folder, steps, timeout_s, control=control and replicas is None)
    if as_json:
        click.echo(json.dumps(verdict.to_json()))
    else:
        click.echo(fit_terminal(verdict.text()))
    sys.exit(0 if verdict.is_equal else 1)


def _pair(
    alone: ComparedRun,
    several: ComparedRun,
    plans: tuple[Path, ...],
    against: str | None,
    before: tuple[Path, Path] | None,
) -> tuple[ComparedRun, ComparedRun]:
    """Return the reference and the run that is compared with it."""
    if before is not None:
        folder, script = before
        return replace(several, label=f"commit {against}", folder=folder, script=script), several
    if len(plans) == 2:
        return tuple(replace(several, label=f"Plan {plan.name}", plan=plan) for plan in plans)  # type: ignore[return-value]
    if plans:
        return alone, replace(several, label=f"Plan {plans[0].name} on {several.label}", plan=plans[0])
    return alone, several


def _verify(
    first: ComparedRun, second: ComparedRun, folder: Path, steps: int, timeout_s: float, *, control: bool
) -> RunVerdict:
    from phalanx.diagnose.verify.compare import compare_runs

    specs = {"first": first, "second": second}
    if control:
        specs["control"] = replace(first, label=f"{first.label}, last bit of the weights changed", perturb=True)
    runs = {}
    for name, spec in specs.items():
        progress = f"running {spec.script.name} with {spec.label}, {steps} steps ..."
        click.echo(fit_terminal(progress, sys.stderr), err=True)
        (folder / name).mkdir()
        runs[name] = record_run(spec, folder / name, steps=steps, timeout_s=timeout_s)
    return compare_runs(runs["first"], runs["second"], runs.get("control"))


@contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise click.UsageError(f"--keep {keep} is not empty. Give a new folder.")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="phalanx-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

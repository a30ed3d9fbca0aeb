"""The command `phalanx replay`: do a step of a run again, alone, and say whether its gradients have the same bits."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from phalanx.checkpoint.replay import ReplayRequest
from phalanx.cluster.env.environment import REPLAY_VARIABLE
from phalanx.diagnose.recorded_process import last_lines, run_recorded
from phalanx.diagnose.replay.flight import Flight, first_mismatch, read_flight
from phalanx.errors import ConfigError, LaunchError


@click.command("replay", epilog="\b\nExample:\n  phalanx replay log --step 1204\n  phalanx replay log --find nan")
@click.option("--step", type=click.IntRange(0), help="The update to do again, from 0.")
@click.option(
    "--find",
    type=click.Choice(["nan", "spike", "first-difference"]),
    help="The first update with a loss that is not finite, or far above the others; or with other bits than again.",
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=3600, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("log"))
def command(run: Path, step: int | None, find: str | None, timeout_s: float, as_json: bool) -> None:
    """Do a step of RUN again in one process, from the nearest checkpoint, and compare the digests of gradients.

    RUN is the log folder of a job that was started with `phalanx run --flight-log` (default: log). Bits are compared
    where it trained with logical replicas. Exits with 0 if they agree, with 1 if not.
    """
    flight = read_flight(run)
    target = _target(flight, step, find)
    start, checkpoint = (0, None) if find == "first-difference" else flight.nearest_checkpoint(target)
    if find == "first-difference" and (loaded := flight.checkpoints.get(min(flight.updates))):
        start, checkpoint = min(flight.updates), loaded
    replay, output = _replay(flight, target, start, checkpoint, timeout_s, checks_nan=find == "nan")
    if target not in replay.updates and not output:
        raise LaunchError(
            f"the replay began with step {start} and did not come to step {target}: it made steps "
            f"{sorted(replay.updates)}. Does the script resume from the checkpoint, and make as many steps as the run?"
        )
    mismatch = None if flight.replicas is None else first_mismatch(flight, replay)
    can_compare = flight.replicas is not None and (mismatch is not None or target in replay.updates)
    report = _report(flight, replay, target, start, checkpoint) | {
        "mismatch": None if mismatch is None else asdict(mismatch),
        "equal": mismatch is None if can_compare else None,
        "error": output,
    }
    click.echo(json.dumps(report) if as_json else _text(report, None if mismatch is None else mismatch.text()))
    sys.exit(1 if mismatch is not None else 0)


def _target(flight: Flight, step: int | None, find: str | None) -> int:
    """Return the update to do again.

    Raises:
        ConfigError: If it was not logged, or nothing was found.
    """
    if step is None and find is None:
        raise click.UsageError("Say which step: --step N, or --find nan, spike or first-difference.")
    if find == "first-difference" and flight.replicas is None:
        raise ConfigError(
            "the run had no logical replicas, so its bits depend on the number of ranks and a first difference says "
            "nothing. Train with --replicas N, or name a --step."
        )
    if step is None:
        found_step = {"nan": flight.find_nan, "spike": flight.find_spike}.get(str(find), lambda: flight.last)()
        if found_step is None:
            raise ConfigError(f"no step with a {find} was found in the losses of {len(flight.updates)} steps.")
        return found_step
    if step not in flight.updates:
        raise ConfigError(
            f"step {step} is not in the flight log, which has steps {min(flight.updates)} to {flight.last}. Older ones "
            "were dropped to bound its size."
        )
    return step


def _replay(
    flight: Flight, target: int, start: int, checkpoint: str | None, timeout_s: float, *, checks_nan: bool
) -> tuple[Flight, str]:
    """Run the script again up to an update; return what it logged, and its last lines if it failed.

    Raises:
        LaunchError: If it made no step, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-replay-") as folder:
        log = Path(folder) / "again" / "flight.0.jsonl"
        variables = os.environ | {REPLAY_VARIABLE: ReplayRequest(str(log), target + 1, start, checkpoint).to_text()}
        variables |= {"PHALANX_CHECK_NAN_INF": "1"} if checks_nan else {}
        variables |= (
            {} if flight.replicas is None or flight.threads is None else {"OMP_NUM_THREADS": str(flight.threads)}
        )
        replicas = [] if flight.replicas is None else ["--replicas", str(flight.replicas)]
        command_line = [sys.executable, "-m", "phalanx.launch", "-n", "1", "--log-dir", f"{folder}/log", *replicas]
        output = Path(folder) / "output.txt"
        code = run_recorded(
            [*command_line, *_script_words(flight)],
            folder=flight.folder,
            variables=variables,
            output=output,
            timeout_s=timeout_s,
            title="the replay",
            advice="Give a longer --timeout.",
        )
        error = _last_error(Path(folder) / "log")
        if not log.exists() or (code and not error):
            raise LaunchError(
                f"the replay failed with exit code {code}. The last lines it printed:\n{last_lines(output)}"
            )
        if error and not checks_nan:
            raise LaunchError(f"the replay failed: {error}")
        return (_read_again(log, error), error)


def _script_words(flight: Flight) -> list[str]:
    """Return the words of the launcher's command line that started the script."""
    script, *arguments = flight.script
    return [*(script.split(" ", 1) if script.startswith("-m ") else [script]), *arguments]


def _read_again(log: Path, error: str) -> Flight:
    try:
        return read_flight(log.parent)
    except ConfigError:
        if not error:
            raise
        return Flight([], "")


def _last_error(folder: Path) -> str:
    records = sorted(folder.glob("error.*.json"))
    return str(json.loads(records[0].read_text())["message"]) if records else ""


def _report(flight: Flight, replay: Flight, target: int, start: int, checkpoint: str | None) -> dict[str, Any]:
    entries, again = flight.updates[target], replay.updates.get(target, {})
    first = next(iter(entries.values()))
    return {
        "step": target,
        "from_step": start,
        "checkpoint": checkpoint,
        "replicas": flight.replicas,
        "loader": {name: first[name] for name in ("epoch", "position", "seed") if name in first},
        "losses": {rank: entry["loss"] for rank, entry in entries.items()},
        "losses_again": [x for entry in again.values() for x in entry["loss"]],
        "samples": {rank: entry["samples"] for rank, entry in entries.items() if "samples" in entry},
    }


def _text(report: dict[str, Any], mismatch: str | None) -> str:
    begun = f"checkpoint {report['checkpoint']}" if report["checkpoint"] else "the start of the run"
    lines = [f"step {report['step']}, done again from {begun}: losses of the ranks {list(report['losses'].values())}"]
    if report["loader"]:
        lines.append("loader: " + ", ".join(f"{name} {value}" for name, value in report["loader"].items()))
    if report["error"]:
        lines.append(report["error"])
    if report["equal"] is None and report["replicas"] is None:
        lines.append(
            f"losses now: {report['losses_again']}. The run had no logical replicas, so its bits depend on the ranks "
            "and are not compared. Train with --replicas N to have them compared."
        )
    elif report["equal"]:
        lines.append("AGREES: all digests of gradients, of each replica and of their sum, have the same bits.")
    elif report["equal"] is False:
        lines.append(f"DIFFERS: {mismatch}. The rank's memory, processor or network changed a number, or its code did.")
    return "\n".join(lines)

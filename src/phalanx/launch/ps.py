"""`phalanx ps`: the jobs that run on this host, with their processes and how far they are."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from phalanx.launch import processes, registry


def collect() -> list[dict[str, Any]]:
    """Return every running job with its processes, each with its last step and loss."""
    found = registry.jobs()
    for job in found:
        job["age_s"] = round(time.time() - job["started"], 1)
        for process in job["processes"]:
            event = registry.last_event(process["events"])
            process["step"], process["loss"] = event.get("step"), event.get("loss")
            process["alive"] = processes.start_ticks(process["pid"]) is not None
    return found


def render(jobs: list[dict[str, Any]]) -> str:
    """Return the jobs as aligned text."""
    if not jobs:
        return "No job is running on this host under your account.\n"
    lines = []
    for job in jobs:
        lines.append(
            f"job {job['job_id']}  {job['script']}  {job['mode']}  launcher pid {job['pid']}  {_age(job['age_s'])}"
        )
        lines.append(f"  {'role':<13}{'rank':>4}{'pid':>9}{'step':>9}{'loss':>12}  log")
        lines += [_row(process) for process in job["processes"]] or ["  starting"]
    return "\n".join(lines) + "\n"


def _row(process: dict[str, Any]) -> str:
    step = "-" if process["step"] is None else str(process["step"])
    loss = "-" if process["loss"] is None else f"{float(process['loss']):.5g}"
    numbers = f"{process['rank']:>4}{process['pid']:>9}{step:>9}{loss:>12}"
    return f"  {process['role']:<13}{numbers}  {process['log']}{'' if process['alive'] else ' (ended)'}"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


@click.command(name="ps")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def command(as_json: bool) -> None:
    """List the running jobs with their ranks, pids, step and loss."""
    jobs = collect()
    sys.stdout.write(json.dumps(jobs) + "\n" if as_json else render(jobs))

"""`phalanx why`: say why a running job is stalled."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.hang.jobs import find_ranks
from phalanx.launch.hang.locations import Location
from phalanx.launch.hang.observe import Observation, Watched, observe
from phalanx.launch.hang.verdict import Verdict, judge
from phalanx.launch.job import registry
from phalanx.launch.reports.terminal import fit_terminal

_BETWEEN_S = 1.5
"""Between two looks: who does the same in both, waits. A rank tells its calls once a second, so it did in between."""


@click.command(name="why", epilog="\b\nExample:\n  phalanx why\n  phalanx why --pid 4711")
@click.argument("job", required=False)
@click.option("--pid", type=click.IntRange(1), help="A rank, or what started it: torchrun, mpirun, srun, a script.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def command(job: str | None, pid: int | None, as_json: bool) -> None:
    """Say which rank of a running job the others wait for, where it is, and why.

    JOB is an id of `phalanx ps`; the one that runs, when omitted. --pid names a process of any job instead, also one
    that torchrun started. Nothing is changed, and no rank is stopped.
    """
    processes = find_job(job, pid)
    first = observe(processes)
    time.sleep(_BETWEEN_S)
    observations = [settled(*pair) for pair in zip(first, observe(processes), strict=True)]
    verdict = judge(observations)
    if verdict is None or not verdict.culprits:
        # Some ranks are on other nodes, whose launchers saw them.
        verdict = reported_verdict(processes) or verdict
    slow = slow_lines(processes)
    if as_json:
        click.echo(json.dumps(_as_json(observations, verdict, slow), indent=1))
        return
    click.echo(fit_terminal(render(observations, verdict, slow)), nl=False)


def find_job(job: str | None, pid: int | None) -> list[Watched]:
    """Return the processes of a job on this host.

    Args:
        job: Id of a job of `phalanx ps`, or the beginning of one; None for the only one.
        pid: A process of the job, in place of the id.

    Raises:
        LaunchError: If there is no such job, or more than one.
    """
    if job is not None and pid is not None:
        raise LaunchError(tr("JOB and --pid are two ways to name a job. Give one of them."))
    running = registry.jobs()
    if pid is not None:
        chosen = [j for j in running if pid in (j["pid"], *(p["pid"] for p in j["processes"]))]
        return _processes_of(chosen[0]) if chosen else find_ranks(pid)
    chosen = [j for j in running if job is None or j["job_id"].startswith(job)]
    if len(chosen) != 1:
        names = ", ".join(f"{j['job_id']} ({j['script']})" for j in running) or tr("none")
        raise LaunchError(
            tr(
                "{count} jobs match; running jobs: {names}. Name one, or a process by --pid.",
                count=len(chosen),
                names=names,
            )
        )
    return _processes_of(chosen[0])


def _processes_of(job: dict[str, Any]) -> list[Watched]:
    if not job["processes"]:
        raise LaunchError(tr("Job {job} has not started its processes yet. Ask again later.", job=job["job_id"]))
    return [Watched(title=_title(process), role=process["role"], pid=process["pid"]) for process in job["processes"]]


def _title(process: dict[str, Any]) -> str:
    """`rank 1`, `server 0`; of a member of an elastic job that joins or leaves, and is no rank, `member n0.2`."""
    if process["rank"] is None:
        return f"member {process['member']}"
    return f"{'rank' if process['role'] == 'worker' else process['role'].replace('_', ' ')} {process['rank']}"


def settled(before: Observation, now: Observation) -> Observation:
    """Return the second of two looks; what changed since the first is taken for work, not for a wait."""
    same_calls = {call.number for call in now.calls} & {call.number for call in before.calls}
    has_moved = now.activity and before.activity and now.activity.progress != before.activity.progress
    if now.location.frames == before.location.frames and (same_calls or not now.calls) and not has_moved:
        return now
    activity = None if now.activity is None else replace(now.activity, calls=())
    location = now.location if now.location.kind == "unknown" else replace(now.location, kind="code")
    return replace(now, location=location, activity=activity, cpu=max(now.cpu, before.cpu))


def slow_lines(processes: Sequence[Watched]) -> list[str]:
    """Return which of these processes were slow in the last minute, and why, as the launcher of their job says."""
    return [line for job in _jobs_of(processes) for line in job.get("slow") or ()]


def reported_verdict(processes: Sequence[Watched]) -> Verdict | None:
    """Return why the job of these processes hangs, as the launchers of all its nodes say; None where it continues."""
    reports = [dict(job["hang"]) for job in _jobs_of(processes) if job.get("hang")]
    for report in reports:
        del report["since"]
    return Verdict(**reports[0]) if reports else None


def _jobs_of(processes: Sequence[Watched]) -> list[dict[str, Any]]:
    pids = {process.pid for process in processes}
    return [job for job in registry.jobs() if pids & {process["pid"] for process in job["processes"]}]


def render(observations: Sequence[Observation], verdict: Verdict | None, slow: Sequence[str] = ()) -> str:
    """Return the verdict, and where every process is, as text."""
    if verdict is not None:
        head = [*verdict.lines]
    elif slow:
        head = [tr("the job is not hung, but slow. In the last minute:"), *slow]
    else:
        head = [tr("no rank is seen to wait for another: the job is making progress")]
    width = max(len(o.title) for o in observations)
    rows = [f"  {o.title:<{width}}  {o.pid:>8}  {_doing(o, verdict)}" for o in observations]
    return "\n".join([*head, "", *rows]) + "\n"


def _doing(observation: Observation, verdict: Verdict | None) -> str:
    if observation.ended:
        return observation.ended
    location: Location = observation.location
    where = str(location) if location.frames else observation.problem
    if verdict is not None and observation.title in verdict.waiting:
        return tr("waits at {place}", place=where)
    if observation.is_stopped:
        return tr("stopped at {place}", place=where)
    return f"{observation.cpu:.0%} CPU, {where}"


def _as_json(observations: Sequence[Observation], verdict: Verdict | None, slow: Sequence[str]) -> dict[str, Any]:
    return {
        "hung": verdict is not None,
        "slow": [*slow],
        "verdict": None if verdict is None else verdict.to_json(),
        "processes": [observation.to_json() for observation in observations],
    }

"""The registry of jobs that run on this host, and `phalanx ps`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from phalanx.cluster import proc
from phalanx.cluster.disk_space import named_errors
from phalanx.cluster.runtime_folder import runtime_folder
from phalanx.files import temporary_path, write_atomically
from phalanx.i18n import tr
from phalanx.launch.hang.verdict import Verdict
from phalanx.units import format_length

logger = logging.getLogger("phalanx.launch")

_REPORTED = ("step", "loss", "samples_per_s", "replicas", "share", "ms_per_sample")
"""What is shown of a rank's last event."""


class RegistryEntry:
    """The entry of one running job; a context that removes it at the end. Without room for it there is a warning."""

    def __init__(self, folder: Path, job_id: str, script: str, mode: str, control: Path | None = None) -> None:
        self._path = folder / f"{os.getpid()}.json"
        self._was_warned = False
        self._job: dict[str, Any] = {
            "job_id": job_id,
            "pid": os.getpid(),
            "start_ticks": proc.start_ticks(os.getpid()),
            "started": time.time(),
            "script": script,
            "mode": mode,
            "processes": [],
            "control": None if control is None else str(control),
            "elastic": {},
            "hang": None,
            "slow": [],
            "server_change": "",
        }

    def begin_attempt(self) -> None:
        """Publish that an attempt starts, of which nothing is known yet."""
        self._job |= {"processes": [], "elastic": {}, "hang": None, "slow": [], "server_change": ""}
        self._publish()

    def write(self, listed: list[dict[str, Any]], elastic: dict[str, Any] | None = None) -> None:
        """Publish the processes of the current attempt, and the members of an elastic one."""
        self._job |= {"processes": listed, "elastic": elastic or {}}
        self._publish()

    def write_servers(self, change: str) -> None:
        """Publish how far a change of the number of servers is, or with "" that it is over."""
        self._job["server_change"] = change
        self._publish()

    def write_hang(self, verdict: Verdict | None) -> None:
        """Publish why the job is stalled, or that it does again."""
        self._job["hang"] = None if verdict is None else {"since": time.time() - verdict.waited_s, **verdict.to_json()}
        self._publish()

    def write_slow(self, lines: Sequence[str]) -> None:
        """Publish which ranks are slow, and why; no lines where none is."""
        if self._job["slow"] != [*lines]:
            self._job["slow"] = [*lines]
            self._publish()

    def _publish(self) -> None:
        record = json.dumps(self._job)
        try:
            with named_errors(temporary_path(self._path), len(record)):
                write_atomically(self._path, record)
        except OSError as error:
            if not self._was_warned:
                logger.warning(
                    tr("`phalanx ps` will not show this job: {why}", why=f"{error.filename}: {error.strerror}")
                )
            self._was_warned = True

    def __enter__(self) -> RegistryEntry:
        self.begin_attempt()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def jobs() -> list[dict[str, Any]]:
    """Return the jobs whose launcher lives, oldest first; entries of dead launchers are removed."""
    alive = []
    for path in runtime_folder().glob("*.json"):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue  # The job ended between the two calls.
        if proc.start_ticks(job["pid"]) == job["start_ticks"]:
            alive.append(job)
        else:
            path.unlink(missing_ok=True)
    return sorted(alive, key=lambda job: float(job["started"]))


def last_event(path: str) -> dict[str, Any]:
    """Return the last complete event a rank wrote, or an empty one."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue  # The first line of the window may be cut.
        if isinstance(event, dict) and "step" in event:
            return event
    return {}


def collect() -> list[dict[str, Any]]:
    """Return every running job with its processes, each with its last step, loss and speed, and its part of batches."""
    from phalanx.launch.reports.server_status import read_statuses  # not by a launcher, which starts without pydantic

    running = jobs()
    for job in running:
        job["age_s"] = round(time.time() - job["started"], 1)
        for process in job["processes"]:
            event = last_event(process["events"])
            process |= {name: event.get(name) for name in _REPORTED}
            process["alive"] = proc.start_ticks(process["pid"]) is not None
        job["servers"] = read_statuses(path for process in job["processes"] if (path := process.get("status")))
    return running


def render(listed: list[dict[str, Any]]) -> str:
    """Return the jobs as aligned text."""
    from phalanx.launch.reports.server_status import server_lines

    if not listed:
        return "No job is running on this host under your account.\n"
    lines = []
    for job in listed:
        age = format_length(job["age_s"])
        lines.append(f"job {job['job_id']}  {job['script']}  {job['mode']}  launcher pid {job['pid']}  {age}")
        is_balanced = any(process["share"] is not None for process in job["processes"])
        shares = f"{'share':>15}{'ms/sample':>11}" if is_balanced else ""
        lines.append(f"  {'role':<13}{'rank':>4}{'pid':>9}{'step':>9}{'loss':>12}{'samples/s':>11}{shares}  log")
        lines += [_row(process, is_balanced=is_balanced) for process in job["processes"]] or ["  starting"]
        lines += [f"  {line}" for line in server_lines(job.get("servers", ()))]
        if change := job.get("server_change"):
            lines.append(f"  {change}")
        lines += _elastic_lines(job.get("elastic") or {})
        if hang := job.get("hang"):
            lines.append(f"  hung: {hang['lines'][0]} (phalanx why {job['job_id']})")
        lines += [f"  slow: {line}" for line in job.get("slow") or ()]
    return "\n".join(lines) + "\n"


def _elastic_lines(elastic: dict[str, Any]) -> list[str]:
    """Return who the members of an elastic job are, and what changed them last."""
    if not elastic:
        return []
    noun = elastic.get("noun", "ranks")
    size = f"{len(elastic['members'])} of {elastic['least']} to {elastic['most']} {noun}, target {elastic['target']}"
    # Workers keep their numbers; which member a rank is changes.
    names = [f"{member['rank']} is {member['id']}" for member in elastic["members"]] if noun == "ranks" else []
    lines = [f"  membership epoch {elastic['epoch']}: {'; '.join([size, *([', '.join(names)] if names else [])])}"]
    for event in elastic["events"]:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        if event["kind"] == "split_push":
            lines.append(f"    {at}  {event['reason']}")
            continue
        stall = f", stood still for {max(event['seconds'].values()):.2f} s" if event["seconds"] else ""
        redone = f", {event['redone']} samples computed again" if event["redone"] else ""
        lines.append(f"    {at}  epoch {event['epoch']}: {event['reason']}{stall}{redone}")
    return lines


def _row(process: dict[str, Any], *, is_balanced: bool) -> str:
    step = "-" if process["step"] is None else str(process["step"])
    loss = "-" if process["loss"] is None else f"{float(process['loss']):.5g}"
    speed = "-" if process["samples_per_s"] is None else f"{float(process['samples_per_s']):.5g}"
    rank = "-" if process["rank"] is None else process["rank"]  # a member that joins or leaves has none
    numbers = f"{rank:>4}{process['pid']:>9}{step:>9}{loss:>12}{speed:>11}"
    if is_balanced:
        each = process["ms_per_sample"]
        numbers += f"{_share(process):>15}{'-' if each is None else f'{float(each):.4g}':>11}"
    return f"  {process['role']:<13}{numbers}  {process['log']}{'' if process['alive'] else ' (ended)'}"


def _share(process: dict[str, Any]) -> str:
    """Return a rank's part of each global batch: as its replicas, or as a share of the samples."""
    if process["share"] is None:
        return "-"
    share = f"{100 * float(process['share']):.3g} %"
    return share if process["replicas"] is None else f"{process['replicas']} replicas"


@click.command(name="ps", epilog="\b\nExample:\n  phalanx ps\n  phalanx ps --json\n  phalanx ps --metrics")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.option("--metrics", is_flag=True, help="Print what parameter servers count as Prometheus text.")
def command(as_json: bool, metrics: bool) -> None:
    """List the running jobs with their ranks, pids, step, loss and speed, and the tables of parameter servers."""
    from phalanx.launch.reports.server_status import JobStatuses, ServerStatus, prometheus_lines

    listed = collect()
    if metrics:
        sys.stdout.writelines(
            f"{line}\n" for line in prometheus_lines([JobStatuses(j["job_id"], j["servers"]) for j in listed])
        )
        return
    if as_json:
        sys.stdout.write(json.dumps(listed, default=ServerStatus.model_dump) + "\n")
    else:
        sys.stdout.write(render(listed))

"""Servers and workers of jobs with tables are killed and frozen: no acknowledged update is lost, none made twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.elastic_jobs import ROOT, read_lines
from benchmarks.soak.elastic import hang_of
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult
from benchmarks.soak.servers_rank import Counts, counts_of
from phalanx.errors import PhalanxError
from phalanx.ps.snapshot_lookup import Lookup

SCRIPT = ROOT / "benchmarks" / "soak" / "servers_rank.py"
SERVERS, WORKERS = 2, 2
STEPS, FAULTS = 400, 8
TIMEOUT_S = 90.0
Lines = dict[int, list[dict[str, Any]]]


def processes_are_lost(
    folder: Path, seed: int, mode: str, *, count: int = FAULTS, steps: int = STEPS, is_spilled: bool = False
) -> SoakResult:
    """Kill servers, and workers where the mode lets them begin anew; freeze either for a while; two at once.

    Of tables in files servers alone are killed, and nothing is frozen.
    """
    generator = random.Random(seed)
    moments = sorted(generator.sample(range(5, steps * WORKERS * 3 // 4), count))
    faults: list[str] = []
    has_lost_worker, started = False, time.monotonic()
    with LaunchedJob(folder) as job:
        flags = ("--server-num", SERVERS, "--worker-num", WORKERS, "--max-restarts", 100)
        script = (SCRIPT, "--folder", folder, "--mode", mode, "--steps", steps, "--save-every", 40)
        script += ("--spilled",) * is_spilled
        job.start(*flags, *script, env={"PHALANX_SERVER_RETRY_S": "60"})
        for moment in moments:
            if not job.wait_until(lambda moment=moment: steps_of(read_lines(folder)) >= moment):  # type: ignore[misc]
                break
            victims = generator.sample([("server", n) for n in range(SERVERS)], 1 + (generator.random() < 0.3))
            if generator.random() < 0.35 and not is_spilled:
                victims = [("worker", generator.randrange(WORKERS))]
            may_kill = victims[0][0] == "server" or mode == "async"
            is_killed = may_kill and (generator.random() < 0.7 or is_spilled)
            number = signal.SIGKILL if is_killed else signal.SIGSTOP
            pause_s = generator.uniform(0.1, 1.5)
            if not (pids := _send(folder, victims, number)):
                continue
            has_lost_worker |= number == signal.SIGKILL and victims[0][0] == "worker"
            names = " and ".join(f"{kind} {rank}" for kind, rank in victims)
            faults.append(f"{mode}: {number.name} of {names} after {moment} steps")
            if number == signal.SIGSTOP:
                time.sleep(pause_s)
                for pid in pids:
                    with suppress(ProcessLookupError):  # the job ended without it
                        os.kill(pid, signal.SIGCONT)
        codes = job.wait(TIMEOUT_S)
        problems = [*hang_of(job), *(f"the launcher ended with {code}" for code in codes if code)]
        lines = read_lines(folder)
        counts = counts_of(is_spilled=is_spilled)
        problems += update_problems(lines, mode, is_exact=not has_lost_worker, steps=steps, counts=counts)
        problems += snapshot_problems(folder, lines, mode, counts)
        problems += [f"{each} is left" for each in job.remaining()]
        return SoakResult(
            "servers spilled" if is_spilled else "servers",
            seed,
            faults,
            problems,
            time.monotonic() - started,
            job.report(),
        )


def server_stays_frozen(folder: Path, seed: int) -> SoakResult:
    """Freeze a server for good: the report must name it, and the job end by itself."""
    generator = random.Random(seed)
    moment, rank, started = generator.randrange(30, 200), generator.randrange(SERVERS), time.monotonic()
    mode, faults = generator.choice(["sync", "async", "geo"]), []
    with LaunchedJob(folder) as job:
        flags = ("--server-num", SERVERS, "--worker-num", WORKERS, "--hang-after", 1, "--hang-timeout", 1)
        job.start(*flags, SCRIPT, "--folder", folder, "--mode", mode, "--steps", 100_000)
        problems = []
        if job.wait_until(lambda: steps_of(read_lines(folder)) >= moment) and _send(
            folder, [("server", rank)], signal.SIGSTOP
        ):
            faults.append(f"{mode}: SIGSTOP of server {rank} for good after {moment} steps")
        codes = job.wait(TIMEOUT_S)
        output = job.output()
        if codes != [124] or f"server {rank}" not in output or "stopped by a signal" not in output:
            problems.append(f"server {rank} is frozen, and the launcher ended with {codes} and did not say so")
        problems += [*hang_of(job), *(f"{each} is left" for each in job.remaining())]
        return SoakResult("server frozen", seed, faults, problems, time.monotonic() - started, job.report())


def steps_of(lines: Lines) -> int:
    """Return the updates that workers have begun, in all."""
    return sum("started" in line for own in lines.values() for line in own)


def _send(folder: Path, victims: list[tuple[str, int]], number: signal.Signals) -> list[int]:
    """Send a signal to the present processes of some ranks; returns those that took it."""
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for pid, own in read_lines(folder).items():
        if own and "kind" in own[0]:
            key = own[0]["kind"], own[0]["rank"]
            newest[key] = max(newest.get(key, (-1, 0)), (own[0]["attempt"], pid))
    reached = []
    for victim in victims:
        _, pid = newest.get(victim, (0, 0))
        is_done = victim[0] == "worker" and (folder / f"done.{victim[1]}").exists()
        if pid and not is_done and _is_of(pid, folder):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def _is_of(pid: int, folder: Path) -> bool:
    """Return whether a process runs that has the log of this folder open: a number may belong to another by now."""
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return str(folder / f"log.{pid}.jsonl") in files


def update_problems(lines: Lines, mode: str, *, is_exact: bool, steps: int, counts: Counts | None = None) -> list[str]:
    """Return in words which updates are lost or were made twice."""
    counts = counts or counts_of(is_spilled=False)
    last = next((line for own in lines.values() for line in own if "rows" in line), None)
    if last is None:
        return ["no worker came to the end"]
    if not last["is_whole"]:
        return ["a row has values that differ"]
    made = -np.array(last["rows"]) * (1 if mode == "async" else WORKERS)  # the others average over workers
    started, acknowledged = np.zeros(counts.rows), np.zeros(counts.rows)
    for own in lines.values():
        newest = max((line["acknowledged"] for line in own if "acknowledged" in line), default=-1)
        for line in own:
            if "started" in line:
                started[line["ids"]] += 1
                acknowledged[line["ids"]] += line["started"] <= newest
    if is_exact:
        expected = sum(
            np.bincount(counts.ids_of(rank, step), minlength=counts.rows)
            for rank in range(WORKERS)
            for step in range(steps)
        )
        return [] if (made == expected).all() else [f"updates are {made.tolist()}, not {expected.tolist()}"]
    problems = [f"row {n}: {acknowledged[n]:g} acknowledged, {made[n]:g} made" for n in _where(made < acknowledged)]
    return problems + [f"row {n}: {started[n]:g} sent, {made[n]:g} made" for n in _where(made > started)]


def _where(mask: Any) -> Iterator[int]:
    return iter(np.flatnonzero(mask).tolist())


def snapshot_problems(folder: Path, lines: Lines, mode: str, counts: Counts) -> list[str]:
    """Return in words what is wrong with the newest snapshot: it has all that worker 0 had sent before."""
    if not any("saved" in line for own in lines.values() for line in own):
        return []
    try:
        lookup = Lookup(folder / "snapshot")
        made = -lookup.rows(counts.table.name, np.arange(counts.rows))[:, 0] * (1 if mode == "async" else WORKERS)
    except PhalanxError as error:
        return [f"the snapshot is corrupt: {error}"]
    last = lookup.extra()["step"]
    # In sync mode the servers hold back what they have of a step until every worker has sent its part.
    sent = range(last + (mode != "sync"))
    least = sum(np.bincount(counts.ids_of(0, step), minlength=counts.rows) for step in sent)
    is_counted = (made >= least).all() and (made == made.round()).all()
    return [] if is_counted else [f"the snapshot of step {last} has {made.tolist()}, and {least.tolist()} were sent"]

"""Ranks are killed while they save, and the disk fills up: the newest complete checkpoint loads, and is whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn

import phalanx as px
from benchmarks.elastic_jobs import ROOT, read_lines
from benchmarks.soak.elastic import hang_of
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult
from benchmarks.soak.saves_rank import WIDTH

SCRIPT = ROOT / "benchmarks" / "soak" / "saves_rank.py"
SAVES, FAULTS = 100, 6
TIMEOUT_S = 90.0
DISK = "256k"
"""Room for a few checkpoints of 15 kB."""


def saves_are_hit(folder: Path, seed: int, *, count: int = FAULTS, saves: int = SAVES) -> SoakResult:
    """Fill the disk for a while, or kill a rank, while a job saves; then the job begins again where it was."""
    generator = random.Random(seed)
    ranks, disk, started = generator.choice([1, 2]), folder / "disk", time.monotonic()
    disk.mkdir(parents=True, exist_ok=True)
    faults: list[str] = []
    with LaunchedJob(folder, disk=(disk, DISK)) as job:
        flags = ("-n", ranks, "--max-restarts", 10, SCRIPT, "--folder", folder, "--disk", disk, "--saves", saves)
        more = ["--background"] if generator.random() < 0.3 else []
        job.start(*flags, *more, env={"PHALANX_RENDEZVOUS_TIMEOUT_S": "20"})
        for moment in sorted(generator.sample(range(2, saves - 8), count)):
            if not job.wait_until(lambda moment=moment: begun(folder) >= moment):  # type: ignore[misc]
                break
            time.sleep(generator.uniform(0.0, 0.02))
            if generator.random() < 0.5:
                faults.append(_fill(job, disk, generator, moment))
            elif rank := _kill(folder, generator):
                faults.append(f"SIGKILL of {rank} in save {moment}")
        codes = job.wait(TIMEOUT_S)
        problems = [*hang_of(job), *(f"the launcher ended with {code}" for code in codes if code)]
        problems += [*disk_problems(job, disk), *(f"{each} is left" for each in job.remaining())]
        return SoakResult("saves", seed, faults, problems, time.monotonic() - started, job.report())


def begun(folder: Path) -> int:
    """Return the newest save that a rank has begun."""
    return max((line["began"] for own in read_lines(folder).values() for line in own if "began" in line), default=-1)


def _fill(job: LaunchedJob, disk: Path, generator: random.Random, moment: int) -> str:
    """Leave so little room that a save fails, for some saves."""
    room, later = generator.randrange(0, 40_000), generator.randrange(1, 6)
    filler = job.inside(disk) / "filler"
    stat = os.statvfs(filler.parent)
    with contextlib.suppress(OSError):  # the job has taken the room meanwhile: it is full all the same
        filler.write_bytes(bytes(max(stat.f_bavail * stat.f_frsize - room, 0)))
    job.wait_until(lambda: begun(job.folder) >= moment + later, 10.0)
    filler.unlink(missing_ok=True)
    return f"{room} bytes of disk left at save {moment}, for {later} saves"


def _kill(folder: Path, generator: random.Random) -> str:
    newest = {own[0]["rank"]: pid for pid, own in sorted(read_lines(folder).items()) if own and "rank" in own[0]}
    rank = generator.choice(sorted(newest) or [0])
    lines = read_lines(folder).get(newest.get(rank, 0), [])
    if not lines or "end" in lines[-1]:
        return ""
    try:
        os.kill(newest[rank], signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return f"rank {rank}"


def disk_problems(job: LaunchedJob, disk: Path) -> list[str]:
    """Return in words what is wrong with the checkpoints."""
    lines = [line for own in read_lines(job.folder).values() for line in own]
    problems = [
        f"save {line['refused']} was refused in other words: {line['why']}"
        for line in lines
        if "refused" in line and "No space left on device" not in line["why"] and "save" not in line["why"]
    ]
    model = nn.Linear(WIDTH, WIDTH)
    try:
        step = px.load(job.inside(disk), model).step
    except px.errors.PhalanxError as error:
        return [*problems, f"no checkpoint loads: {error}"]
    if not bool((model.weight == step).all()):
        problems.append(f"the checkpoint of step {step} has weights of {torch.unique(model.weight).tolist()}")
    newest = max((line["saved"] for line in lines if "saved" in line), default=-1)
    return problems if step >= newest else [*problems, f"step {newest} was saved, and the newest that loads is {step}"]

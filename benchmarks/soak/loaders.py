"""A /dev/shm that holds no batch, and loader workers that are killed: the training ends as ever, or says who died."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import cache
from pathlib import Path

from benchmarks.elastic_jobs import ROOT, read_lines
from benchmarks.soak.elastic import hang_of
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult

SCRIPT = ROOT / "benchmarks" / "soak" / "loaders_rank.py"
RANKS = 2
TIMEOUT_S = 90.0
_lock = threading.Lock()


def memory_is_small(folder: Path, seed: int, reference: Path) -> SoakResult:
    """Train with less of /dev/shm than one batch takes; in some jobs a loader worker is killed besides."""
    generator = random.Random(seed)
    size, plain = generator.choice([128, 512, 1024, 3072]), generator.random() < 0.4
    kills, started = generator.random() < 0.4, time.monotonic()
    faults = [f"{size} KiB of /dev/shm for batches of 4 MiB" + (", torch's own loader" if plain else "")]
    with LaunchedJob(folder, shm=f"{size}k") as job:
        job.start("-n", RANKS, SCRIPT, "--folder", folder, *(["--plain"] if plain else []))
        if kills and job.wait_until(lambda: len(_workers(folder)) >= 2 * RANKS):
            victim = generator.choice(_workers(folder))
            try:
                os.kill(victim, signal.SIGKILL)
                faults.append("SIGKILL of a loader worker")
            except ProcessLookupError:
                kills = False
        else:
            kills = False
        (code,) = job.wait(TIMEOUT_S)
        problems = hang_of(job)
        if kills and (code == 0 or "DataLoader worker" not in job.output()):
            problems.append(f"a loader worker was killed, and the launcher ended with {code} without a word of it")
        if not kills:
            hashes = {line["hash"] for own in read_lines(folder).values() for line in own if "hash" in line}
            if code or hashes != undisturbed(reference, plain=plain):
                problems.append(f"the launcher ended with {code}, weights {sorted(hashes)}")
        problems += [f"{each} is left" for each in job.remaining()]
        return SoakResult("small memory", seed, faults, problems, time.monotonic() - started, job.report())


def _workers(folder: Path) -> list[int]:
    """Return the loader workers that have loaded something."""
    return [int(pid) for path in sorted(folder.glob("worker.*.*")) if (pid := path.read_text())]


def undisturbed(folder: Path, *, plain: bool) -> set[str]:
    """Return the weights of the same training with no worker."""
    with _lock:
        return _train_undisturbed(folder / ("plain" if plain else "ours"), plain)


@cache
def _train_undisturbed(folder: Path, plain: bool) -> set[str]:
    with LaunchedJob(folder) as job:
        job.start("-n", RANKS, SCRIPT, "--folder", folder, "--workers", 0, *(["--plain"] if plain else []))
        if job.wait(TIMEOUT_S) != [0]:
            raise RuntimeError(f"the training without faults has failed:\n{job.report()}")
    return {line["hash"] for own in read_lines(folder).values() for line in own if "hash" in line}

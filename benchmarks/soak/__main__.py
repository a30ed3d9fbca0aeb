"""Draw jobs and faults by a seed, and check after each job what must hold.

    make soak SEED=1 FAULTS=200
    python -m benchmarks.soak --seed 17 --faults 1     the job that a line "seed 17" was of, again
    python -m benchmarks.soak --only servers --jobs 2

Each job has a seed of its own: the first `--seed`, then one more each. What must hold: a job ends by itself, and with
the weights of the undisturbed run where it is to continue; every sample is trained once, but for jobs that may restart
with their newest checkpoint (a shard of optimizer state is lost with every copy), which is counted; no acknowledged
update of a parameter server is lost, none is made twice; the newest complete checkpoint loads and is what it says; no
process and no file in /dev/shm is left. Network namespaces, small disks and a small /dev/shm need root: without it
these jobs are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import network_spaces
from benchmarks.soak import cut_servers, elastic, loaders, nodes, saves, servers
from benchmarks.soak.elastic import TrainingKind
from benchmarks.soak.launched import can_mount
from benchmarks.soak.result import SoakResult

Job = Callable[[Path, int], SoakResult]

MOST_IDLE = 6
"""Jobs in a row without a fault after which no more are run."""

RANKS = {
    "ranks": (6, TrainingKind()),
    "ranks with mirrors": (3, TrainingKind(mirror=1)),
    "ranks without mirrors": (2, TrainingKind(mirror=0)),
    "ranks of two models": (2, TrainingKind(adversaries=True)),
    "ranks of two models with mirrors": (2, TrainingKind(adversaries=True, mirror=1)),
    "ranks of two models without mirrors": (1, TrainingKind(adversaries=True, mirror=0)),
}
"""Jobs in which ranks are lost, by name, with the weight of each."""


def jobs_of(reference: Path) -> dict[str, tuple[int, Job]]:
    """Return what can be drawn here, by name, with its weight.

    Args:
        reference: Folder for the runs without faults.
    """
    found: dict[str, tuple[int, Job]] = {
        **{
            name: (weight, partial(elastic.ranks_are_lost, reference=reference / "elastic", kind=kind))
            for name, (weight, kind) in RANKS.items()
        },
        "launcher": (2, partial(elastic.launcher_is_killed, reference=reference / "elastic")),
        "servers sync": (2, partial(servers.processes_are_lost, mode="sync")),
        "servers async": (3, partial(servers.processes_are_lost, mode="async")),
        "servers geo": (2, partial(servers.processes_are_lost, mode="geo")),
        "servers spilled sync": (1, partial(servers.processes_are_lost, mode="sync", is_spilled=True)),
        "servers spilled async": (2, partial(servers.processes_are_lost, mode="async", is_spilled=True)),
        "frozen server": (1, servers.server_stays_frozen),
    }
    if can_mount():
        found["saves"] = (3, saves.saves_are_hit)
        found["memory"] = (2, partial(loaders.memory_is_small, reference=reference / "loaders"))
    if network_spaces.are_possible():
        found["servers cut off"] = (2, cut_servers.network_is_cut)
        found["nodes"] = (4, partial(nodes.node_is_lost, reference=reference / "elastic"))
    return found


class Soak:
    """Jobs until there were enough faults."""

    def __init__(self, folder: Path, seed: int, faults: int, only: str) -> None:
        self._folder, self._next, self._wanted = folder, seed, faults
        possible = jobs_of(folder / "reference")
        self._jobs = {name: entry for name, entry in possible.items() if only in name}
        if not self._jobs:
            raise SystemExit(f"no job has {only!r} in its name; here are {', '.join(possible)}")
        self._lock = threading.Lock()
        self._idle = 0
        """Jobs in a row without a fault."""

        self.results: list[SoakResult] = []

    @property
    def faults(self) -> int:
        """Faults that came about so far."""
        return sum(len(result.faults) for result in self.results)

    @property
    def is_in_vain(self) -> bool:
        """Whether so many jobs in a row came to no fault that further ones will not either."""
        return self._idle >= MOST_IDLE

    def stop(self, *_: object) -> None:
        """Draw no more jobs; those that run are still judged."""
        self._wanted = 0

    def work(self) -> None:
        """Run jobs; several threads may."""
        while (seed := self._take()) is not None:
            names = list(self._jobs)
            (name,) = random.Random(seed).choices(names, [self._jobs[name][0] for name in names])
            result = self._run(name, seed)
            with self._lock:
                self.results.append(result)
                self._idle = 0 if result.faults else self._idle + 1
                self._print(name, result)

    def _take(self) -> int | None:
        with self._lock:
            if self.faults >= self._wanted or self.is_in_vain:
                return None
            self._next += 1
            return self._next - 1

    def _run(self, name: str, seed: int) -> SoakResult:
        started = time.monotonic()
        try:
            return self._jobs[name][1](self._folder / str(seed), seed)
        except Exception:  # noqa: BLE001 -- one job that could not be judged is a problem, and the others continue
            return SoakResult(name, seed, [], ["not judged"], time.monotonic() - started, traceback.format_exc())

    def _print(self, name: str, result: SoakResult) -> None:
        before = self.faults - len(result.faults)
        for number, fault in enumerate(result.faults, before + 1):
            _say(f"{number:4}  seed {result.seed}  {name}: {fault}")
        verdict = "; ".join(result.problems) or "as it must be"
        again = f", {result.restarts} restarts from a checkpoint" * bool(result.restarts)
        _say(f"      seed {result.seed}  {name}: {result.seconds:.0f} s{again}, {verdict}")
        if result.problems:
            _say(result.report)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    """Run what was asked for; ends with 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--faults", type=int, default=200, help="jobs are run until so many faults came about")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    parser.add_argument("--only", default="", help="jobs whose name has this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    asked = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="phalanx-soak-") as folder:
        soak = Soak(Path(folder), asked.seed, asked.faults, asked.only)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, soak.stop)
        with ThreadPoolExecutor(asked.jobs) as pool:
            for done in [pool.submit(soak.work) for _ in range(asked.jobs)]:
                done.result()
    if soak.is_in_vain:
        _say(f"{MOST_IDLE} jobs in a row came to no fault, so no more are started: see above where they ended")
    bad = [result for result in soak.results if result.problems]
    if asked.json:
        print(json.dumps({"seed": asked.seed, "faults": soak.faults, "jobs": [asdict(each) for each in soak.results]}))
    _say(
        f"{soak.faults} faults in {len(soak.results)} jobs, first seed {asked.seed}; "
        f"{len(bad)} jobs were not as they must be"
    )
    sys.exit(1 if bad or soak.is_in_vain else 0)


if __name__ == "__main__":
    main()

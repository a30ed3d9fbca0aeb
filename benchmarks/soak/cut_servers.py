"""The network between the machines of a job with tables is cut, for moments or for good: no update is lost or doubled.

Two network namespaces stand for machines, each with a launcher, a server and a worker.
"""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

from benchmarks.elastic_jobs import read_lines
from benchmarks.network_spaces import NetworkSpaces
from benchmarks.soak.elastic import hang_of
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult
from benchmarks.soak.servers import SCRIPT, SERVERS, TIMEOUT_S, steps_of, update_problems

NODES, FAULTS, STEPS = SERVERS, 3, 2000
LONGEST_S = 2.5
"""Of a cut that the job must survive. Launchers count a host as lost after 6 s, and TCP sends again 3 s after a
packet was lost, and then not before 6 s."""

RECOVERY_S = 3.5
"""From the end of a cut to the next one: until TCP has sent again, all was one cut to a launcher."""

FOR_GOOD = 0.4
"""How likely it is that the last cut stays."""


def network_is_cut(folder: Path, seed: int, *, count: int = FAULTS, steps: int = STEPS) -> SoakResult:
    """Cut machines off and put them back; the last cut may stay, and then both halves must end and say why."""
    generator = random.Random(seed)
    mode, stays = generator.choice(["sync", "async", "geo"]), generator.random() < FOR_GOOD
    faults: list[str] = []
    started, is_cut = time.monotonic(), False
    with NetworkSpaces(NODES) as spaces, LaunchedJob(folder) as job:
        _start(job, spaces, folder, mode, steps)
        last = steps * NODES * 3 // 4  # the end of the job is no place for a fault
        for number in range(1, count + 1):
            if not job.wait_until(lambda: steps_of(read_lines(folder)) >= 5):
                break
            time.sleep(generator.uniform(0.0, 1.0))
            if (moment := steps_of(read_lines(folder))) > last:
                break
            node, pause_s = generator.randrange(NODES), generator.uniform(0.1, LONGEST_S)
            spaces.unplug(node)
            is_cut = stays and number == count
            faults.append(f"{mode}: node {node} cut off after {moment} steps, {_span(pause_s, is_cut)}")
            if not is_cut:
                time.sleep(pause_s)
                spaces.plug(node)
                time.sleep(RECOVERY_S)
        codes = job.wait(TIMEOUT_S)
        problems = [
            *hang_of(job),
            *(_problems_of_halves(job, codes) if is_cut else _problems_of_updates(job, codes, mode, steps)),
        ]
        problems += [f"{each} is left" for each in job.remaining()]
        return SoakResult("servers cut off", seed, faults, problems, time.monotonic() - started, job.report())


def _start(job: LaunchedJob, spaces: NetworkSpaces, folder: Path, mode: str, steps: int) -> None:
    places = [",".join(f"{address}:{port}" for address in spaces.addresses) for port in (6170, 6171)]
    secret = secrets.token_hex(32)
    for node in range(NODES):
        flags = ("--servers", places[0], "--workers", places[1], "--max-restarts", 100, "--log-dir", f"log{node}")
        script = (SCRIPT, "--folder", folder, "--mode", mode, "--steps", steps)
        env = {"PHALANX_JOB_SECRET": secret, "PHALANX_SERVER_RETRY_S": "60"}
        job.start(*flags, *script, enter=spaces.enter(node), env=env)


def _span(pause_s: float, is_cut: bool) -> str:
    return "for good" if is_cut else f"for {pause_s:.1f} s"


def _problems_of_updates(job: LaunchedJob, codes: list[int], mode: str, steps: int) -> list[str]:
    """Return what is not as without cuts."""
    problems = [f"a launcher ended with {code}" for code in codes if code]
    return problems + update_problems(read_lines(job.folder), mode, is_exact=True, steps=steps)


def _problems_of_halves(job: LaunchedJob, codes: list[int]) -> list[str]:
    """Return what is wrong with the end of a job that can never continue: each half must name the other."""
    problems = []
    for node, code in enumerate(codes):
        said = (job.folder / f"launcher.{node}").read_text(errors="replace")
        if code == 0 or f"(node {1 - node}) is gone" not in said:
            problems.append(f"the launcher of node {node} ended with {code}, and did not name the other node")
    return problems

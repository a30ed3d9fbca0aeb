"""Machines of an elastic job are cut off, killed and frozen: network namespaces on a bridge, a launcher in each."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from benchmarks.elastic_faults import draw_faults
from benchmarks.elastic_jobs import read_lines
from benchmarks.network_spaces import NetworkSpaces
from benchmarks.soak import elastic
from benchmarks.soak.elastic import PATIENCE, TIMEOUT_S, UPDATES, arguments, newest_update
from benchmarks.soak.launched import LaunchedJob
from benchmarks.soak.result import SoakResult

NODES, REPLICAS, FAULTS = 3, 4, 5
HAPPENINGS = ("unplugged", "killed", "frozen", "unplugged, and a rank of another killed")


def node_is_lost(folder: Path, seed: int, reference: Path) -> SoakResult:
    """Cut one of three machines off, kill its launcher or freeze it, and end ranks of the others beside."""
    generator = random.Random(seed)
    lost, what, moment = generator.randrange(NODES), generator.choice(HAPPENINGS), generator.randrange(10, UPDATES // 2)
    faults = draw_faults(seed, FAULTS, ranks=NODES, first=20, every=60)
    expected, saved = elastic.undisturbed(reference)
    happened: list[str] = []
    started = time.monotonic()
    with NetworkSpaces(NODES) as spaces, LaunchedJob(folder) as job:
        (folder / "faults.json").write_text(json.dumps(faults))
        for node in range(NODES):
            hosts = ("--ips", ",".join(spaces.addresses), "--http-port", 29500, "--nnodes", f"1:{NODES}", "-n", 1)
            flags = (*hosts, "--node-rank", node, "--log-dir", f"log{node}", "--replicas", REPLICAS)
            job.start(
                *flags, "--max-restarts", 100, *arguments(folder, UPDATES), enter=spaces.enter(node), env=PATIENCE
            )
        if job.wait_until(lambda: newest_update(folder) >= moment):
            _lose(job, spaces, lost, what)
            happened.append(f"node {lost} {what} at update {moment}")
        codes = job.wait(TIMEOUT_S)
        trained = elastic.read(job, 1.0)
        trained.code = next((code for node, code in enumerate(codes) if code and not (happened and node == lost)), 0)
        # A launcher that was frozen for less than anyone waited is still one of them.
        is_back = happened and codes[lost] == 0 and what != "frozen"
        problems = [f"node {lost} was {what}, and ended with 0"] if is_back else []
        problems += [*elastic.hang_of(job), *trained.problems(expected), *elastic.checkpoint_problems(folder, saved)]
        return SoakResult(
            "node lost",
            seed,
            happened + elastic.fired(folder, faults),
            problems,
            time.monotonic() - started,
            job.report(),
        )


def _lose(job: LaunchedJob, spaces: NetworkSpaces, lost: int, what: str) -> None:
    lines = read_lines(job.folder)
    members = {own[0]["member"]: pid for pid, own in lines.items() if own and "member" in own[0]}
    for member, pid in members.items():
        if member.startswith(f"n{lost}."):  # the faults of ranks count on nobody there
            (job.folder / f"trains.{pid}").unlink(missing_ok=True)
    launcher = job.launchers[lost]
    if what.startswith("unplugged"):
        spaces.unplug(lost)
        if what != "unplugged":
            other = f"n{(lost + 1) % NODES}."
            os.kill(max(pid for member, pid in members.items() if member.startswith(other)), signal.SIGKILL)
    else:
        launcher.send_signal(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
    if what == "frozen":
        at = newest_update(job.folder)
        job.wait_until(lambda: newest_update(job.folder) >= min(at + 60, UPDATES - 1), TIMEOUT_S)
        launcher.send_signal(signal.SIGCONT)

"""Milliseconds to list and to submit jobs with 1,000 queued and 50 running: our server against a Slurm with as many.

list       every job, by HTTP; the peer's squeue
page       the console's first page of jobs; the peer's squeue
command    `phalanx job list`, a process that begins with Python; the peer's squeue
submit     one more job, checked and on the disk; the peer's sbatch of a held job

Slurm keeps its queue in memory and writes it down later; ours is durable when the answer comes. Its jobs are all held:
two nodes cannot run 50.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.report import arguments, measure_pairs, show

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where a Slurm and a server are started for tests

from job_server import JobServer, job_server
from slurm_cluster import SlurmCluster

CASES = ("list", "page", "command", "submit")
PEER = "slurm"


def fill_ours(server: JobServer, queued: int, running: int) -> None:
    """Put jobs into our store."""
    jobs = [server.queue(f"job-{number}") for number in range(queued + running)]
    for job in jobs[:running]:
        server.start(job)


def sbatch(cluster: SlurmCluster, script: Path, *options: str) -> None:
    """Submit held jobs to Slurm."""
    cluster.run("sbatch", "--hold", *options, str(script))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that measures `work` in ms."""

    def measured() -> float:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3

    return measured


def main() -> None:
    """Measure and print."""
    args = arguments(CASES)
    queued, running, pairs = (40, 4, 3) if args.quick else (1000, 50, 15)
    with ExitStack() as stack:
        folder, slurm = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) for _ in range(2))
        server = stack.enter_context(job_server(folder / "home"))
        cluster = SlurmCluster(slurm)
        stack.callback(cluster.stop)
        fill_ours(server, queued, running)
        script = slurm / "held.sh"
        script.write_text("#!/bin/sh\nsleep 1\n")
        for _ in range(queued + running):
            sbatch(cluster, script)
        sides = _sides(server, cluster, script, folder, stack)
        rows = [
            measure_pairs(
                f"{case} with {queued + running} jobs {PEER}",
                timed(sides[case][0]),
                timed(sides[case][1]),
                pairs=pairs,
                unit="ms",
                better="lower",
                peer_name=PEER,
            )
            for case in args.cases
        ]
    show("bench_console", rows, as_json=args.json)


def _sides(
    server: JobServer, cluster: SlurmCluster, script: Path, folder: Path, stack: ExitStack
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    token = server.owner_token()
    client = stack.enter_context(
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    )
    pages = stack.enter_context(httpx.Client(base_url=server.url, cookies={"phalanx_session": token}, timeout=60))
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')\n")
    spec = {"name": "one-more", "command": "python train.py", "code": {"path": str(code)}}

    def get(at: httpx.Client, address: str) -> None:
        at.get(address).raise_for_status()

    def submit() -> None:
        client.post("/api/v1/jobs", json={"spec": spec}).raise_for_status()

    def command() -> None:
        phalanx = str(Path(sys.executable).with_name("phalanx"))
        environment = {**os.environ, "PHALANX_API": server.url, "PHALANX_TOKEN": token}
        subprocess.run([phalanx, "job", "list", "--json"], env=environment, capture_output=True, check=True)

    def squeue() -> None:
        cluster.run("squeue", "--all", "--format=%i %j %T %r %u %V")

    return {
        "list": (lambda: get(client, "/api/v1/jobs?limit=10000"), squeue),
        "page": (lambda: get(pages, "/ui/w/default/"), squeue),
        "command": (command, squeue),
        "submit": (submit, lambda: sbatch(cluster, script)),
    }


if __name__ == "__main__":
    main()

"""Elastic training: what a killed, frozen or new rank costs; torchrun with checkpoints and torchft 0.2.0 beside it.

    python -m benchmarks.bench_elastic [--quick] [--json] [--cases kill,stop,join] [--repeat 3]

Four ranks train a small model; one is killed (SIGKILL), or stopped (SIGSTOP), in the middle. A stall is the longest
time between two optimizer updates of one survivor, less a usual step; under torchrun, which ends all ranks, between two
updates of the job. A sample is lost that should have entered an update and did not, and doubled if it entered one
more. "join" has 100 MB of state. Random faults: `python -m benchmarks.soak`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import ROOT, Trained, read_lines, run_command, run_job
from benchmarks.peers import FOLDER
from benchmarks.report import machine

PEER_SCRIPT = ROOT / "benchmarks" / "elastic_peer_rank.py"
TORCHFT = FOLDER / "torchft"
RANKS, FAULT_AT = 4, 60
PATIENCE_S = 2.0
WAIT_S = 25.0
"""How long a peer may take to continue after a rank was stopped."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    updates: int = 120
    samples: int = 240
    batch: int = 24
    width: int = 16
    hidden: int = 32
    pause: float = 0.02

    def script(self) -> list[str]:
        """Return flags that all scripts take."""
        names = ("samples", "batch", "width", "hidden", "pause")
        return [part for name in names for part in (f"--{name}", str(getattr(self, name)))]

    @property
    def epochs(self) -> int:
        """Passes over the samples."""
        return self.updates * self.batch // self.samples


SMALL = Work()
LARGE = Work(updates=60, width=1024, hidden=8192, pause=0.0)
"""8.5 million parameters: 100 MB with both moments of AdamW."""


@dataclass
class Figures:
    """What one job showed."""

    stall_s: float
    lost: int
    doubled: int
    is_equal: bool
    join_s: float | None = None
    """From the start of the process that joins to its first gradients that count."""

    replaced_s: float | None = None
    """The same from the loss."""

    note: str = ""


@dataclass
class Fault:
    """Sends a signal to a rank of a job once it has made so many updates."""

    folder: Path
    signal: int
    at: int
    restart: Callable[[int], object] | None = None
    """Starts the rank again, where no launcher does."""

    time: float = 0.0
    pid: int = 0

    def __call__(self, _process: object) -> None:
        """Wait for the update, and send the signal."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lines = read_lines(self.folder)
            done = {
                pid: max((line["update"] for line in own if "update" in line), default=-1) for pid, own in lines.items()
            }
            if len(done) >= RANKS and min(done.values()) >= self.at:
                self.pid = sorted(done)[1]
                self.time = time.time()
                os.kill(self.pid, self.signal)
                return
            time.sleep(0.02)
        raise RuntimeError(f"no rank came to update {self.at}: {read_lines(self.folder).keys()}")


def stall(job: Trained, fault: Fault, *, of_job: bool = False) -> float:
    """Return the longest time between two updates around a fault, less a usual step."""
    times: dict[int, list[float]] = {
        pid: [line["time"] for line in own if "update" in line] for pid, own in job.lines.items()
    }
    times.pop(fault.pid, None)
    series = [sorted(time for own in times.values() for time in own)] if of_job else list(times.values())
    usual = statistics.median(b - a for own in times.values() for a, b in pairwise(own))
    spans = [b - a for own in series for a, b in pairwise(own) if b > fault.time and a < fault.time + 1.0]
    return max(max(spans, default=float("nan")) - usual, 0.0)


def joined(job: Trained, fault: Fault) -> tuple[float | None, float | None]:
    """Return the seconds to the first gradients of whoever came after a fault, from its start and from the fault."""
    for lines in job.lines.values():
        start, first = (next((line[word] for line in lines if word in line), None) for word in ("start", "first"))
        if start is not None and first is not None and start > fault.time:
            return first - start, first - fault.time
    return None, None


def per_sample(job: Trained, work: Work) -> tuple[int, int]:
    """Count samples of a peer that were trained less or more often than once an epoch."""
    entered: Counter[tuple[int, int, int]] = Counter()
    whole = {update: 0 for update in range(work.updates)}
    for _, line in job.of_kind("update"):
        for ids in line["ids"].values():
            whole[line["update"]] += len(ids)
    first = next((update for update, count in sorted(whole.items()) if count >= work.batch), 0)
    for _, line in job.of_kind("update"):
        if line["update"] >= first:  # torchft begins before all ranks are there
            for rank, ids in line["ids"].items():
                entered.update((line["update"], int(rank), sample) for sample in ids)
    expected = (work.updates - first) * work.batch
    lost = expected - len(entered)
    return lost, sum(count - 1 for count in entered.values())


# -- engines ---------------------------------------------------------------------------------------------------


def with_phalanx(folder: Path, work: Work, number: int, undisturbed: Trained | None) -> tuple[Trained, Figures | None]:
    """Train with us."""
    fault = Fault(folder, number, work.updates // 3)
    script = [*work.script(), "--epochs", str(work.epochs)]
    job = run_job(
        folder, ranks=f"1:{RANKS}", replicas=RANKS, script=script, act=fault if number else None,
        env={"PHALANX_PATIENCE_S": str(PATIENCE_S)},
    )  # fmt: skip
    if undisturbed is None:
        return job, None
    lost, doubled = job.lost_and_doubled(undisturbed)
    note = "; ".join(job.problems(undisturbed))
    return job, Figures(stall(job, fault), lost, doubled, job.hashes == undisturbed.hashes, *joined(job, fault), note)


def with_torchrun(folder: Path, work: Work, number: int, undisturbed: Trained | None) -> tuple[Trained, Figures | None]:
    """Train with DDP, restarted from checkpoints every 10 updates."""
    folder.mkdir(parents=True, exist_ok=True)
    fault = Fault(folder, number, work.updates // 3)
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--standalone", "--max-restarts", "3"]
    script = [str(PEER_SCRIPT), "--engine", "ddp", *_peer_flags(folder, work), "--save-every", "10"]
    timeout_s = WAIT_S + 15 if number == signal.SIGSTOP else 150.0
    job = run_command(
        [*run, "--nproc-per-node", str(RANKS), *script], folder, act=fault if number else None, timeout_s=timeout_s
    )
    if undisturbed is None:
        return job, None
    lost, doubled = per_sample(job, work)
    hangs = job.code != 0
    note = f"had not continued after {WAIT_S:g} s (gloo waits 30 minutes)" if hangs else ""
    seconds = float("nan") if hangs else stall(job, fault, of_job=True)
    hashes = {each for each in job.hashes if each}
    is_equal = hashes == {each for each in undisturbed.hashes if each}
    return job, Figures(seconds, lost, doubled, is_equal, *joined(job, fault), note)


def with_torchft(folder: Path, work: Work, number: int, undisturbed: Trained | None) -> tuple[Trained, Figures | None]:
    """Train with torchft, each rank a replica group; a lost one is started again at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with lighthouse() as address:
        env = {"TORCHFT_LIGHTHOUSE": address, "PYTHONPATH": f"{ROOT}:{TORCHFT}"}
        script = [sys.executable, str(PEER_SCRIPT), "--engine", "torchft", *_peer_flags(folder, work)]
        fault = Fault(folder, number, work.updates // 3)
        command = [sys.executable, "-c", _GROUPS, str(RANKS), *script]
        job = run_command(command, folder, env=env, act=fault if number else None, timeout_s=90)
    if undisturbed is None:
        return job, None
    lost, doubled = per_sample(job, work)
    note = "" if job.code == 0 else f"ended with {job.code}: {job.output[-300:]}"
    is_equal = job.hashes == undisturbed.hashes
    return job, Figures(stall(job, fault), lost, doubled, is_equal, *joined(job, fault), note)


_GROUPS = """
import subprocess, sys, time
count, *command = sys.argv[1:]
def start(rank):
    log = open(f"out.{rank}", "ab")
    return subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=log)
groups = {rank: start(rank) for rank in range(int(count))}
while groups:
    for rank, process in list(groups.items()):
        code = process.poll()
        if code == 0:
            del groups[rank]
        elif code is not None:
            groups[rank] = start(rank)
    time.sleep(0.01)
"""
"""A supervisor of replica groups, which starts one again that ends with an error."""

_LIGHTHOUSE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=2000)
print(server.address(), flush=True)
time.sleep(1e6)
"""


@contextmanager
def lighthouse() -> Any:
    """Run torchft's lighthouse; yield its address."""
    env = {**os.environ, "PYTHONPATH": str(TORCHFT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _LIGHTHOUSE], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _peer_flags(folder: Path, work: Work) -> list[str]:
    counts = ["--updates", str(work.updates), "--ranks", str(RANKS), "--patience", str(PATIENCE_S)]
    return ["--folder", str(folder), *counts, *work.script()]


ENGINES = {"phalanx": with_phalanx, "torchrun": with_torchrun, "torchft": with_torchft}
CASES = {"kill": (SMALL, signal.SIGKILL), "stop": (SMALL, signal.SIGSTOP), "join": (LARGE, signal.SIGKILL)}


def install_torchft() -> str:
    """Install torchft 0.2.0 beside, never with another torch; return why it cannot be measured, or ""."""
    if (TORCHFT / "torchft").is_dir():
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TORCHFT), "--only-binary", ":all:"]
    needs = ["opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
    for command in ([*pip, *needs], [*pip, "--no-deps", "torchft==0.2.0"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return ""


@dataclass
class Row:
    """One line of the table: medians."""

    case: str
    engine: str
    stall_s: float | None
    worst_stall_s: float | None
    lost: float
    doubled: float
    is_equal: bool
    join_s: float | None
    replaced_s: float | None
    notes: list[str] = field(default_factory=list)


_undisturbed: dict[tuple[str, Work], Trained] = {}


def measure(case: str, engine: str, repeat: int, folder: Path) -> Row:
    """Run one case with one engine."""
    work, number = CASES[case]
    train = ENGINES[engine]
    if (engine, work) not in _undisturbed:
        _undisturbed[engine, work], _ = train(folder / "undisturbed", work, 0, None)
    undisturbed = _undisturbed[engine, work]
    found = []
    for index in range(repeat):
        _, figures = train(folder / str(index), work, number, undisturbed)
        assert figures is not None
        found.append(figures)
        print(f"  {case} {engine}: {figures}", file=sys.stderr, flush=True)
    stalls = [each.stall_s for each in found if each.stall_s == each.stall_s]
    joins = [each.join_s for each in found if each.join_s is not None]
    replaced = [each.replaced_s for each in found if each.replaced_s is not None]
    return Row(
        case,
        engine,
        statistics.median(stalls) if stalls else None,
        max(stalls, default=None),
        statistics.median(each.lost for each in found),
        statistics.median(each.doubled for each in found),
        all(each.is_equal for each in found),
        statistics.median(joins) if joins else None,
        statistics.median(replaced) if replaced else None,
        sorted({each.note for each in found if each.note}),
    )


def compare(cases: list[str], repeat: int, *, as_json: bool) -> None:
    """Print the table."""
    missing = install_torchft()
    engines = [engine for engine in ENGINES if not (missing and engine == "torchft")]
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        rows = [
            measure(case, engine, 1 if (case, engine) == ("stop", "torchrun") else repeat, Path(folder) / case / engine)
            for case in cases
            for engine in engines
        ]
    if as_json:
        table = [vars(row) for row in rows]
        print(json.dumps({"bench": "bench_elastic", "machine": machine(), "rows": table, "missing": missing}))
        return
    heads = (
        "fault",
        "",
        "stall, s",
        "worst",
        "samples lost",
        "trained twice",
        "weights equal",
        "joins, s",
        "replaced, s",
    )
    print("|", " | ".join(heads), "|")
    print("|---" * len(heads) + "|")
    for row in rows:
        numbers = (_show(row.stall_s), _show(row.worst_stall_s), f"{row.lost:g}", f"{row.doubled:g}")
        rest = ("yes" if row.is_equal else "no", _show(row.join_s), _show(row.replaced_s))
        print("|", " | ".join((row.case, row.engine, *numbers, *rest)), "|", *row.notes)
    if missing:
        print(f"torchft 0.2.0 is not in the table: {missing}")


def _show(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="one repetition of one case, only to see that it works")
    parser.add_argument("--cases", default=",".join(CASES), help="which, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each case and engine")
    asked = parser.parse_args()
    cases = ["kill"] if asked.quick else asked.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    compare(cases, 1 if asked.quick else asked.repeat, as_json=asked.json)


if __name__ == "__main__":
    main()

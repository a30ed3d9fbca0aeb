"""`run_job`, `Trained`: run `elastic_rank` under a launcher, and read what became of every sample."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RANK_SCRIPT = ROOT / "benchmarks" / "elastic_rank.py"
MARK = "PHALANX_BENCH_MARK"
"""A variable that every process of a job inherits, by which those that are left are found."""


@dataclass
class Trained:
    """What a job left behind."""

    folder: Path
    code: int
    output: str
    seconds: float
    lines: dict[int, list[dict[str, Any]]]
    """What each process wrote, by process id."""

    remaining: list[str] = field(default_factory=list)
    """Processes and files in /dev/shm that were left; a listening port is one of a process."""

    def of_kind(self, word: str) -> list[tuple[int, dict[str, Any]]]:
        """Return (process, line) of the lines that have a word."""
        return [(pid, line) for pid, lines in self.lines.items() for line in lines if word in line]

    @cached_property
    def hashes(self) -> set[str]:
        """The weights at the end, of every process that came so far."""
        return {line["hash"] for _, line in self.of_kind("hash")}

    @property
    def restarts(self) -> int:
        """How often the whole job began again."""
        return self.output.count("Restarting the whole job")

    @cached_property
    def updates(self) -> int:
        """Updates of the job."""
        return max((line["update"] + 1 for _, line in self.of_kind("update")), default=0)

    @cached_property
    def entered(self) -> list[Counter[int]]:
        """How often each sample entered each update.

        A replica of which no member wrote that it entered is of a member that was lost after its gradients were added
        up: had they not been, another would have computed them again.
        """
        updates: list[Counter[int]] = [Counter() for _ in range(self.updates)]
        replicas: dict[int, set[str]] = defaultdict(set)
        written = set()
        for pid, line in self.of_kind("update"):
            written.add((pid, line["update"]))
            for replica, ids in line["ids"].items():
                updates[line["update"]].update(ids)
                replicas[line["update"]].add(str(replica))
        for pid, line in self.of_kind("computes"):
            update, replica = line["computes"], str(line["replica"])
            if update < self.updates and (pid, update) not in written and replica not in replicas[update]:
                replicas[update].add(replica)
                updates[update].update(line["ids"])
        return updates

    def lost_and_doubled(self, undisturbed: Trained) -> tuple[int, int]:
        """Count samples that did not enter the update they belong to, and such as entered once more than they should.

        Args:
            undisturbed: The same training without a fault.
        """
        lost = doubled = 0
        for here, there in zip(self.entered, undisturbed.entered, strict=False):
            lost += (there - here).total()
            doubled += (here - there).total()
        lost += sum(each.total() for each in undisturbed.entered[self.updates :])
        doubled += sum(each.total() for each in self.entered[undisturbed.updates :])
        return lost, doubled

    def problems(self, undisturbed: Trained, *, may_restart: bool = False) -> list[str]:
        """Return in words what is not as in the undisturbed run.

        Args:
            undisturbed: That.
            may_restart: Whether the job may begin again with a checkpoint, which trains samples again.
        """
        lost, doubled = (0, 0) if may_restart and self.restarts else self.lost_and_doubled(undisturbed)
        found = [] if self.code == 0 else [f"the launcher ended with {self.code}"]
        if self.hashes != undisturbed.hashes:
            found.append(f"weights {sorted(self.hashes)} are not {sorted(undisturbed.hashes)}")
        if lost or doubled:
            found.append(f"{lost} samples are lost, {doubled} were trained twice")
        return found + [f"{each} is left" for each in self.remaining]

    def report(self) -> str:
        """Return what the launcher and the ranks said, for whoever looks for the reason."""
        logs = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("log/*"))
        ]
        return "\n".join([self.output[-3000:], *logs])


def run_job(
    folder: Path,
    *,
    ranks: str = "1:4",
    replicas: int = 4,
    faults: Sequence[dict[str, Any]] = (),
    launcher: Sequence[str] = (),
    script: Sequence[object] = (),
    env: dict[str, str] | None = None,
    act: Callable[[subprocess.Popen[str]], object] | None = None,
    timeout_s: float = 120.0,
) -> Trained:
    """Train once under `phalanx run`.

    Args:
        folder: An empty folder for logs.
        ranks: What -n gets.
        replicas: Logical replicas.
        faults: Orders, see `elastic_rank`.
        launcher: Further flags of `phalanx run`.
        script: Further flags of the script.
        env: Further variables.
        act: Called with the launcher once it runs; it may do something to it.
        timeout_s: Longest time; a job that takes longer is ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(list(faults)))
    flags = ["-n", ranks, "--replicas", str(replicas), "--log-dir", str(folder / "log"), *launcher]
    command = [sys.executable, "-m", "phalanx", "run", *flags, str(RANK_SCRIPT), "--folder", str(folder)]
    return run_command([*command, *map(str, script)], folder, env=env, act=act, timeout_s=timeout_s)


def run_command(
    command: Sequence[str],
    folder: Path,
    *,
    env: dict[str, str] | None = None,
    act: Callable[[subprocess.Popen[str]], object] | None = None,
    timeout_s: float = 120.0,
) -> Trained:
    """Run a launcher to its end and read what its ranks wrote."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started = time.time()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), MARK: mark, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if act is not None:
            act(process)
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for pid in {*read_lines(folder)}.intersection(marked(mark)):
            os.kill(pid, signal.SIGUSR1)  # they write where they are
        time.sleep(0.5)
        end(mark)
        process.kill()
        output = f"no end after {timeout_s:g} s\n{process.communicate()[0]}"
    seconds = time.time() - started
    lines = read_lines(folder)
    remaining = await_end(mark, 2.0) + [name for name in os.listdir("/dev/shm") if _is_of(name, lines)]
    end(mark)
    return Trained(folder, process.returncode, output, seconds, lines, remaining)


def read_lines(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each process, which may still run."""
    found = {}
    for path in folder.glob("log.*.jsonl"):
        whole = path.read_text().rpartition("\n")[0]
        found[int(path.name.split(".")[1])] = [json.loads(line) for line in whole.splitlines()]
    return found


def marked(mark: str) -> list[int]:
    """Return the processes that inherited a mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment:
                found.append(int(name))
    return found


def await_end(mark: str, timeout_s: float) -> list[str]:
    """Return the processes with a mark that are left after some time, in words."""
    deadline = time.monotonic() + timeout_s
    while pids := marked(mark):
        if time.monotonic() > deadline:
            return [f"process {pid}" for pid in pids]
        time.sleep(0.02)
    return []


def end(mark: str) -> None:
    """End all processes with a mark."""
    for pid in marked(mark):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue


def _is_of(name: str, lines: dict[int, list[dict[str, Any]]]) -> bool:
    """Return whether a file is named after one of the processes, as torch's are."""
    return any(f"_{pid}_" in name for pid in lines)

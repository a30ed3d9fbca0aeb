"""`Sampler`: a thread that samples CPU, memory and GPU usage of a node's processes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.cluster import proc
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.usage import Sample

logger = logging.getLogger("phalanx.jobs")

EVERY_S = 5.0
_FIRST_S = 1.0
"""When the first sample is taken, so that a short job has one."""

_ANSWER_S = 10.0
"""How long the driver may take to answer."""


@contextmanager
def watch_usage(folder: Path, node: int) -> Iterator[None]:
    """Note what everything below this process uses, until the block ends; what goes wrong with that is only logged."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(folder, node, ended), name="usage", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(folder: Path, node: int, ended: threading.Event) -> None:
    sampler = Sampler()
    pause_s = _FIRST_S
    while not ended.wait(pause_s):
        pause_s = EVERY_S
        try:
            usage.append(folder, node, sampler.sample())
        except OSError as error:
            logger.warning("what this node uses is not written any more: %s", error)
            return


class Sampler:
    """Takes samples of everything below this process, which itself is left out."""

    def __init__(self) -> None:
        self._taken = 0
        self._peak = 0
        self._at = time.monotonic()
        self._cpu_s = sum(map(proc.cpu_seconds, proc.descendants(os.getpid())))
        self._driver = shutil.which("nvidia-smi")

    def sample(self) -> Sample:
        """Return what is used now, processor time on average since the call before."""
        pids = proc.descendants(os.getpid())
        memory = sum(map(proc.memory_bytes, pids))
        self._peak = max(self._peak, memory)
        cpu = self._cores(sum(map(proc.cpu_seconds, pids)))
        gpus = self._gpus(pids)
        number, self._taken = self._taken, self._taken + 1
        return Sample(number, round(time.time(), 3), round(cpu, 3), memory, self._peak, *gpus)

    def _cores(self, cpu_s: float) -> float:
        """Cores in use, from the time of all processes. That falls for a moment while one has ended uncollected."""
        now = time.monotonic()
        cores = max(0.0, cpu_s - self._cpu_s) / (now - self._at)
        self._at, self._cpu_s = now, cpu_s
        return cores

    def _gpus(self, pids: Collection[int]) -> tuple[float, int] | tuple[None, None]:
        if self._driver is None:
            return None, None
        try:
            return gpus_in_use(
                pids, self._ask("compute-apps=pid,gpu_uuid,used_gpu_memory"), self._ask("gpu=uuid,utilization.gpu")
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.warning("what this node uses of its GPUs is not known: %s", error)
            self._driver = None
            return None, None

    def _ask(self, what: str) -> str:
        assert self._driver is not None
        query = [self._driver, f"--query-{what}", "--format=csv,noheader,nounits"]
        return subprocess.run(query, capture_output=True, check=True, text=True, timeout=_ANSWER_S).stdout


def gpus_in_use(pids: Collection[int], on_gpus: str, gpus: str) -> tuple[float, int] | tuple[None, None]:
    """Return how many GPUs' worth of computing the GPUs of `pids` do, and the bytes that `pids` hold there. Pure.

    Args:
        pids: Processes of ours.
        on_gpus: Lines of `pid, uuid of its GPU, MiB it holds`, as nvidia-smi writes them.
        gpus: Lines of `uuid, percent of the time in use`.

    Returns:
        None twice where no process of ours computes on a GPU. What the driver does not know, as in a slice of a
        GPU, counts 0.
    """
    ours = [row for row in _rows(on_gpus) if int(row[0]) in pids]
    if not ours:
        return None, None
    theirs = {row[1] for row in ours}
    percent = sum(_number(row[1]) for row in _rows(gpus) if row[0] in theirs)
    return percent / 100, sum(_number(row[2]) for row in ours) << 20


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0

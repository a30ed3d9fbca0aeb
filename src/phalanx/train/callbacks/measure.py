"""`Throughput`, `EpochClock`, `RoundLoss`: what callbacks report: time, speed, memory, learning rates, mean loss."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.cluster.proc import process_memory
from phalanx.comm import context
from phalanx.comm.batch.share import BatchShare
from phalanx.errors import ConfigError

if TYPE_CHECKING:  # a run measures itself
    from phalanx.train.callbacks.run import Run


class EpochClock:
    """Seconds spent in epochs, from their first batch to their last: without evaluations and what is between."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Restart the clock."""
        self._since = time.perf_counter()

    def tick(self) -> None:
        """Count the time until now."""
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now


class Throughput:
    """Samples per second of all ranks."""

    def __init__(self) -> None:
        self._samples, self._seconds = 0, 0.0
        self._rate = 0.0

    def restart(self, run: Run) -> None:
        """Count from here."""
        self._samples, self._seconds, self._rate = run.samples, run.clock.seconds, 0.0

    def rate(self, run: Run) -> float:
        """Return samples/s since the last call or `restart`; what it returned then, while there are no new ones."""
        self._rate = self.mean(run)
        self._samples, self._seconds = run.samples, run.clock.seconds
        return self._rate

    def mean(self, run: Run) -> float:
        """Return samples/s since `rate` or `restart` was last called, and restart the count."""
        seconds = run.clock.seconds - self._seconds
        return (run.samples - self._samples) / seconds if run.samples > self._samples and seconds > 0 else self._rate


def memory(device: torch.device) -> dict[str, int]:
    """Return `memory_bytes` and `peak_memory_bytes`: of the device's allocator, or of this process on a CPU."""
    if accelerator.is_accelerator(device):
        return {
            "memory_bytes": accelerator.allocated_bytes(device),
            "peak_memory_bytes": accelerator.peak_bytes(device),
        }
    resident = process_memory().resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"memory_bytes": resident, "peak_memory_bytes": max(peak, resident)}


def learning_rates(run: Run) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def values_of(run: Run, speed: Throughput) -> dict[str, float | int]:
    """Return epoch, step (from 0), samples, loss over all ranks, learning rate, and samples/s of all ranks.

    Collective: the loss is averaged over the ranks.
    """
    rates = learning_rates(run)
    named = {"lr": rates[0]} if len(rates) == 1 else {f"lr/{number}": rate for number, rate in enumerate(rates)}
    return {
        "epoch": run.epoch,
        "step": run.step - 1,
        "samples": run.samples,
        "loss": math.nan if run.loss is None else run.global_loss(),
        **named,
        "samples_per_s": round(speed.rate(run), 1),
    }


class StepInterval:
    """Every n-th step is due; in sink mode, the end of a sink that contains one.

    Args:
        every: The interval in steps; never due when None.
        name: The caller's name for `every`, for messages.
    """

    def __init__(self, every: int | None, name: str) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"{name} is a number of steps, found {every!r}. Give at least 1.")
        self._every = every
        self._done = 0

    def restart(self, step: int) -> None:
        """Count from this step."""
        self._done = step

    def is_due(self, step: int) -> bool:
        """Return whether an n-th step is among those since the last call."""
        before, self._done = self._done, step
        return self._every is not None and step // self._every > before // self._every


def show(rank: int, line: str) -> None:
    """Write a line to standard output on rank 0."""
    if rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class RoundLoss:
    """Adds up the losses of this rank's logical replicas, by samples."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._rows = 0
        self._replicas: set[int | None] = set()
        self.is_complete = True
        """Whether the batch added last was that of this rank's last replica."""

    def add(self, loss: Tensor, share: BatchShare | None) -> tuple[Tensor, BatchShare | None]:
        """Add a batch; return the mean loss of the replicas so far and their share of the global batch."""
        replicas = context.current().replicas
        is_alone = replicas is None or not replicas.are_shared or len(replicas.local) == 1
        if replicas is None or share is None or (is_alone and not replicas.is_elastic):
            self.is_complete = True
            return loss, share
        if replicas.is_first:
            self._sum, self._rows = None, 0
            self._replicas.clear()
        self.is_complete = replicas.is_last
        if replicas.current in self._replicas and self._sum is not None:  # computed again, where a rank was lost
            return self._sum / max(self._rows, 1), BatchShare(self._rows, share.global_rows)
        self._replicas.add(replicas.current)
        # What does not count may be undefined, so it is not multiplied by zero.
        term = loss * share.rows if share.rows else loss.new_zeros(())
        self._sum = term if self._sum is None else self._sum + term
        self._rows += share.rows
        return self._sum / max(self._rows, 1), BatchShare(self._rows, share.global_rows)


def batches_per_step() -> int:
    """Return how many batches this rank computes of every global batch."""
    replicas = context.current().replicas
    return 1 if replicas is None else len(replicas.local)

"""`DesyncCheck`: detect dense parameters that differ between workers.

In hybrid mode every worker steps them by the same gradient, unless what happens between backward and step is its own:
a norm taken over rows and dense parameters together, or a scaler that skips where a row's gradient is not finite.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from phalanx.comm import process_group
from phalanx.comm.store import JobStore

logger = logging.getLogger("phalanx.ps")


class DesyncCheck:
    """Compares dense parameters after 1, 2, 4, 8, ... steps, each time the digests of the check before: nobody waits.

    Args:
        rank: This worker; the first one looks.
        workers: How many there are.
    """

    def __init__(self, rank: int, workers: int) -> None:
        self._rank, self._workers = rank, workers
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._has_warned = False

    def look(self, optimizer: Optimizer, is_averaged: Callable[[Tensor], bool]) -> None:
        """Take note of a step, and warn once if parameters differed at the look before.

        Args:
            optimizer: Who stepped.
            is_averaged: Whether a parameter is one that all workers average.
        """
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps & (steps - 1) or not dist.is_initialized():
            return
        params = [param for group in optimizer.param_groups for param in group["params"] if is_averaged(param)]
        if not params:
            return
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        store = process_group.meeting().store
        store.set(f"dense/{number}/{steps}/{self._rank}", _digest(params))
        if self._rank == 0 and steps > 1 and not self._has_warned:
            self._compare(store, f"dense/{number}/{steps // 2}", steps // 2)

    def _compare(self, store: JobStore, prefix: str, steps: int) -> None:
        keys = [f"{prefix}/{rank}" for rank in range(self._workers)]
        # Absent only where a worker made fewer steps, which is no longer the same training either.
        digests = [store.get(key) if store.has([key]) else "" for key in keys]
        if differ := [rank for rank, value in enumerate(digests) if value != digests[0]]:
            self._has_warned = True
            logger.warning(
                "dense parameters must be the same on all workers, and after step %d those of workers %s are not those "
                "of worker 0: each scaled its own gradient, or skipped a step alone. Clip rows and dense parameters "
                "apart, clip_grad_norm_(model.head.parameters(), ...), and use bfloat16 rather than a GradScaler.",
                steps,
                differ,
            )


def _digest(params: Iterable[Tensor]) -> str:
    """Return a checksum of the parameters' bits."""
    total = 0
    for param in params:
        bits = param.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        total = zlib.crc32(bits.numpy().data, total)
    return str(total)

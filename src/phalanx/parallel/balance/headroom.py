"""`Headroom`: how many replicas or samples a rank's memory holds.

Another replica costs partial sums of the gradients (`replicas.replica_sums`), another sample its activations. Both
are compared with what this process may still take: the limit of its control group, RLIMIT_AS, the host's free memory,
or that of the GPU.
"""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterable
from functools import cache

import torch

from phalanx import accelerator
from phalanx.cluster.cgroup import ControlGroups
from phalanx.cluster.proc import available_bytes, process_memory
from phalanx.comm.collectives import all_gather
from phalanx.comm.context import Context
from phalanx.parallel.data.replicas.replica_sums import PartialSums

RESERVED_FRACTION = 0.1
"""Part of the free memory that is left alone."""


class Headroom:
    """What memory is left to this rank.

    Args:
        device: What computes.
        ranks: Those that share what is left of its memory.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._ranks = device, max(1, ranks)
        self._groups = ControlGroups()
        self._at_start, self._most = self._used_bytes(), 0.0

    def free(self) -> float:
        """Return the bytes that this rank may still take."""
        if accelerator.is_accelerator(self._device):
            return accelerator.free_bytes(self._device) / self._ranks + accelerator.cached_bytes(self._device)
        self._groups.refresh()
        group = self._groups.memory_left()
        limit, left = resource.getrlimit(resource.RLIMIT_AS)[0], available_bytes()
        return min(
            float("inf") if left is None else left / self._ranks,
            float("inf") if group is None else group / self._ranks,
            float("inf") if limit == resource.RLIM_INFINITY else limit - process_memory().address_space,
        )

    def most_replicas(self, current: int, count: int, gradient_bytes: int) -> int:
        """Return how many of `count` replicas this rank's memory holds, `current` at least."""
        if not gradient_bytes:
            return count
        more = int(min(2 * count, max(0.0, (1 - RESERVED_FRACTION) * self.free() / gradient_bytes)))
        allowed = most_sums(current, count) + more
        return max(current, max(size for size in range(1, count + 1) if most_sums(size, count) <= allowed))

    def most_samples(self, current: int, count: int) -> int:
        """Return how many samples of a global batch this rank's memory holds, `current` at least.

        All that this process took since training began counts as activations of the samples that it holds now.
        """
        self._most = max(self._most, self._used_bytes() - self._at_start)
        each = self._most / max(1, current)
        return count if not each else current + int(min(count, max(0.0, (1 - RESERVED_FRACTION) * self.free() / each)))

    def _used_bytes(self) -> float:
        if accelerator.is_accelerator(self._device):
            return float(accelerator.peak_bytes(self._device))
        return float(process_memory().resident)  # the allocator keeps what a step frees (`comm/context`)


def count_sharing_ranks(context: Context) -> int:
    """Return how many ranks share the memory that this one computes in: those of its host, or of its GPU.

    Collective where ranks compute on GPUs.
    """
    if not accelerator.is_accelerator(context.device):
        return context.role.local_world_size
    own = torch.tensor([_gpu_id(context.device)], dtype=torch.int64, device=context.device)
    return all_gather(own, same_shapes=True).tolist().count(int(own))


def _gpu_id(device: torch.device) -> int:
    """Return a number that is the same in all processes that see a GPU, however it is numbered there."""
    return int.from_bytes(hashlib.sha256(accelerator.identify(device).encode()).digest()[:7], "little")


@cache
def most_sums(size: int, count: int) -> int:
    """Return the most partial sums that are current at once for any `size` adjacent ones of `count` replicas."""
    return max(_sums_of(range(start, start + size), count) for start in range(count - size + 1))


def _sums_of(run: range, count: int) -> int:
    sums, most = PartialSums(count), 0
    for replica in run:
        most = max(most, len(sums.sums) + 1)
        sums.add(range(replica, replica + 1), torch.zeros(()))
    return most


def gradient_bytes(params: Iterable[torch.Tensor]) -> int:
    """Return the bytes of one partial sum of the gradients of parameters: 16-bit ones are added up in float32."""
    return sum(p.numel() * max(4, p.element_size()) for p in params if p.requires_grad)

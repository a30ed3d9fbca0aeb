"""`BufferPool`: reuse the memory of large batches.

The C library returns large blocks to the kernel, which maps and zeroes them again page by page: for a batch of
photographs that takes longer than computing it.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

_LEAST_BYTES = 1 << 20
"""Smaller blocks stay with the C library, which keeps them."""

_KEPT = 4
"""Blocks a process keeps: a batch in training, one being made, and as many of another size."""


class BufferPool:
    """Blocks of memory and who holds them. Any thread may ask for one."""

    def __init__(self) -> None:
        # Without a lock, which a process forked meanwhile would find taken: whoever pops a block has it alone.
        self._blocks: deque[tuple[NDArray[np.uint8], weakref.ref[Any]]] = deque()

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return a float32 tensor with whatever was in its memory.

        Its memory comes back when the tensor and all views of it are gone. In a worker process the memory is new and
        shared, so that the tensor need not be copied on its way to the training.
        """
        size = 4 * math.prod(shape)
        if size < _LEAST_BYTES:
            return torch.empty(shape, dtype=torch.float32)
        if get_worker_info() is not None:
            storage = torch.UntypedStorage._new_shared(size, device="cpu")
            return torch.empty(0, dtype=torch.float32).set_(storage).view(shape)
        block = self._free(size)
        # A tensor made of an array holds this very object for as long as its storage lives.
        array = block.view(np.float32)
        self._blocks.append((block, weakref.ref(array)))
        return torch.from_numpy(array).view(shape)

    def _free(self, size: int) -> NDArray[np.uint8]:
        for _ in range(len(self._blocks)):
            try:
                block, holder = self._blocks.popleft()
            except IndexError:  # other threads hold the rest
                break
            if holder() is None and block.nbytes == size:
                return block
            self._blocks.append((block, holder))
        if len(self._blocks) >= _KEPT:
            del self._blocks[0]  # if it is in use, it is freed when released
        return np.empty(size, np.uint8)


batches = BufferPool()
"""The blocks of this process."""

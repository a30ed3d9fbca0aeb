"""`share_by_memfd`: pass tensors to other processes in memory without a file, of which /dev/shm need not hold any."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy, reductions


def share_by_memfd() -> None:
    """Have this process, and those that it forks, put tensors that it sends to others into memory without a file.

    torch puts them into files of /dev/shm, which is 64 MB in many containers: a loader worker whose batch does not fit
    ends with a bus error. Receivers need nothing of this: to them a descriptor is a descriptor. Where the kernel
    refuses such memory, or the script chose torch's strategy `file_system`, torch's own way stays.
    """
    try:
        os.close(os.memfd_create("phalanx"))
    except OSError:
        return
    # Collated batches are made in shared memory from the first; what a user collates is copied there when it is sent.
    torch.UntypedStorage._new_using_fd_cpu = classmethod(_new_storage)  # type: ignore[method-assign, assignment]
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _new_storage(storage_class: Any, size: int) -> torch.UntypedStorage:
    fd = os.memfd_create("phalanx-tensor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        storage: torch.UntypedStorage = storage_class._new_shared_fd_cpu(fd, size)  # keeps a descriptor of its own
        return storage
    finally:
        os.close(fd)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    is_plain = storage.device.type == "cpu" and storage.nbytes() and not storage.is_shared()
    if is_plain and get_sharing_strategy() == "file_descriptor":
        shared = torch.UntypedStorage._new_using_fd_cpu(storage.nbytes())
        shared.copy_(storage)
        storage = shared
    return reductions.reduce_storage(storage)

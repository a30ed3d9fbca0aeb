"""Register the torch.distributed backend `shm`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from phalanx.comm.shared_memory.process_group import SharedMemoryGroup
from phalanx.comm.shared_memory.torch_group import NAME


def register() -> None:
    """Register `shm` for tensors of the CPU, so that `dist.init_process_group("shm")` and `new_group` make such groups.

    In `cpu:shm,cuda:nccl` the tensors of a card go to NCCL, as do those of any group where a card is visible. Safe to
    call again; maps nothing.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])


def _make(options: Any, _: object) -> SharedMemoryGroup:
    return SharedMemoryGroup(options)

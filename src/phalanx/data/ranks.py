"""What data code asks the other ranks: how many there are, and a few whole numbers from each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm import context


def place() -> tuple[int, int]:
    """Return (rank, world size) of this process; (0, 1) before `phalanx.init()`."""
    if not context.is_initialized():
        return 0, 1
    here = context.current()
    return here.rank, here.world_size


def gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Return `values` of every rank, in rank order.

    Collective: every rank must call it, with as many values. Alone, it returns [values].

    Args:
        values: Numbers that fit 64 bits with sign.
    """
    _, world_size = place()
    if world_size == 1:
        return [list(values)]
    mine = torch.tensor(list(values), dtype=torch.int64, device=context.current().device)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]

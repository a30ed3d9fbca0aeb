"""What data code asks the other ranks: who reads which rows, and a few whole numbers from each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.comm import context
from phalanx.comm.transfers import peers_named


def place() -> tuple[int, int]:
    """Return (index, count) of the share of the rows this process reads; (0, 1) before `phalanx.init()`.

    That is (rank, world size) unless a Plan lets several ranks read the same rows.
    """
    if not context.is_initialized():
        return 0, 1
    readers = context.current().readers
    return readers.index, readers.count


def gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Return `values` of every reader (see `place`), in order.

    Collective: every rank must call it, with as many values. Alone, it returns [values].

    Args:
        values: Numbers that fit 64 bits with sign.
    """
    _, count = place()
    if count == 1:
        return [list(values)]
    here = context.current()
    mine = torch.tensor(list(values), dtype=torch.int64, device=here.device)
    everyone = [torch.empty_like(mine) for _ in range(count)]
    with peers_named("all_gather of numbers of rows", here.readers.group):
        dist.all_gather(everyone, mine, group=here.readers.group)
    return [row.tolist() for row in everyone]

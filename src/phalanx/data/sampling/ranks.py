"""What data code asks the other ranks: who reads which rows, and a few whole numbers from each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.cluster.role.role import Role
from phalanx.comm import context
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of how many parts of every global batch this process loads."""

    index: int
    count: int
    is_checked: bool = True
    """Whether the other parts belong to ranks that can be asked."""


def place() -> tuple[int, int]:
    """Return (index, count) of the share of the rows this process reads; (0, 1) before `phalanx.init()`.

    That is (rank, world size) unless a Plan lets several ranks read the same rows.
    """
    if not context.is_initialized():
        return 0, 1
    readers = context.current().readers
    return readers.index, readers.count


def read_shard(num_shards: int | None, shard_id: int | None) -> tuple[int, int] | None:
    """Return (index, count) of `num_shards` and `shard_id`, None when neither is given.

    Raises:
        ConfigError: If only one is given, or they do not fit.
    """
    if num_shards is None and shard_id is None:
        return None
    if num_shards is None or shard_id is None:
        raise ConfigError(
            f"Asked for num_shards={num_shards} and shard_id={shard_id}. Give both, or neither: then the ranks of the "
            "job are the shards."
        )
    if not 0 <= shard_id < num_shards:
        raise ConfigError(
            f"Asked for shard_id={shard_id} of num_shards={num_shards}. Give one from 0 to num_shards - 1."
        )
    return shard_id, num_shards


def shard_here(asked: tuple[int, int] | None, *, training: bool = False) -> Shard:
    """Return the shard this process loads: the one of its place, unless the data says another.

    Data that says (rank, world size) means its place, also where several ranks read the same rows.

    Args:
        asked: What `read_shard` returned.
        training: Whether the rows are trained on; then every rank has to load the shard of its place.

    Raises:
        ConfigError: If it has not.
    """
    index, count = place()
    if asked is None:
        return Shard(index, count)
    if context.is_initialized():
        role = context.current()
        if asked in ((index, count), (role.rank, role.world_size)):
            return Shard(index, count)
        if training and role.world_size > 1:
            raise ConfigError(
                f"Asked to train on shard {asked[0]} of {asked[1]}, but rank {role.rank} of {role.world_size} reads "
                f"shard {index} of {count}: rows would be read twice or never. Leave num_shards and shard_id out."
            )
    return Shard(*asked, is_checked=False)


def shards_expected(asked: tuple[int, int] | None) -> int:
    """Return how many shards there are or, before `phalanx.init()`, will be."""
    if asked is None and not context.is_initialized():
        return Role.detect().world_size
    return shard_here(asked).count


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

"""`DataShard`: which shard of the data this rank reads, and an all-gather of a few integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from phalanx.cluster.role.role import Role
from phalanx.comm import context, process_group
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.batch.sample_split import SampleSplit
from phalanx.comm.transfers import peers_named
from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataShard:
    """Which part of every global batch this process loads."""

    index: int
    count: int
    is_checked: bool = True
    """Whether the other parts belong to ranks of this job."""

    replicas: Replicas | None = None
    """The logical replicas whose parts this process loads one after the other, where there are such; they may move."""

    split: SampleSplit | None = None
    """How many samples each rank reads, where that follows their speeds."""

    returns: int = 0
    """How often the loader was sent back to samples that it had read."""

    def slicing(self, epoch: int, position: int) -> Callable[[int], tuple[int, int]] | None:
        """Return what gives (offset, length) of this process's samples of so many, for a global batch read now.

        None where they are split evenly.

        Args:
            epoch: Of the global batch.
            position: Position of the epoch after it.
        """
        if self.split is None:
            return None
        return partial(self.split.slice_rows, index=self.index, position=(self.returns, epoch, position))

    @property
    def parts(self) -> Sequence[int]:
        """Every part of the next global batch that this process loads, in order."""
        return range(self.index, self.index + 1) if self.replicas is None else self.replicas.local


def current_shard() -> tuple[int, int]:
    """Return (index, count) of the shard that this process reads; (0, 1) before `phalanx.init()`.

    That is (rank, world size) unless a Plan lets several ranks read the same samples.
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


def resolve_shard(requested: tuple[int, int] | None, *, training: bool = False) -> DataShard:
    """Return the shard this process loads: that of its rank, unless the data requests another.

    Data that requests (rank, world size) gets the rank's shard, also if several ranks read the same samples.

    Args:
        requested: What `read_shard` returned.
        training: Whether the samples are trained on; then every rank has to load its own shard.

    Raises:
        ConfigError: If it requests another.
    """
    index, count = current_shard()
    own = DataShard(index, count, is_checked=process_group.outsider() is None)
    if training and context.is_initialized() and (replicas := context.current().replicas) is not None:
        own = DataShard(index, replicas.count, replicas=replicas)
    elif training and context.is_initialized() and context.current().split is not None:
        own = DataShard(index, count, split=context.current().split)
    if requested is None:
        return own
    if context.is_initialized():
        role = context.current()
        if requested in ((index, count), (role.rank, role.world_size)):
            return own
        if training and role.world_size > 1:
            raise ConfigError(
                f"Asked to train on shard {requested[0]} of {requested[1]}, but rank {role.rank} of {role.world_size} "
                f"reads shard {index} of {count}: samples would be read twice or never. Leave num_shards and shard_id "
                "out."
            )
    return DataShard(*requested, is_checked=False)


def expected_shard_count(requested: tuple[int, int] | None) -> int:
    """Return how many shards there are or, before `phalanx.init()`, will be."""
    if requested is None and not context.is_initialized():
        return Role.detect().world_size
    return resolve_shard(requested).count


def gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Return `values` of every reading rank (see `current_shard`), in order.

    Collective: every rank must call it, with equally many values. With one reader it returns [values].

    Args:
        values: Numbers that fit 64 bits with sign.
    """
    _, count = current_shard()
    if count == 1:
        return [list(values)]
    current = context.current()
    mine = torch.tensor(list(values), dtype=torch.int64, device=current.device)
    gathered = [torch.empty_like(mine) for _ in range(count)]
    with peers_named("all_gather of numbers of samples", current.readers.group):
        dist.all_gather(gathered, mine, group=current.readers.group)
    return [row.tolist() for row in gathered]

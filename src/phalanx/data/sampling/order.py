"""`EpochOrder`: the dataset indices of each of a rank's batches in one epoch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.comm.context import BatchShare
from phalanx.data.sampling.ranks import DataShard, gather_integers
from phalanx.data.sampling.seeding import seeded
from phalanx.data.sampling.shards import EpochPlan
from phalanx.data.sampling.shuffle import mixed_seed, shuffled
from phalanx.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch to load."""

    indices: Sequence[int] | NDArray[np.int64]
    share: BatchShare
    position: int
    """Position of the epoch, over all ranks, once this batch is done."""

    seed: int
    """Where the random numbers of loading it start; another one for each batch, rank and epoch."""

    sample_seeds: NDArray[np.uint64] | None = None
    """Where those of each sample start, the same on any rank; for pipelines."""

    lease: tuple[int, int] | None = None
    """Epoch and number of a batch that was leased to this worker."""

    def __reduce__(self) -> tuple[Any, ...]:
        # To a worker goes what it needs, in few bytes: dataclasses are slow to pickle, and this is done per batch.
        return _for_worker, (self.indices, self.seed, self.sample_seeds)


def _for_worker(indices: Any, seed: int, sample_seeds: Any) -> BatchRequest:
    return BatchRequest(indices, BatchShare(0, 0), 0, seed, sample_seeds)


class EpochOrder(Protocol):
    """Determines which samples each batch of an epoch holds."""

    def steps(self, shard_count: int) -> int:
        """Return the number of global batches of an epoch."""

    def shares(self, shard: DataShard) -> tuple[BatchShare, ...]:
        """Return this shard's shares of the global batches of an epoch; empty if not known in advance."""

    def requests(self, epoch: int, shard: DataShard, first: int = 0) -> Iterator[BatchRequest]:
        """Yield this shard's batches of `epoch`, from position `first` on; all parts of a global batch in turn."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Rows in order, shuffled, or as a sampler lists them; cut into global batches here."""

    rows: int
    """Rows of the dataset, or of the sampler when there is one, as many as there are now."""

    global_batch: Callable[[int], int]
    """Rows of a global batch for a given number of shards."""

    seed: Callable[[], int]
    """Start of every order; asked when an epoch begins."""

    shuffle: bool = False
    drop_last: bool = False
    sampler: Any = None

    def steps(self, shard_count: int) -> int:
        """See `EpochOrder`."""
        return plan_epoch(self.rows, self.global_batch(shard_count), self.drop_last).steps

    def shares(self, shard: DataShard) -> tuple[BatchShare, ...]:
        """See `EpochOrder`."""
        return shares_of(plan_epoch(self.rows, self.global_batch(shard.count), self.drop_last), shard)

    def requests(self, epoch: int, shard: DataShard, first: int = 0) -> Iterator[BatchRequest]:
        """See `EpochOrder`. With a sampler it is collective at the first batch."""
        seed = self.seed()
        rows = self.rows if self.sampler is None else list_sampler(self.sampler, mixed_seed(seed, epoch), shard)
        count = rows if isinstance(rows, int) else len(rows)
        plan = plan_epoch(count, self.global_batch(shard.count), self.drop_last, first)
        pick = self._picker(rows, mixed_seed(seed, epoch))
        for step, index in steps_and_parts(plan.steps, shard):
            part = plan.rank_batch(step, index, shard.count, shard.slicing(epoch, plan.position_after(step)))
            yield BatchRequest(
                pick(part.start, part.count),
                BatchShare(part.rows, part.global_rows),
                plan.position_after(step),
                mixed_seed(seed, epoch, plan.position_after(step), index),
            )

    def _picker(self, rows: int | list[int], seed: int) -> Callable[[int, int], Sequence[int]]:
        """Return what lists the samples at a run of positions, of so many samples or of those that a sampler listed."""
        if not isinstance(rows, int):
            return lambda start, count: rows[start : start + count]
        if not self.shuffle:
            return lambda start, count: range(start, start + count)
        return lambda start, count: shuffled(rows, seed, start, count).tolist()


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """Batches of a batch sampler: a global batch is one of them for every shard."""

    batch_sampler: Any
    seed: Callable[[], int]

    def steps(self, shard_count: int) -> int:
        """See `EpochOrder`."""
        return EpochPlan(len(self.batch_sampler), shard_count).steps

    def shares(self, shard: DataShard) -> tuple[BatchShare, ...]:
        """See `EpochOrder`. The size of a batch is only known with the batch."""
        return ()

    def requests(self, epoch: int, shard: DataShard, first: int = 0) -> Iterator[BatchRequest]:
        """See `EpochOrder`; positions count batches. Collective at the first batch."""
        seed = self.seed()
        batches = list_sampler(self.batch_sampler, mixed_seed(seed, epoch), shard)
        plan = EpochPlan(len(batches), shard.count, first=first)
        for step, index in steps_and_parts(plan.steps, shard):
            part = plan.rank_batch(step, index, shard.count)
            start = plan.first + step * plan.global_batch
            global_rows = sum(len(batch) for batch in batches[start : plan.position_after(step)])
            indices = list(batches[part.start])
            yield BatchRequest(
                indices,
                BatchShare(len(indices) if part.rows else 0, global_rows),
                plan.position_after(step),
                mixed_seed(seed, epoch, plan.position_after(step), index),
            )


def steps_and_parts(steps: int, shard: DataShard) -> Iterator[tuple[int, int]]:
    """Yield each part of each global batch that a process loads; which parts may change between global batches."""
    for step in range(steps):
        for index in shard.parts:
            yield step, index


def plan_epoch(rows: int, global_batch: int, drop_last: bool, first: int = 0) -> EpochPlan:
    """Return the split of `rows` into global batches, from position `first` on.

    Raises:
        ConfigError: If `drop_last` leaves no batch at all.
    """
    if drop_last and rows < global_batch:
        raise ConfigError(
            f"Asked to drop the last batch if it is not full, but {rows} samples are not one global batch of "
            f"{global_batch}: no batch is left. Give a smaller batch, or drop_last=False."
        )
    return EpochPlan(rows, global_batch, drop_last, first)


def shares_of(plan: EpochPlan, shard: DataShard) -> tuple[BatchShare, ...]:
    """Return what a shard's batches are of their global batches: of the full ones, and of the last."""
    steps = [step for step in {0, plan.steps - 1} if 0 <= step < plan.steps]
    split = shard.split
    cut = None if split is None else lambda rows: split.latest_slice(rows, shard.index)
    parts = [plan.rank_batch(step, index, shard.count, cut) for step in steps for index in shard.parts]
    return tuple({BatchShare(part.rows, part.global_rows): None for part in parts})


def list_sampler(sampler: Any, seed: int, shard: DataShard) -> list[Any]:
    """Return what `sampler` yields, drawn from the same random numbers on every rank.

    Its own generators are restored afterwards.
    Collective when `shard.is_checked`: the ranks compare what they listed.

    Raises:
        ConfigError: On every rank, if the ranks listed different things, or not as many as the sampler's
        length.
    """
    with seeded(seed), _seed_generators(seed, generators_of(sampler)):
        listed = list(sampler)
    digest = zlib.crc32(repr(listed).encode())
    wrong_length = isinstance(sampler, Sized) and len(sampler) != len(listed)
    answers = gather_integers([digest, wrong_length]) if shard.is_checked else [[digest, wrong_length]]
    name = type(sampler).__name__
    if any(answer[1] for answer in answers):
        raise ConfigError(
            f"{name} says its length is {len(sampler)} but listed {len(listed)} entries. "
            "Make __len__ return what __iter__ yields."
        )
    if len({answer[0] for answer in answers}) > 1:
        raise ConfigError(
            f"{name} lists different samples on different ranks, so they cannot be shared out. "
            "Let it draw from torch, numpy or random (seeded here alike on every rank), or drop the sampler."
        )
    return listed


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the generators a sampler draws from, its own first, then those of the sampler that it is made of."""
    own = [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, torch.Generator)]
    inner = getattr(sampler, "sampler", None)
    return own if inner is None else own + generators_of(inner)


@contextlib.contextmanager
def _seed_generators(seed: int, generators: list[torch.Generator]) -> Iterator[None]:
    """Seed the user's generators in a block, and restore them afterwards."""
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def rows_of_tensor(tensor: torch.Tensor, indices: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
    """Return samples of a tensor in memory of their own: whoever gets a batch may change it, and the data stays."""
    if isinstance(indices, range) and indices.step == 1:
        return tensor[indices.start : indices.stop].clone(memory_format=torch.contiguous_format)
    return tensor[torch.from_numpy(np.asarray(indices, dtype=np.int64))]

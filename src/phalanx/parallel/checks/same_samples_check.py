"""`SampleWatch`: warn when ranks train on the same samples because the loader was not sharded."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, dataloader

import phalanx.comm.context as context_of
from phalanx.comm import process_group
from phalanx.data.stream.stream_batches import digest
from phalanx.parallel.session import list_applied, session

logger = logging.getLogger("phalanx.parallel")

_REMEDY = (
    "Give it to px.distribute(model, optimizer, loader), or to px.data.ShardedLoader beside Fleet's verbs, or give the "
    "DataLoader a torch DistributedSampler."
)


class SampleWatch:
    """Looks at the first forward passes in training of ranks 0 and 1.

    Seen where it shows: in what comes into the model, which is equal on both under equal seeds, and in the DataLoader
    that is iterated then, which draws from all rows whatever the seeds are. Only under our launcher, and nobody waits:
    rank 1 leaves what it saw in the store, rank 0 looks for it.
    """

    LOOKED_AT = (2, 3)
    """Forward passes that are compared; the first may be a probe."""

    PATIENCE = 20
    """Forward passes until rank 0 no longer looks for what rank 1 found."""

    def __init__(self) -> None:
        self._passes = 0
        self._found: list[int] = []
        self._draws: str | None = None
        self._number = len(list_applied())

    def __call__(self, inputs: tuple[Any, ...]) -> None:
        """Look at the inputs of a forward pass in training."""
        self._passes += 1
        if not self.LOOKED_AT[0] <= self._passes <= self.PATIENCE or session.has_compared_data or not self._is_asked():
            return
        if self._passes in self.LOOKED_AT:
            tensors = [x for x in inputs if type(x) is Tensor and x.layout is torch.strided]
            self._found += [digest(tensors)] if tensors else []
        if self._passes == self.LOOKED_AT[-1]:
            self._draws = _draws_from_all()
        if len(self._found) == len(self.LOOKED_AT):
            self._compare(",".join(map(str, self._found)), self._draws or "")

    def _is_asked(self) -> bool:
        """Return whether this is rank 0 or 1 of a job of ours, and no loader of ours said which rows it has."""
        context = context_of.current()
        is_ours = context.role.launcher == "phalanx" and dist.is_initialized()
        has_own_rows = context.is_distributed and context.readers.count == context.world_size
        return is_ours and has_own_rows and context.rank <= 1 and context.batch is None

    def _compare(self, rows: str, draws: str) -> None:
        store, key = process_group.meeting().store, f"rows seen by rank 1/{self._number}"
        if context_of.current().rank == 1:
            session.has_compared_data = True
            store.set(key, f"{rows};{draws}")
        elif store.has([key]):
            session.has_compared_data = True
            theirs, _, their_draws = store.get(key).partition(";")
            if theirs == rows:
                logger.warning(
                    "ranks 0 and 1 train on the same rows: the loader is not shared out over the ranks. %s", _REMEDY
                )
            elif draws and their_draws == draws:
                logger.warning(
                    "each rank draws its batches from a DataLoader of its own, %s: unless the ranks have different "
                    "datasets, every rank trains on all rows, in another order. The loader is not shared out over the "
                    "ranks. %s",
                    draws,
                    _REMEDY,
                )


def _draws_from_all() -> str | None:
    """Return how the DataLoaders that are iterated now draw, if each does as in a job of one process."""
    # torch has no list of them; this is done once.
    live = [x for x in gc.get_objects() if issubclass(type(x), dataloader._BaseDataLoaderIter)]
    draws = {_draws(iterator) for iterator in live}
    return None if None in draws or not draws else " and ".join(sorted(filter(None, draws)))


def _draws(iterator: Any) -> str | None:
    """Return the sampler and number of rows of an iterator over a DataLoader; None for samplers of other kinds."""
    sampler = iterator._sampler_iter and iterator._index_sampler
    sampler = getattr(sampler, "sampler", sampler)
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    return f"{type(sampler).__name__} over {len(sampler)} rows"

"""The loader users iterate over: each rank gets its part of every global batch.

loader = ShardedLoader(dataset, batch_size=32)       # 32 rows per rank
loader = ShardedLoader(dataset, global_batch=128)    # 128 rows over all ranks, exact for any number of them
for epoch in range(10):
    for x, y in loader: ...                          # a new order each epoch, nothing to call
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch

from phalanx.comm import context
from phalanx.comm.context import BatchShare
from phalanx.data.device import to_device
from phalanx.data.fetch import RowFetcher, WorkLoader, load_portions
from phalanx.data.order import BatchOrder, Order, RowOrder
from phalanx.data.ranks import Shard, place
from phalanx.data.shuffle import mixed_seed
from phalanx.data.sources import batch_sizes, read_source
from phalanx.data.stream import PortionDataset, agree, decides_batches
from phalanx.errors import ConfigError, did_you_mean

logger = logging.getLogger("phalanx.data")

_T = TypeVar("_T")
_LOADING = {
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
}


class ShardedLoader:
    """Loads this rank's part of every global batch, in an order that changes from epoch to epoch.

    Which rank this is is asked when an iteration starts, so a loader may be made before `phalanx.init()`. Every
    iteration is the next epoch; the ranks take the same number of steps, and the rows of N ranks side by side are
    the batches of one process. A last batch that is not full is shared out as evenly as it goes; a rank for which
    no row is left gets one that does not count (`share.rows` is 0).

    Iterating is collective for streams (at every batch) and for custom samplers (at the first batch), else local.

    Args:
        data: A torch Dataset or IterableDataset, a torch DataLoader (its settings are taken over), a tuple of
            tensors or arrays, or a function that returns a new iterator of samples at each call.
        batch_size: Rows per rank; the global batch is this times the number of ranks. A DataLoader's own otherwise.
        global_batch: Rows over all ranks, instead of `batch_size`; need not divide by their number.
        shuffle: Whether each epoch has an order of its own. As the DataLoader says; otherwise True when training
            on a dataset with a length.
        seed: Start of every order and of the random numbers data code draws; the same on every rank.
        drop_last: Whether to leave out a last batch that is not full; default False.
        collate_fn: Makes a batch of a list of samples; torch's default when omitted.
        num_workers: Worker processes; as the DataLoader says, otherwise 0.
        training: Whether the batches are trained on. Others leave no trace in `Context.batch` once iterated.
        stream: For an IterableDataset or function: `shared` if it yields the same rows on every rank, which are
            then split here; `own` if it splits itself over the ranks and their workers.
        shard: (index, count) to load as, instead of this process's rank and world size.
        loading: Further arguments of torch's DataLoader: pin_memory, timeout, worker_init_fn,
            multiprocessing_context, prefetch_factor, persistent_workers.

    Raises:
        ConfigError: If the data cannot be shared out over ranks, or arguments contradict each other.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        training: bool = True,
        stream: Literal["shared", "own"] = "shared",
        shard: tuple[int, int] | None = None,
        **loading: Any,
    ) -> None:
        source = read_source(data)
        _check_loading(loading)
        source.loading |= loading
        source.num_workers = _first(num_workers, source.num_workers)
        source.collate_fn = collate_fn or source.collate_fn
        self._source, self._shard = source, _read_shard(shard)
        self._stream = "own" if decides_batches(source.dataset) else stream
        self._rows_per_rank, self._global_batch = batch_sizes(source, batch_size, global_batch)
        self._seed = _first(seed, _first(source.seed, 0))
        self._drop_last = _first(drop_last, _first(source.drop_last, False))
        self._shuffle = _first(shuffle, _first(source.shuffle, training and not source.is_stream))
        self._order = None if source.is_stream else self._make_order()
        self._fetcher = RowFetcher(source.dataset, source.collate_fn)
        self._works = WorkLoader(self._fetcher)
        self._check_order(shuffle)
        self.training = training
        self.share: BatchShare | None = None
        """Share of the batch handed out last; None before the first and after the last of an epoch."""
        self._next_epoch, self._next_position = 0, 0
        self._epoch, self._position = 0, 0

    # -- what it will do ---------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The dataset that is loaded from."""
        return self._source.dataset

    @property
    def drops_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self._drop_last

    @property
    def seed(self) -> int:
        """Start of every order."""
        return self._seed

    @property
    def epoch(self) -> int:
        """Epoch in progress; between two, the one that comes next."""
        return self._epoch

    @property
    def global_batch(self) -> int:
        """Rows of a full global batch for the present number of ranks; batches when a batch sampler cuts them."""
        return self._global_batch_for(self._here().count)

    @property
    def per_rank_batch(self) -> int:
        """Most rows this rank gets of a global batch."""
        here = self._here()
        return -(-self._global_batch_for(here.count) // here.count)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch; the same on every rank."""
        return len(self)

    def __len__(self) -> int:
        if self._order is not None:
            return self._order.steps(self._here().count)
        try:
            rows = len(self._source.dataset)
        except TypeError:
            raise TypeError("A stream has no length. Iterate over it, or give its dataset a __len__.") from None
        return rows // self.global_batch if self._drop_last else -(-rows // self.global_batch)

    # -- iterating ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, from its start. Never needed: iterating advances the epoch."""
        self._next_epoch, self._next_position = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        self._epoch, self._position = self._next_epoch, self._next_position
        self._next_epoch, self._next_position = self._epoch + 1, 0
        here = self._here()
        batches = self._rows(here) if self._order is not None else self._portions(here)
        return self._hand_out(batches)

    def _hand_out(self, batches: Iterator[tuple[Any, BatchShare, int]]) -> Iterator[Any]:
        ambient = context.current().batch if context.is_initialized() else None
        try:
            for batch, share, self._position in batches:
                self._announce(share)
                yield to_device(batch)
            self._epoch, self._position = self._epoch + 1, 0
            self._announce(None)
        finally:
            if not self.training and context.is_initialized():
                context.current().batch = ambient

    def _announce(self, share: BatchShare | None) -> None:
        self.share = share
        if context.is_initialized():
            context.current().batch = share

    def _rows(self, here: Shard) -> Iterator[tuple[Any, BatchShare, int]]:
        assert self._order is not None
        works = self._order.works(self._epoch, here, self._position)
        for batch, work in self._works.load(works, self._worker_options(here)):
            yield batch, work.share, work.position

    def _portions(self, here: Shard) -> Iterator[tuple[Any, BatchShare, int]]:
        is_shared = self._stream == "shared"
        portions = PortionDataset(
            self._source.dataset,
            self._fetcher.collate_fn,
            here,
            global_batch=self._global_batch_for(here.count),
            drop_last=self._drop_last,
            is_shared=is_shared,
            first=self._position,
        )
        options = self._worker_options(here)
        if is_shared:
            # Each worker would read the whole stream, and a dataset that splits itself over workers would lose
            # rows; one worker reads ahead just as well.
            options["num_workers"] = min(options["num_workers"], 1)
        for batch, share in agree(load_portions(portions, options), here, is_shared=is_shared):
            yield batch, share, self._position + share.global_rows

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, as plain numbers: the same on every rank, for any number of ranks.

        Taken inside the loop it counts the batch in hand as done.
        """
        return {
            "version": 1,
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, at any number of ranks and any batch size.

        Costs the same wherever that is, save for streams, which are read up to it.

        Raises:
            ConfigError: If `state` is of another version or order, or lies inside an epoch of a stream that
                splits itself.
        """
        if state.get("version") != 1 or not {"epoch", "position", "seed"} <= state.keys():
            raise ConfigError(
                f"Asked to load a loader state with {sorted(state)}; version 1 with epoch, position and seed is "
                "known. Load what state_dict() returned."
            )
        if state["seed"] != self._seed:
            raise ConfigError(
                f"The state was saved with seed {state['seed']}, this loader has seed {self._seed}: the rest of "
                "the epoch would repeat rows and miss others. Make the loader with the saved seed."
            )
        if state["position"] and self._order is None and self._stream == "own":
            raise ConfigError(
                'A stream that splits itself (stream="own") cannot be resumed inside an epoch. '
                "Save at the end of an epoch, or let the dataset keep its own position."
            )
        before = state.get("global_batch", self.global_batch)
        if state["position"] and before != self.global_batch:
            logger.warning(
                "the epoch goes on at row %d in global batches of %d, and was begun in global batches of %d: give "
                "global_batch= where training must not depend on the number of ranks",
                state["position"],
                self.global_batch,
                before,
            )
        self._next_epoch, self._next_position = int(state["epoch"]), int(state["position"])
        self._epoch, self._position = self._next_epoch, self._next_position

    # -- parts -------------------------------------------------------------------------------------------------

    def _here(self) -> Shard:
        if self._shard is not None:
            return self._shard
        rank, world_size = place()
        return Shard(rank, world_size)

    def _global_batch_for(self, count: int) -> int:
        if self._source.batch_sampler is not None:
            return count
        return self._global_batch or self._rows_per_rank * count

    def _make_order(self) -> Order:
        source = self._source
        if source.batch_sampler is not None:
            return BatchOrder(batch_sampler=source.batch_sampler, seed=self._seed)
        return RowOrder(
            rows=len(source.dataset if source.sampler is None else source.sampler),
            global_batch=self._global_batch_for,
            seed=self._seed,
            shuffle=self._shuffle,
            drop_last=self._drop_last,
            sampler=source.sampler,
        )

    def _check_order(self, shuffle: bool | None) -> None:
        if self._stream not in ("shared", "own"):
            raise ConfigError(f"Asked for stream={self._stream!r}. Give 'shared' or 'own'.")
        sampler = self._source.sampler or self._source.batch_sampler
        if shuffle is not None and sampler is not None:
            raise ConfigError(
                f"Asked for shuffle={shuffle}, but the DataLoader's {type(sampler).__name__} decides the order. "
                "Leave shuffle out, or give a DataLoader without the sampler."
            )
        if shuffle and self._source.is_stream:
            raise ConfigError(
                "Asked to shuffle a stream, whose rows come in the order it yields them. "
                "Shuffle inside the generator, or give a dataset with a length."
            )

    def _worker_options(self, here: Shard) -> dict[str, Any]:
        # torch seeds worker processes from this generator, so neither two ranks nor two epochs draw alike.
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, self._epoch, here.index))
        return {**self._source.loading, "num_workers": self._source.num_workers, "generator": generator}


def _first(said: _T | None, otherwise: _T) -> _T:
    return otherwise if said is None else said


def _check_loading(loading: dict[str, Any]) -> None:
    for name in loading.keys() - _LOADING:
        raise ConfigError(
            f"ShardedLoader has no argument {name!r}.{did_you_mean(name, _LOADING | _ARGUMENTS)} "
            f"Those of torch's DataLoader that it passes on are {', '.join(sorted(_LOADING))}."
        )


_ARGUMENTS = {"batch_size", "global_batch", "shuffle", "seed", "drop_last", "collate_fn", "num_workers", "training"}


def _read_shard(shard: tuple[int, int] | None) -> Shard | None:
    if shard is None:
        return None
    index, count = shard
    if not 0 <= index < count:
        raise ConfigError(f"Asked for shard {index} of {count}. Give an index from 0 to count - 1.")
    return Shard(index, count, is_checked=False)

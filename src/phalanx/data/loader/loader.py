"""`ShardedLoader`: a data loader that gives each rank its shard of every global batch.

loader = ShardedLoader(dataset, batch_size=32)       # 32 samples per rank
loader = ShardedLoader(dataset, global_batch=128)    # 128 samples over all ranks, exact for any number of them
for epoch in range(10):
    for x, y in loader: ...                          # a new order each epoch, nothing to call
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from phalanx.comm import context
from phalanx.comm.batch.loaded_batches import Iteration
from phalanx.comm.batch.replicas import ReplicaTurn
from phalanx.comm.context import BatchShare
from phalanx.comm.elastic.shared_state import share_with_joiners
from phalanx.data.loader.options import LoaderOptions
from phalanx.data.loader.replica_turns import Loaded, elastic_turns, replica_turns
from phalanx.data.samples.batch import to_device
from phalanx.data.sampling.shuffle import mixed_seed
from phalanx.data.stream.generator_dataset import GeneratorDataset
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.data")

_LOOP = "for x, y in loader: ... (each loop is the next epoch; no EOFException, no reset)"
_BETWEEN = 0
"""Tells random numbers between two epochs from those of loading a batch."""

_GENERATOR = "px.data.GeneratorDataset(function, columns) in place of the data; then for x, y in loader: ..."
_OLD_WORDS = {
    "start": _LOOP,
    "reset": _LOOP,
    "next": _LOOP,
    "set_sample_generator": _GENERATOR,
    "set_sample_list_generator": _GENERATOR,
    "set_batch_generator": _GENERATOR,
}
"""Methods that older scripts call on loaders, and what to write instead."""


class ShardedLoader:
    """Loads this rank's shard of every global batch, in a new order each epoch.

    The rank is read when an iteration starts, so a loader may be created before `phalanx.init()`. Every
    iteration is the next epoch; the ranks take the same number of steps, and the samples of N ranks side by side are
    the batches of one process. A last batch that is not full is split as evenly as possible; a rank for which
    no sample is left gets one that does not count (`share.rows` is 0).

    Iterating is collective for streams (at every batch) and for custom samplers (at the first batch), else local.

    Args:
        data: A torch Dataset or IterableDataset, a torch DataLoader (its settings are taken over), a tuple of
            tensors or arrays, a function that returns a new iterator of samples at each call, or a `Pipeline`.
        batch_size: Samples per rank; the global batch is this times the number of ranks. A DataLoader's or pipeline's
            own otherwise.
        global_batch: Samples over all ranks, instead of `batch_size`; need not divide by their number.
        shuffle: Whether each epoch has its own order. As in the DataLoader or the pipeline; otherwise True
            when training on data with a length.
        seed: Start of every order and of the random numbers data code draws; the same on every rank. When omitted, that
            of the DataLoader's or sampler's generator, or what `torch.manual_seed` was given, on rank 0; 0 for data
            that is not trained on. Looked at once, when the first batch is asked for; a loaded state brings its own.
        drop_last: Whether to leave out a last batch that is not full; default False.
        collate_fn: Makes a batch of a list of samples; torch's default when omitted.
        num_workers: Worker processes; as in the DataLoader, otherwise 0.
        training: Whether the batches are trained on. Others leave no trace in `Context.batch` once iterated.
        stream: For an IterableDataset or function: `shared` if it yields the same samples on every rank, which are
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
        self._options = LoaderOptions(
            data,
            batch_size=batch_size,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            training=training,
            stream=stream,
            shard=shard,
            passed_on=loading,
        )
        self.training = training
        self.share: BatchShare | None = None
        """Share of the batch yielded last; None before the first and after the last of an epoch."""
        self._next_epoch, self._next_position = 0, 0
        self._epoch, self.position = 0, 0
        self._passes_over = 0
        """Passes of the script's loop that the other ranks have made before this one joined."""

        self._is_shared = False
        self.batch_at: tuple[int, int, int | None] | None = None
        """Epoch and first position of the global batch at hand, and the logical replica; None before the first."""

    if not TYPE_CHECKING:  # a type checker would believe every name

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if instead := _OLD_WORDS.get(name):
                raise AttributeError(
                    f"{message}. It belongs to an older framework. Write instead: {instead}", name=name
                )
            raise AttributeError(message, name=name, obj=self)  # to which Python adds the nearest name

    # -- what it will do ---------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The dataset that is loaded from."""
        return self._options.source.dataset

    @property
    def is_stream(self) -> bool:
        """Whether the data has an order of its own, and is read from its start."""
        return self._options.source.is_stream

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns of a batch, in order, where a pipeline or a generator's feeds say them."""
        if self._options.pipeline is not None:
            return self._options.pipeline.columns
        return self.dataset.column_names if isinstance(self.dataset, GeneratorDataset) else None

    @property
    def drops_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self._options.drop_last

    @property
    def has_batch_sampler(self) -> bool:
        """Whether a batch sampler of the user makes the batches, so that each rank gets complete ones."""
        return self._options.source.batch_sampler is not None

    @property
    def seed(self) -> int:
        """Seed of every order, the same on every rank; for training data rank 0's, read when first needed."""
        return self._options.seed()

    @property
    def given_seed(self) -> int | None:
        """The seed passed to this loader; None if it comes from rank 0's generator or torch."""
        return self._options.seed.given

    @property
    def ordering(self) -> str | None:
        """What a pipeline does to the order, in words; None for other data."""
        return self._options.describe_order()

    @property
    def epoch(self) -> int:
        """Epoch in progress; between two, the one that comes next."""
        return self._epoch

    @property
    def global_batch(self) -> int:
        """Rows of a full global batch for the present number of ranks; batches when a batch sampler cuts them."""
        return self._options.global_batch_for(self._options.here().count)

    def global_batch_for(self, ranks: int) -> int:
        """Return `global_batch` for another number of ranks that read their own samples."""
        return self._options.global_batch_for(ranks)

    @property
    def per_rank_batch(self) -> int:
        """Most samples this rank gets of a global batch."""
        count = self._options.here().count
        return -(-self._options.global_batch_for(count) // count)

    @property
    def fewest_rows(self) -> int | None:
        """Fewest samples that a rank loads of a batch of an epoch; None where that is not known before."""
        loading = self._options
        rows, count = loading.rows(), loading.here().count
        if rows is None or self.has_batch_sampler or loading.pipeline is not None:
            return None
        full = self.global_batch
        last = 0 if self.drops_last else rows % full
        sizes = [size for size in (min(full, rows), last) if size]
        return min((max(size // count, 1) for size in sizes), default=None)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch; the same on every rank."""
        return self._options.steps(self._options.here().count)

    def __len__(self) -> int:
        return self.steps_per_epoch * len(self._options.here().parts)

    # -- iterating ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, from its start. Never needed: iterating advances the epoch."""
        if self._passes_over or (self._is_shared and epoch <= self._next_epoch and self._next_position):
            return  # a rank that has joined continues where the others are
        self._next_epoch, self._next_position = epoch, 0
        self._note_return()

    def _note_return(self) -> None:
        """Note if the loader goes back to samples that it has read: how they are split over ranks is decided anew."""
        if (self._next_epoch, self._next_position) < (self._epoch, self.position):
            self._options.returns += 1

    def peek(self) -> tuple[Any, BatchShare]:
        """Return this rank's first batch of the next epoch, on the CPU, and its share; the iteration has it again.

        Collective as iterating is. A stream is reopened for it.

        Raises:
            ConfigError: If the data has no sample.
        """
        return self._options.first_batch(self._next_epoch)

    def keep_global_batch(self, ranks: int | None = None) -> None:
        """Keep the samples of a global batch, also if fewer ranks are to read their own samples.

        Args:
            ranks: As many as these ranks would read, a size per rank each; what they are now when None. A loader that
                was given its `shard` keeps what it has.
        """
        self._options.keep_global_batch(ranks)

    def __iter__(self) -> Iterator[Any]:
        if self.training and context.is_initialized() and context.current().recovery is not None:
            self.share_state()
        if self._passes_over:
            self._passes_over -= 1
            return iter(())
        self._epoch, self.position = self._next_epoch, self._next_position
        self._next_epoch, self._next_position = self._epoch + 1, 0
        return self._iterate(self._options.batches(self._epoch, self.position))

    def _iterate(self, batches: Iterator[Loaded]) -> Iterator[Any]:
        epoch, iteration, is_complete = self._epoch, self._begin_pass(), False
        try:
            replicas = self._options.here().replicas
            for turn, (batch, share, position) in self._turns(self._time_batches(batches), iteration):
                if turn is None or replicas is None or turn.index == len(replicas.local) - 1:
                    self.position = position
                self.batch_at = self._epoch, position - share.global_rows, None if turn is None else turn.replica
                yield self._register(to_device(batch), share, iteration, turn)
            if self._epoch != epoch:  # this rank has joined others, who are in a later epoch: passes before it are over
                self._passes_over = self._epoch - epoch - 1
                return
            if (replicas := self._options.here().replicas) is not None:
                replicas.end_pass(mixed_seed(self.seed, self._epoch, _BETWEEN))
            self._epoch, self.position = self._epoch + 1, 0
            if self.training and context.is_initialized():
                context.current().ended_with = self.share
            self.share, is_complete = None, True
        finally:
            if context.is_initialized():
                context.current().batches.end(iteration, is_complete=is_complete)

    def _time_batches(self, batches: Iterator[Loaded]) -> Iterator[Loaded]:
        """Return batches, those to train on by the clock of the job."""
        if not (self.training and context.is_initialized()):
            return batches
        return context.current().batches.time_batches(batches, lambda loaded: loaded[1].rows)

    def _turns(self, batches: Iterator[Loaded], iteration: Iteration) -> Iterator[tuple[ReplicaTurn | None, Loaded]]:
        """Return batches with the turns of the logical replicas that compute on them, if there are such."""
        replicas = self._options.here().replicas
        if replicas is None:
            return ((None, loaded) for loaded in batches)
        if replicas.is_elastic:
            return elastic_turns(self, self._options, replicas, iteration)
        return replica_turns(batches, self._options, replicas, self._epoch, iteration)

    def share_state(self) -> None:
        """Let ranks that join an elastic job begin at the position of this loader. Again is no matter."""
        if not self._is_shared:
            self._is_shared = True
            share_with_joiners("loader", self)

    def _begin_pass(self) -> Iteration:
        """Start a pass over the data, and return it."""
        if not context.is_initialized():
            return Iteration(self.training)
        options = self._options
        has_length = options.order is not None and not self.has_batch_sampler
        return context.current().batches.begin(
            is_training=self.training,
            shares=options.shares(),
            is_resumed=self.position > 0,
            rounds=self._rounds_left() if has_length and options.here().replicas is not None else None,
        )

    def _rounds_left(self) -> int | None:
        """Return the global batches from here to the end of the epoch; None inside an epoch of other global batches."""
        if not self.position:
            return self.steps_per_epoch
        is_alike = self._options.pipeline is None and self.position % self.global_batch == 0
        return self.steps_per_epoch - self.position // self.global_batch if is_alike else None

    def _register(self, batch: Any, share: BatchShare, iteration: Iteration, turn: ReplicaTurn | None) -> Any:
        """Return a batch after registering it as the current one."""
        self.share = share
        if context.is_initialized():
            current = context.current()
            current.batches.give(batch, share, iteration, turn)
            if self.training:
                current.rows_for = self._options.global_batch_for
        return batch

    def sample_ids(self, batch_at: tuple[int, int, int | None] | None) -> list[int] | None:
        """Return the dataset indices of a batch, by what `batch_at` was then; None of streams and of samplers."""
        if batch_at is None:
            return None
        epoch, first, replica = batch_at
        return self._options.sample_ids(epoch, first, self._options.here().parts[0] if replica is None else replica)

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, as plain numbers: the same on every rank, for any number of ranks.

        Taken inside the loop it counts the current batch as done.

        Raises:
            ConfigError: If the servers lease the batches, as workers come and go: they keep the position.
        """
        if self._options.batch_source is not None:
            raise ConfigError(
                "The state of a loader was asked for, and in this job the servers lease its batches to workers that "
                "come and go (--worker-num a:b): none has a position of its own. Leave the loader out of what is "
                "saved; save tables with fleet.save_persistables between two epochs."
            )
        order, rows = self.ordering, self._options.rows()
        return {
            "version": 1,
            "epoch": self._epoch,
            "position": self.position,
            "seed": self.seed,
            "global_batch": self.global_batch,
            **({} if rows is None else {"rows": rows}),
            **({} if order is None else {"order": order}),
            **({} if self._replicas() is None else {"replicas": self._replicas()}),
        }

    def _replicas(self) -> int | None:
        """Return the number of logical replicas that compute on the batches; None without such."""
        shard = self._options.here()
        return None if shard.replicas is None or shard.replicas.were_ranks else shard.count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state` in the next iteration, at any number of ranks and any batch size.

        Takes constant time, except for streams, which are read up to there.

        Raises:
            ConfigError: If `state` is of another version, lies inside an epoch of another order or number of samples,
                or inside one of a stream that splits itself.
        """
        if state.get("version") != 1 or not {"epoch", "position", "seed"} <= state.keys():
            raise ConfigError(
                f"Asked to load a loader state with {sorted(state)}; version 1 with epoch, position and seed is "
                "known. Load what state_dict() returned."
            )
        if self.training and state.get("replicas") != self._replicas():
            raise ConfigError(
                f"The state was saved with {state.get('replicas') or 'no'} logical replicas, and there are "
                f"{self._replicas() or 'none'} now: training would continue with other random numbers and sums. Ask "
                "for as many as it was saved with: replicas=, or phalanx run --replicas."
            )
        order = self.ordering
        if state["position"] and state.get("order") != order:
            raise ConfigError(
                f"The state was saved inside an epoch of a pipeline with {state.get('order') or 'no verbs'}, this one "
                f"has {order or 'no verbs'}: the rest of the epoch would repeat samples and miss others. Say the same "
                "shuffle and repeat."
            )
        rows = self._options.rows()
        if state["position"] and state.get("rows", rows) != rows:
            raise ConfigError(
                f"The state was saved inside an epoch of {state['rows']} samples, and this data has "
                f"{'no length' if rows is None else rows}: the rest of the epoch would repeat samples and miss others. "
                "Load the data it was saved with, or a state of the end of an epoch."
            )
        if state["position"] and self._options.order is None and self._options.is_own:
            raise ConfigError(
                'A stream that splits itself (stream="own") cannot be resumed inside an epoch. '
                "Save at the end of an epoch, or let the dataset keep its own position."
            )
        before = state.get("global_batch", self.global_batch)
        if state["position"] and before != self.global_batch:
            logger.warning(
                "the epoch resumes at sample %d in global batches of %d, and was started in global batches of %d: give "
                "global_batch= where training must not depend on the number of ranks",
                state["position"],
                self.global_batch,
                before,
            )
        self._options.seed.restore(int(state["seed"]))
        self._next_epoch, self._next_position = int(state["epoch"]), int(state["position"])
        self._note_return()
        self._epoch, self.position = self._next_epoch, self._next_position

"""`Restorer`: load a checkpoint into the model, optimizer and other objects of a rank, resharding tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.folder.manifest import CheckpointManifest
from phalanx.checkpoint.folder.reader import CheckpointReader, saved_names
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import (
    TrainingState,
    load_optimizer,
    load_scheduler,
    merge_rank_states,
    param_names,
)
from phalanx.checkpoint.state.saved_values import SavedValues, without_rank
from phalanx.checkpoint.state.tables import has_tables
from phalanx.checkpoint.tensors.local_tensors import AVERAGE, MODEL, OPTIMIZER, RANKS, LocalTensor, ModelView, rank_name
from phalanx.checkpoint.tensors.names import check_names
from phalanx.checkpoint.tensors.write_plan import ChunkDescription, TensorLayout, plan_writes
from phalanx.comm import context
from phalanx.comm.batch.random_streams import RandomStreams
from phalanx.comm.local.random_state import RandomState, seed_all
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.replica_record import ReplicaRecord, part_of_group, ranks_of_part
from phalanx.parallel.distribute import asked_replicas
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.replicas.resume import resume_replicas
from phalanx.parallel.session import is_distributed_optimizer, session
from phalanx.parallel.stateful import saved_state_of
from phalanx.parallel.step.norms import local_part

logger = logging.getLogger("phalanx.checkpoint")


class Restorer:
    """Restores one checkpoint on one rank."""

    def __init__(self, ranks: Ranks, training: TrainingState, reader: CheckpointReader) -> None:
        self.ranks, self.training, self.reader = ranks, training, reader
        self.manifest: CheckpointManifest = reader.manifest
        self.saved = SavedValues(reader)
        self.view = ModelView(training.model)
        self.local_tensors = dict(self.view.local_tensors())
        self.local_names = {without_rank(name): name for name in self.local_tensors}
        self._is_same_size = ranks.world_size == self.manifest.world_size
        # Ranks that take local steps (local SGD) share the mean of their parameters.
        self._averages = bool(reader.values(0, "averages"))
        self.source_rank = ranks.rank if self._is_same_size else 0
        """The saved rank whose values this rank loads."""

        self._has_new_replicas = False
        """Whether the number of logical replicas is the checkpoint's, and not the script's."""

        self.aliases: dict[str, str] = self.saved.merge_ranks("aliases")
        self.layout: dict[str, TensorLayout] = {}

    def check(self) -> None:
        """Compare names and shapes of all ranks with the checkpoint's, before changing anything. Collective."""
        self.layout = agree_on_layout(self.ranks, self.local_tensors, self._require_fit)
        self.ranks.decide("optimizer", self._optimizer_names, self._require_state)

    def extra(self) -> Any:
        """Return the user's `extra`; rank 0's at another number of ranks."""
        return self.reader.values(self.source_rank, "extra") if self.saved.has("extra") else None

    def _require_fit(self, layout: dict[str, TensorLayout]) -> None:
        folder = self.manifest.folder
        names = {without_rank(name).removeprefix(MODEL) for name in layout}
        saved = saved_names(self.manifest.tensors, MODEL) - self.view.aliases.keys()
        check_names("parameters and buffers", (self.aliases.get(name, name) for name in names), saved, folder)
        check_names("modules with extra state", self.view.values, self.saved.merge_ranks("model"), folder)
        for name, entry in layout.items():
            plain = without_rank(name).removeprefix(MODEL)
            shape = self._saved_shape(name, MODEL + self.aliases.get(plain, plain))
            if shape != entry.shape:
                raise ConfigError(
                    f"{folder} does not fit: {plain!r} has shape {list(shape)} there and {list(entry.shape)} in this "
                    "model. Build the model that was saved."
                )

    def _saved_shape(self, name: str, saved: str) -> tuple[int, ...]:
        """Return the shape of the saved tensor that a tensor is read from.

        Args:
            name: The tensor, as a rank holds it.
            saved: Its name in the checkpoint, where it is one for all ranks.

        Raises:
            ConfigError: If every saved rank had its own, and they cannot be merged.
        """
        tensors = self.manifest.tensors
        if saved in tensors:
            return tensors[saved].shape
        self._require_joinable(saved)
        rank = int(name.split("/")[1]) if name.startswith(RANKS) else 0
        return tensors[rank_name(rank if self._is_same_size else 0, saved)].shape

    def _require_joinable(self, name: str) -> None:
        if not self._is_same_size and not self._averages:
            before, now = self.manifest.world_size, self.ranks.world_size
            raise ConfigError(
                f"{self.manifest.folder}: {name!r} was saved as {before} shards of unknown layout, "
                f"one per rank, and cannot be resharded to {now} ranks. Load it with {before} ranks, or save it "
                'under a Plan whose rule for it says managed = "module" and its layout.'
            )

    def _optimizer_names(self) -> list[str] | None:
        optimizer = self.training.optimizer
        return None if optimizer is None else param_names(optimizer, self.view)

    def _require_state(self, answers: list[list[str] | None]) -> None:
        folder = self.manifest.folder
        missing = [word for word in self.training.words if word != "model" and not self.saved.has(word)]
        if self.manifest.tables is None and has_tables(self.training.model):
            missing.append("tables")
        if missing:
            raise ConfigError(
                f"{folder} holds no {' and no '.join(missing)}: it was saved without. Load what it holds, and "
                "start the rest fresh."
            )
        if self.training.optimizer is not None:
            trained = {name for names in answers for name in names or ()}
            saved = {name for group in self.saved.groups() for name in group["params"]}
            check_names("parameters of the optimizer", trained, saved, folder)
            for name in saved_names(self.manifest.tensors, OPTIMIZER):
                if OPTIMIZER + name not in self.manifest.tensors:
                    self._require_joinable(OPTIMIZER + name)
        if self.training.ema is not None:
            saved = saved_names(self.manifest.tensors, AVERAGE)
            averaged = self.training.ema.state_dict()["shadow"].keys()
            # Rank 0 may hold one stage of several.
            check_names("averaged weights", averaged, saved & averaged, folder)
        if not self._is_same_size:
            self._require_common_values()

    def _require_common_values(self) -> None:
        """Raise if unsharded state differed between the saved ranks: which is this rank's?"""
        for word in ("loader", "scheduler"):
            if word in self.training.words and not self.saved.is_common(word):
                raise ConfigError(
                    f"the state of the {word} differs between ranks, and {self.manifest.world_size} ranks "
                    f"saved it, not {self.ranks.world_size}. Load it with as many, or omit {word} and start it fresh."
                )
        if self.saved.has("extra") and not self.saved.is_common("extra"):
            logger.warning("extra differs between the ranks that saved it; all ranks get rank 0's")

    def resume_replicas(self) -> None:
        """Split batches over what the checkpoint was trained with, unless the run says otherwise. Collective."""
        optimizer, loader = self.training.optimizer, self.training.loader
        is_training = isinstance(loader, ShardedLoader) and loader.training
        if (
            not self.saved.has("replicas")
            or optimizer is None
            or not is_training
            or not is_distributed_optimizer(optimizer)
        ):
            return
        record = self._replica_record()
        session.loaded_obstacle = record.obstacle
        if asked_replicas() != 0:
            self._has_new_replicas = resume_replicas(record, context.current(), loader)
        if (replicas := context.current().replicas) is not None:
            replicas.labels_per_row = record.labels_per_row

    def _replica_records(self) -> list[ReplicaRecord]:
        ranks = range(self.manifest.world_size)
        return [ReplicaRecord.read(self.reader.values(rank, "replicas"), self.manifest.folder) for rank in ranks]

    def _replica_record(self) -> ReplicaRecord:
        """Return that of rank 0; all have one, but for their threads and places."""
        records = self._replica_records()
        record, readers = records[0], context.current().readers
        if len({each.threads for each in records}) != 1:
            record = replace(record, rounding="its ranks computed with different numbers of threads")
        before, now = len(records) // len({each.index for each in records}), self.ranks.world_size // readers.count
        if record.index is None or record.is_asked or before == now:
            return record
        why = f"each share of a batch was computed by {before} rank{'s' * (before != 1)}, and is by {now} now"
        return replace(record, obstacle=record.obstacle or why)

    def run(self) -> None:
        """Read and load everything. Not collective."""
        for common, name in self.local_names.items():
            self._fill(common, name)
        for name, value in self.saved.merge_ranks("model").items():
            self.view.model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        optimizer = self.training.optimizer
        if optimizer is not None:
            load_optimizer(optimizer, self.view, self._optimizer_state(optimizer), self.saved.groups())
            self._load_random()
        if self.training.scheduler is not None:
            load_scheduler(self.training.scheduler, self.reader.values(self.source_rank, "scheduler"))
        if self.training.loader is not None:
            self._load_loader(self.training.loader)
        if self.training.ema is not None:
            self._load_average(self.training.ema)
        self._load_kept()

    def _load_average(self, ema: EMA) -> None:
        shadow = {}
        for name, tensor in ema.state_dict()["shadow"].items():
            saved = self.manifest.tensors.get(AVERAGE + name)
            if saved is None:
                shadow[name] = self._of_all_ranks(AVERAGE + name)
                continue
            local_name = self.local_names[MODEL + name]
            shadow[name] = torch.empty_like(local_part(tensor), dtype=saved.dtype)
            chunk = self.layout[local_name].chunk_of(self.local_tensors[local_name].part)
            self.reader.read(AVERAGE + name, shadow[name], chunk)
        ema.load_state_dict({**self.reader.values(self.source_rank, "ema"), "shadow": shadow})

    def _fill(self, common: str, name: str) -> None:
        plain = common.removeprefix(MODEL)
        saved, local = MODEL + self.aliases.get(plain, plain), self.local_tensors[name]
        if saved in self.manifest.tensors:
            self.reader.read(saved, local.tensor, self.layout[name].chunk_of(local.part))
            return
        tensor = self._of_all_ranks(saved)
        with torch.no_grad():
            local.tensor.copy_(tensor)

    def _of_all_ranks(self, name: str) -> Tensor:
        """Return this rank's own saved tensor, or at another number of ranks the mean of all."""
        if self._is_same_size:
            return self.reader.read_full(rank_name(self.ranks.rank, name))
        saved = [self.reader.read_full(rank_name(rank, name)) for rank in range(self.manifest.world_size)]
        mean: Tensor = merge_rank_states(saved, "mean", self.ranks.world_size)
        return mean

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {name: {} for name in param_names(optimizer, self.view)}
        for rank in self.saved.distinct("optimizer"):
            for name, numbers in self.reader.values(rank, "optimizer")["state"].items():
                if name in state:
                    state[name] |= numbers
        for name in saved_names(self.manifest.tensors, OPTIMIZER):
            param, _, key = name.rpartition("/")
            if param in state and param in self.view.tensors:
                present = optimizer.state.get(self.view.tensors[param], {}).get(key)
                state[param][key] = self._state_tensor(param, OPTIMIZER + name, present)
        return {name: entries for name, entries in state.items() if entries}

    def _state_tensor(self, param_name: str, name: str, present: Any) -> Tensor:
        """Return this rank's shard of a tensor of optimizer state.

        Args:
            param_name: Its parameter.
            name: Its name in the checkpoint.
            present: The optimizer's current value, whose memory is reused if it fits.
        """
        saved = self.manifest.tensors.get(name)
        if saved is None:
            return self._of_all_ranks(name)
        local_name = self.local_names[MODEL + param_name]
        local, entry = self.local_tensors[local_name], self.layout[local_name]
        if saved.shape != entry.shape:
            return self.reader.read_full(name)
        param, chunk = self.view.tensors[param_name], entry.chunk_of(local.part)
        if _is_alike(present, local.tensor, saved.dtype):
            self.reader.read(name, local_part(present), chunk)
            return present
        target = torch.empty_like(local.tensor, dtype=saved.dtype)
        self.reader.read(name, target, chunk)
        return shard_like(param, target)

    def _load_loader(self, loader: Any) -> None:
        state = self.reader.values(self.source_rank, "loader")
        if asked_replicas() == 0 and isinstance(state, dict):
            state.pop("replicas", None)  # asked not to continue with them
        loader.load_state_dict(state)

    def _load_streams(self) -> bool:
        """Let random numbers continue as those of the shares of a batch; return whether they do.

        They are where the checkpoint was trained with shares that are not those of its ranks, or is now.
        """
        if not self.saved.has("replicas") or not context.is_initialized():
            return False
        current = context.current()
        record = self._replica_record()
        replicas, ranks = current.replicas, current.readers.count
        is_as_many = record.count == (ranks if replicas is None else replicas.count)
        if record.is_asked or not is_as_many or (replicas is None and not self.saved.has("streams")):
            return False
        states = self._streams()
        if states.keys() != set(range(record.count)):
            return False  # of ranks that held parts of a model
        if replicas is None:
            states[current.readers.index].restore()
        elif self._has_new_replicas or replicas.were_ranks:
            replicas.streams = RandomStreams(states, replicas.assignment[current.readers.index])
        else:
            return False
        return True

    def _streams(self) -> dict[int, RandomState]:
        """Return the random numbers of each share of a batch: of its rank, or of the replica that it was.

        Of a group of ranks that computed a share together, those of the rank whose place in it this one has in its own.
        """
        ranks = ranks_of_part([record.index for record in self._replica_records()], part_of_group())
        if not self.saved.has("streams"):
            return {index: RandomState.from_dict(self.reader.values(rank, "random")) for index, rank in ranks.items()}
        by_rank = [self.reader.values(rank, "streams") for rank in ranks.values()]
        named = {name: state for streams in by_rank for name, state in streams.items() if name.isdecimal()}
        return {int(name): RandomState.from_dict(state) for name, state in named.items()}

    def _load_random(self) -> None:
        if self._load_streams():
            return
        if self.ranks.rank < self.manifest.world_size:
            RandomState.from_dict(self.reader.values(self.ranks.rank, "random")).restore()
            return
        rank, seed = self.ranks.rank, int(self.reader.values(0, "random")["torch"].sum()) + self.ranks.rank
        seed_all(seed)
        logger.info(
            "rank %d was not among the ranks that saved this: its random generators start at seed %d", rank, seed
        )

    def _load_kept(self) -> None:
        owners = {"model": self.training.model, "optimizer": self.training.optimizer}
        live = {
            f"{word}/{key}": entry for word, owner in owners.items() for key, entry in saved_state_of(owner).items()
        }
        saved: dict[str, Any] = self.reader.values(self.source_rank, "kept")
        for name in live.keys() - saved.keys():
            logger.warning("%s has no state %r, which is reset", self.manifest.folder, name)
        for name in saved.keys() - live.keys():
            if name.partition("/")[0] in self.training.words:
                logger.warning("%s has state %r, which nothing here uses: it is dropped", self.manifest.folder, name)
        for name in saved.keys() & live.keys():
            self._load_one_kept(name, live[name].source, saved[name])

    def _load_one_kept(self, name: str, keeper: Any, saved: dict[str, Any]) -> None:
        world, before = self.ranks.world_size, self.manifest.world_size
        if self._is_same_size:
            keeper.load_state_dict(saved["state"])
        elif saved["elsewhere"] == "drop":
            logger.warning("state %r of %d ranks does not apply to %d: it is dropped", name, before, world)
        else:
            states = [self.reader.values(rank, "kept")[name]["state"] for rank in range(before)]
            keeper.load_state_dict(merge_rank_states(states, saved["elsewhere"], world))


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return a local shard as a DTensor if the parameter is one, with its placements."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def agree_on_layout(
    ranks: Ranks, local_tensors: Mapping[str, LocalTensor], check: Callable[[dict[str, TensorLayout]], None]
) -> dict[str, TensorLayout]:
    """Return the layout of the tensors over all ranks. Collective; all ranks raise what `check` raises on rank 0."""

    def decide(answers: list[dict[str, Any]]) -> dict[str, Any]:
        layout = plan_writes(
            [{name: ChunkDescription.from_json(part) for name, part in parts.items()} for parts in answers]
        )
        check(layout)
        return {name: entry.to_json() for name, entry in layout.items()}

    decision = ranks.decide(
        "layout", lambda: {name: local.part.to_json() for name, local in local_tensors.items()}, decide
    )
    return {name: TensorLayout.from_json(entry) for name, entry in decision.items()}


def _is_alike(present: Any, local: Tensor, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of this dtype whose local part has the shape of `local`."""
    return isinstance(present, Tensor) and present.dtype == dtype and local_part(present).shape == local.shape

"""One checkpoint on its way into the model, optimizer and the rest of one rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.checkpoint.folder.manifest import Manifest
from phalanx.checkpoint.folder.read import Reader, saved_names
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import (
    Training,
    combine,
    load_optimizer,
    load_scheduler,
    param_names,
    set_random_state,
)
from phalanx.checkpoint.state.tables import has_tables
from phalanx.checkpoint.tensors.file import bytes_of
from phalanx.checkpoint.tensors.local import AVERAGE, MODEL, OPTIMIZER, RANKS, Held, ModelView, own
from phalanx.checkpoint.tensors.names import require_same
from phalanx.checkpoint.tensors.write_plan import Entry, Part, deal_out
from phalanx.data.sampling.seeding import seed_all
from phalanx.errors import ConfigError
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.stateful import kept_state
from phalanx.parallel.step.norms import local_part

logger = logging.getLogger("phalanx.checkpoint")


class Restoring:
    """One checkpoint on its way into one rank."""

    def __init__(self, ranks: Ranks, training: Training, reader: Reader) -> None:
        self.ranks, self.training, self.reader = ranks, training, reader
        self.manifest: Manifest = reader.manifest
        self.view = ModelView(training.model)
        self.held = dict(self.view.held())
        self.local_names = {_common(name): name for name in self.held}
        self._is_same_size = ranks.world_size == self.manifest.world_size
        # Ranks that train apart share the mean of their parameters.
        self._averages = bool(reader.values(0, "averages"))
        self.twin = ranks.rank if self._is_same_size else 0
        """The saved rank whose values this one takes."""

        self.aliases: dict[str, str] = self._merged("aliases")
        self.layout: dict[str, Entry] = {}

    def check(self) -> None:
        """Compare names and shapes of all ranks with the checkpoint's, before anything is changed. Collective."""
        self.layout = agree_on_layout(self.ranks, self.held, self._require_fit)
        self.ranks.decide("optimizer", self._optimizer_names, self._require_state)

    def extra(self) -> Any:
        """Return what the user saved beside; rank 0's at another number of ranks."""
        return self.reader.values(self.twin, "extra") if self._has("extra") else None

    def _require_fit(self, layout: dict[str, Entry]) -> None:
        folder = self.manifest.folder
        wanted = {_common(name).removeprefix(MODEL) for name in layout}
        saved = saved_names(self.manifest.tensors, MODEL) - self.view.aliases.keys()
        require_same("parameters and buffers", (self.aliases.get(name, name) for name in wanted), saved, folder)
        require_same("modules with extra state", self.view.values, self._merged("model"), folder)
        for name, entry in layout.items():
            plain = _common(name).removeprefix(MODEL)
            found = self._saved_shape(name, MODEL + self.aliases.get(plain, plain))
            if found != entry.shape:
                raise ConfigError(
                    f"{folder} does not fit: {plain!r} has shape {list(found)} there and {list(entry.shape)} in this "
                    "model. Build the model that was saved."
                )

    def _saved_shape(self, name: str, saved: str) -> tuple[int, ...]:
        """Return the shape of what a tensor is to be read from.

        Args:
            name: The tensor, as a rank holds it.
            saved: Its name in the checkpoint, where it is one for all ranks.

        Raises:
            ConfigError: If every saved rank had one of its own, which cannot be joined.
        """
        tensors = self.manifest.tensors
        if saved in tensors:
            return tensors[saved].shape
        self._require_joinable(saved)
        asking = int(name.split("/")[1]) if name.startswith(RANKS) else 0
        return tensors[own(asking if self._is_same_size else 0, saved)].shape

    def _require_joinable(self, name: str) -> None:
        if not self._is_same_size and not self._averages:
            before, now = self.manifest.world_size, self.ranks.world_size
            raise ConfigError(
                f"{self.manifest.folder}: {name!r} was saved as {before} parts whose place in the whole is not known, "
                f"one of each rank, and cannot be cut anew for {now} ranks. Load it with {before} ranks, or save it "
                'under a Plan whose rule for it says managed = "module" and its layout.'
            )

    def _optimizer_names(self) -> list[str] | None:
        optimizer = self.training.optimizer
        return None if optimizer is None else param_names(optimizer, self.view)

    def _require_state(self, said: list[list[str] | None]) -> None:
        folder = self.manifest.folder
        missing = [word for word in self.training.words if word != "model" and not self._has(word)]
        if self.manifest.tables is None and has_tables(self.training.model):
            missing.append("tables")
        if missing:
            raise ConfigError(
                f"{folder} holds no {' and no '.join(missing)}: it was saved without. Load what it holds, and "
                "begin anew with the rest."
            )
        if self.training.optimizer is not None:
            wanted = {name for names in said for name in names or ()}
            saved = {name for group in self._groups() for name in group["params"]}
            require_same("parameters of the optimizer", wanted, saved, folder)
            for name in saved_names(self.manifest.tensors, OPTIMIZER):
                if OPTIMIZER + name not in self.manifest.tensors:
                    self._require_joinable(OPTIMIZER + name)
        if self.training.ema is not None:
            saved = saved_names(self.manifest.tensors, AVERAGE)
            averaged = self.training.ema.state_dict()["shadow"].keys()
            # Rank 0 may hold one stage of several.
            require_same("averaged weights", averaged, saved & averaged, folder)
        if not self._is_same_size:
            self._require_common_values()

    def _require_common_values(self) -> None:
        """Raise if state that is not cut over ranks was another one on every rank: which is this rank's?"""
        for word in ("loader", "scheduler"):
            if word in self.training.words and not self._is_common(word):
                raise ConfigError(
                    f"the state of the {word} was another one on every rank, and {self.manifest.world_size} ranks "
                    f"saved it, not {self.ranks.world_size}. Load it with as many, or leave {word} out and begin anew."
                )
        if self._has("extra") and not self._is_common("extra"):
            logger.warning("extra was another on every rank that saved; all ranks get rank 0's")

    def run(self) -> None:
        """Read and take over everything. Not collective."""
        for common, name in self.local_names.items():
            self._fill(common, name)
        for name, value in self._merged("model").items():
            self.view.model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        optimizer = self.training.optimizer
        if optimizer is not None:
            load_optimizer(optimizer, self.view, self._optimizer_state(optimizer), self._groups())
            self._load_random()
        if self.training.scheduler is not None:
            load_scheduler(self.training.scheduler, self.reader.values(self.twin, "scheduler"))
        if self.training.loader is not None:
            self.training.loader.load_state_dict(self.reader.values(self.twin, "loader"))
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
            box = self.layout[local_name].box_of(self.held[local_name].part)
            self.reader.read(AVERAGE + name, shadow[name], box)
        ema.load_state_dict({**self.reader.values(self.twin, "ema"), "shadow": shadow})

    def _fill(self, common: str, name: str) -> None:
        plain = common.removeprefix(MODEL)
        saved, held = MODEL + self.aliases.get(plain, plain), self.held[name]
        if saved in self.manifest.tensors:
            self.reader.read(saved, held.tensor, self.layout[name].box_of(held.part))
            return
        found = self._of_all_ranks(saved)
        with torch.no_grad():
            held.tensor.copy_(found)

    def _of_all_ranks(self, name: str) -> Tensor:
        """Return this rank's tensor of those that every saved rank had of its own, or their mean."""
        if self._is_same_size:
            return self.reader.whole(own(self.ranks.rank, name))
        saved = [self.reader.whole(own(rank, name)) for rank in range(self.manifest.world_size)]
        mean: Tensor = combine(saved, "mean", self.ranks.world_size)
        return mean

    def _has(self, word: str) -> bool:
        return word in self.manifest.values[0]

    def _distinct(self, word: str) -> list[int]:
        """Return one saved rank for each different value of a word."""
        seen: dict[str, int] = {}
        for rank, tree in enumerate(self.manifest.values):
            seen.setdefault(json.dumps(tree[word]), rank)
        return list(seen.values())

    def _is_common(self, word: str) -> bool:
        """Return whether all saved ranks had the same value of a word, tensors in it included."""
        first, tensors = own(0, f"values.{word}."), self.manifest.tensors
        return len(self._distinct(word)) == 1 and all(
            tensors[name].dtype == tensors[other].dtype
            and bytes_of(self.reader.whole(name)) == bytes_of(self.reader.whole(other))
            for name in tensors
            if name.startswith(first)
            for other in (own(rank, _common(name)) for rank in range(1, self.manifest.world_size))
        )

    def _merged(self, word: str) -> dict[str, Any]:
        """Return a dict of which every rank may have had a part."""
        return {k: v for rank in self._distinct(word) for k, v in self.reader.values(rank, word).items()}

    def _groups(self) -> list[dict[str, Any]]:
        """Return the saved optimizer's groups, with the parameters of all ranks."""
        merged: list[dict[str, Any]] = []
        for rank in self._distinct("optimizer"):
            for number, group in enumerate(self.reader.values(rank, "optimizer")["groups"]):
                if number == len(merged):
                    merged.append(group)
                else:
                    merged[number]["params"] = list(dict.fromkeys(merged[number]["params"] + group["params"]))
        return merged

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {name: {} for name in param_names(optimizer, self.view)}
        for rank in self._distinct("optimizer"):
            for name, numbers in self.reader.values(rank, "optimizer")["state"].items():
                if name in state:
                    state[name] |= numbers
        for name in saved_names(self.manifest.tensors, OPTIMIZER):
            param, _, key = name.rpartition("/")
            if param in state and param in self.view.tensors:
                present = optimizer.state.get(self.view.tensors[param], {}).get(key)
                state[param][key] = self._state_tensor(param, OPTIMIZER + name, present)
        return {name: found for name, found in state.items() if found}

    def _state_tensor(self, param_name: str, name: str, present: Any) -> Tensor:
        """Return a tensor of optimizer state as this rank is to hold it.

        Args:
            param_name: Its parameter.
            name: Its name in the checkpoint.
            present: What the optimizer holds in its place now: memory to use again, which is dear to get anew.
        """
        saved = self.manifest.tensors.get(name)
        if saved is None:
            return self._of_all_ranks(name)
        local_name = self.local_names[MODEL + param_name]
        held, entry = self.held[local_name], self.layout[local_name]
        if saved.shape != entry.shape:
            return self.reader.whole(name)
        param, box = self.view.tensors[param_name], entry.box_of(held.part)
        if _is_alike(present, held.tensor, saved.dtype):
            self.reader.read(name, local_part(present), box)
            return present
        local = torch.empty_like(held.tensor, dtype=saved.dtype)
        self.reader.read(name, local, box)
        return placed_as(param, local)

    def _load_random(self) -> None:
        if self.ranks.rank < self.manifest.world_size:
            set_random_state(self.reader.values(self.ranks.rank, "random"))
            return
        rank, seed = self.ranks.rank, int(self.reader.values(0, "random")["torch"].sum()) + self.ranks.rank
        seed_all(seed)
        logger.info("rank %d was not there when this was saved: its random numbers begin at seed %d", rank, seed)

    def _load_kept(self) -> None:
        owners = {"model": self.training.model, "optimizer": self.training.optimizer}
        live = {f"{word}/{key}": kept for word, owner in owners.items() for key, kept in kept_state(owner).items()}
        saved: dict[str, Any] = self.reader.values(self.twin, "kept")
        for name in live.keys() - saved.keys():
            logger.warning("%s has no state %r, which begins anew", self.manifest.folder, name)
        for name in saved.keys() - live.keys():
            if name.partition("/")[0] in self.training.words:
                logger.warning("%s has state %r, which nothing here keeps: it is dropped", self.manifest.folder, name)
        for name in saved.keys() & live.keys():
            self._load_one_kept(name, live[name].keeper, saved[name])

    def _load_one_kept(self, name: str, keeper: Any, saved: dict[str, Any]) -> None:
        world, before = self.ranks.world_size, self.manifest.world_size
        if self._is_same_size:
            keeper.load_state_dict(saved["state"])
        elif saved["elsewhere"] == "drop":
            logger.warning("state %r of %d ranks means nothing to %d: it is dropped", name, before, world)
        else:
            states = [self.reader.values(rank, "kept")[name]["state"] for rank in range(before)]
            keeper.load_state_dict(combine(states, saved["elsewhere"], world))


def placed_as(param: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part of a tensor that lies on the ranks as a parameter does."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def agree_on_layout(
    ranks: Ranks, held: Mapping[str, Held], check: Callable[[dict[str, Entry]], None]
) -> dict[str, Entry]:
    """Return how the ranks hold their tensors together. Collective; all ranks raise what `check` raises on rank 0."""

    def decide(said: list[dict[str, Any]]) -> dict[str, Any]:
        layout = deal_out([{name: Part.from_json(part) for name, part in parts.items()} for parts in said])
        check(layout)
        return {name: entry.to_json() for name, entry in layout.items()}

    decided = ranks.decide("layout", lambda: {name: one.part.to_json() for name, one in held.items()}, decide)
    return {name: Entry.from_json(entry) for name, entry in decided.items()}


def _is_alike(present: Any, held: Tensor, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor that lies on the ranks as a parameter does."""
    return isinstance(present, Tensor) and present.dtype == dtype and local_part(present).shape == held.shape


def _common(name: str) -> str:
    """Return a tensor's name without the rank that holds its own."""
    return name.split("/", 2)[2] if name.startswith(RANKS) else name

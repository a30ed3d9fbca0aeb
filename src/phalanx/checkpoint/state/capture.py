"""`capture`: collect the training state of a rank for a checkpoint: model, optimizer, loader, random state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.checkpoint.tensors.local_tensors import LocalTensor, ModelView, local_tensor, rank_name
from phalanx.comm import context
from phalanx.comm.local.random_state import RandomState
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.replica_record import ReplicaRecord, streams_of
from phalanx.parallel.optim.ema import EMA
from phalanx.parallel.stateful import saved_state_of
from phalanx.parallel.step.norms import local_part
from phalanx.state_tree import pack_tree


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The objects whose state a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer | None = None
    loader: Any = None
    scheduler: Any = None
    ema: EMA | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"a checkpoint takes a folder and a torch.nn.Module, found {type(self.model).__name__} as the model. "
                "Hold several in one: nn.ModuleDict."
            )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                f"a checkpoint takes one torch optimizer after the model, found {type(self.optimizer).__name__}. Other "
                'objects have names: loader=, scheduler=; a second optimizer goes into extra={"second": '
                "second.state_dict()}."
            )
        for name in ("loader", "scheduler"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "load_state_dict"):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict. Give "
                    f"{'the ShardedLoader that px.distribute returns' if name == 'loader' else 'a torch scheduler'}."
                )

    @property
    def words(self) -> list[str]:
        """Names of the objects that are set."""
        names = ("model", "optimizer", "loader", "scheduler", "ema")
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True)
class RankState:
    """The state of one rank at one moment, by reference: tensors are those of the training, not copies."""

    local_tensors: dict[str, LocalTensor]
    values: dict[str, Any]
    """JSON."""


def capture(training: TrainingState, extra: Mapping[str, Any] | None = None) -> RankState:
    """Return the state of this rank. Not collective.

    Raises:
        ConfigError: If something cannot be saved; names it.
    """
    view = ModelView(training.model)
    local_tensors = dict(view.local_tensors())
    values: dict[str, Any] = {
        "aliases": view.aliases,
        "averages": view.averages_parameters,
        "model": view.values,
        "random": RandomState.current().to_dict(),
        **_replicas(training.optimizer),
        "kept": {f"{name}/{key}": state for name, key, state in _stateful_entries(training)},
    }
    if training.optimizer is not None:
        state, groups = optimizer_state(training.optimizer, view)
        local_tensors |= view.optimizer_tensors(state)
        numbers = {
            name: {k: v for k, v in entries.items() if not isinstance(v, Tensor)} for name, entries in state.items()
        }
        values["optimizer"] = {
            "groups": groups,
            "state": {name: entries for name, entries in numbers.items() if entries},
        }
    for word in ("loader", "scheduler"):
        if getattr(training, word) is not None:
            values[word] = getattr(training, word).state_dict()
    if training.ema is not None:
        average = training.ema.state_dict()
        local_tensors |= view.average_tensors(average.pop("shadow"))
        values["ema"] = average
    if extra is not None:
        values["extra"] = dict(extra)
    tensors: dict[str, Tensor] = {}
    tree = pack_tree(values, "values", tensors)
    local_tensors |= {
        rank_name(view.rank, name): local_tensor(name, local_part(tensor)) for name, tensor in tensors.items()
    }
    return RankState(local_tensors, tree)


def _replicas(optimizer: Optimizer | None) -> dict[str, Any]:
    if not context.is_initialized():
        return {}
    record, streams = ReplicaRecord.of(context.current(), optimizer), streams_of(context.current())
    return {"replicas": record.values(), **({} if streams is None else {"streams": streams})}


def _stateful_entries(training: TrainingState) -> list[tuple[str, str, dict[str, Any]]]:
    owners = {"model": training.model, "optimizer": training.optimizer}
    return [
        (name, key, {"elsewhere": entry.elsewhere, "state": dict(entry.source.state_dict())})
        for name, owner in owners.items()
        for key, entry in saved_state_of(owner).items()
    ]


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(optimizer: Optimizer, view: ModelView) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return an optimizer's state by parameter name, and its groups with names for parameters.

    Raises:
        ConfigError: If it holds a parameter that the model does not.
    """
    names = param_names(optimizer, view)
    state_dict = optimizer.state_dict()
    state = {names[index]: dict(entries) for index, entries in state_dict["state"].items()}
    groups = [
        {key: _number(value) for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [names[index] for index in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return state, groups


def param_names(optimizer: Optimizer, view: ModelView) -> list[str]:
    """Return the plain names of an optimizer's parameters, in the order of its indices."""
    params = dict.fromkeys(param for group in optimizer.param_groups for param in group["params"])
    unknown = [param for param in params if id(param) not in view.names]
    if unknown:
        raise ConfigError(
            f"the optimizer holds {len(unknown)} parameters that the model does not, the first of shape "
            f"{list(unknown[0].shape)}. Give save and load the one module that holds all that the optimizer trains."
        )
    return [view.names[id(param)] for param in params]


def _number(value: Any) -> Any:
    """Return the value of a learning rate that is a tensor."""
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def load_optimizer(
    optimizer: Optimizer, view: ModelView, state: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Load into an optimizer the state that `optimizer_state` returned, of any number of ranks.

    Args:
        optimizer: Is changed in place.
        view: The model.
        state: By parameter name, by key; tensors as this rank's shards.
        groups: Options and parameter names of the saved groups.

    Raises:
        ConfigError: If parameters are grouped differently.
    """
    names = param_names(optimizer, view)
    index_of = {name: index for index, name in enumerate(names)}
    live = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [view.names[id(param)] for param in group["params"]]
        options = _options_of(number, mine, groups)
        options |= {
            key: torch.full_like(value, options[key])
            for key, value in group.items()
            if isinstance(value, Tensor) and isinstance(options.get(key), float)  # a learning rate that is a tensor
        }
        live.append(options | {"params": [index_of[name] for name in mine]})
        if "param_names" in group:
            live[-1]["param_names"] = group["param_names"]
    by_index = {index_of[name]: dict(entries) for name, entries in state.items() if name in index_of}
    optimizer.load_state_dict({"state": by_index, "param_groups": live})
    params = {view.names[id(param)]: param for group in optimizer.param_groups for param in group["params"]}
    for name, entries in state.items():
        for key, value in entries.items():
            # torch gives all floating-point state the dtype of its parameter: a float32 moment would lose its bits.
            if name in params and isinstance(value, Tensor):
                loaded = optimizer.state.get(params[name], {}).get(key)
                if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[params[name]][key] = value.to(loaded.device)


def _options_of(number: int, names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    matches = [group for group in groups if set(names) & set(group["params"])] or groups[number : number + 1]
    if len(matches) != 1:
        raise ConfigError(
            f"parameter group {number} of the optimizer holds parameters of {len(matches)} groups of the checkpoint. "
            "Group the parameters as they were when it was saved."
        )
    return {key: value for key, value in matches[0].items() if key != "params"}


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Load the saved state into a scheduler; JSON has no Counter, so those are rebuilt, also in nested schedulers."""
    _make_counters(scheduler, state)
    scheduler.load_state_dict(state)


def _make_counters(scheduler: Any, state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(getattr(scheduler, key, None), Counter):
            state[key] = Counter(value)
    for part, saved in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        _make_counters(part, saved)


def merge_rank_states(states: Sequence[Any], elsewhere: str, world_size: int) -> Any:
    """Return one rank's share of the state of all saved ranks, for another number of ranks.

    Args:
        states: Trees of the saved ranks.
        elsewhere: `first`, `mean` or `share`, see `Elsewhere`.
        world_size: The number of ranks now.
    """
    first = states[0]
    if isinstance(first, Tensor):
        if elsewhere == "first" or not first.is_floating_point():
            return first.clone()
        total = sum((state.double() for state in states[1:]), start=first.double())
        return (total / (len(states) if elsewhere == "mean" else world_size)).to(first.dtype)
    if isinstance(first, dict):
        return {key: merge_rank_states([state[key] for state in states], elsewhere, world_size) for key in first}
    if isinstance(first, list | tuple):
        parts: Callable[[Any], Any] = type(first)
        return parts(merge_rank_states(list(group), elsewhere, world_size) for group in zip(*states, strict=True))
    return first

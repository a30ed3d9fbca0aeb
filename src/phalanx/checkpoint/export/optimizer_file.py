"""`export_optimizer`, `load_optimizer_file`: export the full state of an optimizer to one file, and load it.

Tensors are unsharded, under `<parameter>/<key>`; groups, numbers and the shapes of parameters are a note in the header.
Parameters are named as in their distributed model, or without one by their index in the optimizer; a file of one kind
fits an optimizer of the other, and parameters are then matched by position.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.checkpoint.export.full_file import write_full_tensors
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import load_optimizer, optimizer_state, param_names
from phalanx.checkpoint.state.restore import agree_on_layout, shard_like
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.local_tensors import MODEL, OPTIMIZER, RANKS, LocalTensor, ModelView
from phalanx.checkpoint.tensors.names import check_names
from phalanx.checkpoint.tensors.safetensors_file import TensorFile
from phalanx.checkpoint.tensors.write_plan import ChunkDescription, TensorLayout, plan_writes
from phalanx.errors import ConfigError, DataError
from phalanx.parallel.checks.consistency import make_consistent
from phalanx.parallel.session import distributed_models
from phalanx.parallel.stateful import SavedState, saved_state_of
from phalanx.state_tree import pack_tree, unpack_tree

logger = logging.getLogger("phalanx.checkpoint")


def export_optimizer(optimizer: Optimizer, path: str | Path) -> None:
    """Write an optimizer's full (unsharded) state, with the options of its groups, to one safetensors file.

    Collective: every rank writes its shards. State of tables is on their servers, and is not in it.

    Args:
        optimizer: The optimizer, over the parameters of a distributed model or of any other.
        path: The file, seen by all ranks; replaced once the new one is complete.

    Raises:
        ConfigError: If state is a shard of unknown layout, or ranks' parameters differ.
        BackendError: If the file system does not take it; on all ranks.
        PeerLostError: If a rank did not arrive; names it.
    """
    ranks = Ranks.meet("px.export_state_dict of an optimizer", str(path))
    model = _model_of(optimizer)
    make_consistent(model, "px.export_state_dict", optimizer)
    view = ModelView(model)
    parts: dict[str, LocalTensor] = {}
    if left_out := sorted(saved_state_of(optimizer).keys() - _rank_independent_state(optimizer).keys()):
        logger.warning(
            "%s holds nothing of the batches under way (%s); px.save(folder, model, optimizer) does",
            path, ", ".join(left_out),
        )  # fmt: skip

    def collect() -> dict[str, Any]:
        state, groups = optimizer_state(optimizer, view)
        parts.update({name.removeprefix(OPTIMIZER): local for name, local in view.optimizer_tensors(state)})
        return {
            "parts": {name: local.part.to_json() for name, local in parts.items()},
            "params": {name.removeprefix(MODEL): local.part.to_json() for name, local in view.local_tensors()},
            "groups": _without_tensors(groups, "groups"),
            "numbers": {
                name: {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
                for name, entries in state.items()
            },
            "kept": {
                name: _without_tensors(dict(entry.source.state_dict()), name)
                for name, entry in _rank_independent_state(optimizer).items()
            },
        }

    def plan(answers: list[dict[str, Any]]) -> tuple[dict[str, TensorLayout], str]:
        per_rank = sorted(name for answer in answers for name in answer["parts"] if name.startswith(RANKS))
        if per_rank:
            raise ConfigError(
                f"{per_rank[0].split('/', 3)[3]!r} is a shard of unknown layout, of its layer or of a rank that takes "
                "local steps. Set its layout in the Plan, or save with px.save."
            )
        return _entries(answers, "parts"), _note(optimizer, answers)

    write_full_tensors(ranks, parts, Path(path), collect=collect, plan=plan)


def load_optimizer_file(path: Path, optimizer: Optimizer) -> None:
    """Load a file that `export_optimizer` wrote into an optimizer, at any number of ranks.

    Collective: nothing is changed unless the file fits on all ranks.

    Raises:
        ConfigError: If the file has no state of an optimizer, of another kind of one, or of other parameters.
        DataError: If the file is broken.
    """
    ranks = Ranks.meet("px.load of an optimizer", str(path))
    view = ModelView(_model_of(optimizer))
    local_tensors = dict(view.local_tensors())
    layout = agree_on_layout(ranks, local_tensors, lambda _: None)

    def merge(answers: list[list[str]]) -> list[str]:
        return list(dict.fromkeys(name for names in answers for name in names))

    trained = ranks.decide("optimizer", lambda: param_names(optimizer, view), merge)
    file: list[_OptimizerFileReader] = []
    states: list[dict[str, dict[str, Any]]] = []

    def read() -> None:
        file.append(_OptimizerFileReader(path, optimizer, trained))
        states.append(file[0].state(view, local_tensors, layout))

    ranks.decide("fits", read, lambda _: None)
    load_optimizer(optimizer, view, states[0], file[0].groups())
    for name, entry in _rank_independent_state(optimizer).items():
        if name in file[0].kept:
            entry.source.load_state_dict(unpack_tree(file[0].kept[name], {}))
        else:
            logger.warning("%s has no state %r, which is reset", path, name)


class _OptimizerFileReader:
    """An optimizer's file, read under the parameter names of the optimizer that loads it."""

    def __init__(self, path: Path, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._path = path
        self._file = TensorFile(path)
        note = self._file.note()
        if not note:
            raise ConfigError(
                f"{path} has no state of an optimizer. Write one with px.export_state_dict(optimizer, path), or load "
                "weights with px.load(path, model)."
            )
        try:
            self._note = json.loads(note)
            saved = _names(self._note["groups"])
            kind, self._shapes, self.kept = self._note["kind"], self._note["shapes"], self._note["kept"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} says nothing readable of its optimizer: {error!r}. Take another copy.") from None
        if kind != type(optimizer).__name__:
            raise ConfigError(
                f"{path} has the state of {kind} and is loaded into {type(optimizer).__name__}. Build the optimizer "
                "that was saved."
            )
        if len(saved) != len(names) or not (_are_numbers(saved) or _are_numbers(names)):
            check_names("parameters of the optimizer", names, saved, path)
            names = saved
        self._saved_name = dict(zip(names, saved, strict=True))
        self._name = dict(zip(saved, names, strict=True))

    def groups(self) -> list[dict[str, Any]]:
        """Return the options and parameters of the groups."""
        groups: list[dict[str, Any]] = unpack_tree(self._note["groups"], {})
        return [group | {"params": [self._name[name] for name in group["params"]]} for group in groups]

    def state(
        self, view: ModelView, local_tensors: Mapping[str, LocalTensor], layout: Mapping[str, TensorLayout]
    ) -> dict[str, dict[str, Any]]:
        """Return this rank's shards of the state of the parameters it holds."""
        state: dict[str, dict[str, Any]] = {}
        slots = self._file.slots()
        for local_name, local in local_tensors.items():
            name = local_name.rpartition(MODEL)[2]
            saved = self._saved_name.get(name)
            if saved is None:
                continue  # a buffer, or a parameter that this optimizer does not train
            entry = layout[local_name]
            if saved in self._shapes and tuple(self._shapes[saved]) != entry.shape:
                raise ConfigError(
                    f"{self._path} does not fit: {name!r} has shape {self._shapes[saved]} there, as {saved!r}, and "
                    f"{list(entry.shape)} in this optimizer. Build the optimizer over the parameters that were saved, "
                    "in their order."
                )
            state[name] = dict(self._note["numbers"].get(saved, {}))
            chunk = entry.chunk_of(local.part).within(TensorChunk.full(entry.shape))
            for key, slot in slots.items():
                if key.rpartition("/")[0] == saved:
                    full_tensor = self._file.tensor(slot)
                    is_alike = slot.shape == entry.shape
                    state[name][key.rpartition("/")[2]] = (
                        shard_like(view.tensors[name], full_tensor[chunk].to(local.tensor.device, copy=True))
                        if is_alike
                        else full_tensor.clone()
                    )
        return {name: entries for name, entries in state.items() if entries}


def _model_of(optimizer: Optimizer) -> nn.Module:
    """Return the distributed model that an optimizer trains, or else a module of its parameters, named by index."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for model in distributed_models():
        names = ModelView(model).names
        if params and all(id(param) in names for param in params):
            return model
    numbered = nn.Module()
    for number, param in enumerate(params):
        numbered.register_parameter(str(number), param)
    return numbered


def _entries(answers: list[dict[str, Any]], word: str) -> dict[str, TensorLayout]:
    return plan_writes(
        [{name: ChunkDescription.from_json(part) for name, part in answer[word].items()} for answer in answers]
    )


def _note(optimizer: Optimizer, answers: list[dict[str, Any]]) -> str:
    """Return the note of the header, merged over ranks: everything but the tensors."""
    groups: list[dict[str, Any]] = []
    for answer in answers:
        for number, group in enumerate(answer["groups"]):
            if number == len(groups):
                groups.append(group)
            else:
                groups[number]["params"] = list(dict.fromkeys(groups[number]["params"] + group["params"]))
    shapes = {name: entry.shape for name, entry in _entries(answers, "params").items() if not name.startswith(RANKS)}
    trained = set(_names(groups))
    return json.dumps(
        {
            "kind": type(optimizer).__name__,
            "groups": groups,
            "numbers": {name: numbers for answer in answers for name, numbers in answer["numbers"].items() if numbers},
            "shapes": {name: shape for name, shape in shapes.items() if name in trained},
            "kept": answers[0]["kept"],
        }
    )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters of all groups, in their order."""
    return [str(name) for group in groups for name in group["params"]]


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _rank_independent_state(optimizer: Optimizer) -> dict[str, SavedState]:
    """Return the optimizer state of techniques that is the same on all ranks."""
    return {name: entry for name, entry in saved_state_of(optimizer).items() if entry.elsewhere == "first"}


def _without_tensors(value: object, where: str) -> Any:
    tensors: dict[str, Any] = {}
    tree = pack_tree(value, where, tensors)
    if tensors:
        raise ConfigError(
            f"{next(iter(tensors))} of the optimizer is a tensor, which one file of an optimizer has no place for. "
            "Save it with px.save(folder, model, optimizer)."
        )
    return tree

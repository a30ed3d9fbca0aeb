"""The state of one optimizer in one file, as some keep it beside a file of weights, and its way back.

Tensors are whole, under `<parameter>/<key>`; groups, numbers and the shapes of parameters are a note in the header.
Parameters go by the names they have in their distributed model, or where there is none by their numbers in the
optimizer: a file of one kind fits an optimizer of the other, whose parameters are then taken in their order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.checkpoint.export.whole_file import write_whole
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.state.capture import load_optimizer, optimizer_state, param_names
from phalanx.checkpoint.state.restore import agree_on_layout, placed_as
from phalanx.checkpoint.tensors.chunk import Box
from phalanx.checkpoint.tensors.file import TensorFile
from phalanx.checkpoint.tensors.local import MODEL, OPTIMIZER, RANKS, Held, ModelView
from phalanx.checkpoint.tensors.names import require_same
from phalanx.checkpoint.tensors.write_plan import Entry, Part, deal_out
from phalanx.errors import ConfigError, DataError
from phalanx.parallel.apply import distributed_models
from phalanx.parallel.checks.consistency import make_consistent
from phalanx.parallel.stateful import Kept, kept_state
from phalanx.ps.snapshot.dense import packed, unpacked

logger = logging.getLogger("phalanx.checkpoint")


def export_optimizer(optimizer: Optimizer, path: str | Path) -> None:
    """Write an optimizer's state as whole tensors, with the options of its groups, to one safetensors file.

    Collective: every rank calls it and writes what it holds. State of tables is on their servers, and is not in it.

    Args:
        optimizer: The optimizer, over the parameters of a distributed model or of any other.
        path: The file, seen by all ranks; replaced when the new one is whole.

    Raises:
        ConfigError: If state is a part whose place in the whole nobody knows, or ranks' parameters differ.
        BackendError: If the file system does not take it; on all ranks.
        PeerLostError: If a rank did not come; names it.
    """
    ranks = Ranks.meet("px.export_state_dict of an optimizer", str(path))
    model = _model_of(optimizer)
    make_consistent(model, "px.export_state_dict", optimizer)
    view = ModelView(model)
    described: dict[str, Held] = {}
    if left_out := sorted(kept_state(optimizer).keys() - _kept_first(optimizer).keys()):
        logger.warning(
            "%s holds nothing of the batches under way (%s); px.save(folder, model, optimizer) does",
            path, ", ".join(left_out),
        )  # fmt: skip

    def say() -> dict[str, Any]:
        state, groups = optimizer_state(optimizer, view)
        described.update({name.removeprefix(OPTIMIZER): one for name, one in view.optimizer_held(state)})
        return {
            "parts": {name: one.part.to_json() for name, one in described.items()},
            "params": {name.removeprefix(MODEL): one.part.to_json() for name, one in view.held()},
            "groups": _without_tensors(groups, "groups"),
            "numbers": {
                name: {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
                for name, entries in state.items()
            },
            "kept": {
                name: _without_tensors(dict(kept.keeper.state_dict()), name)
                for name, kept in _kept_first(optimizer).items()
            },
        }

    def plan(said: list[dict[str, Any]]) -> tuple[dict[str, Entry], str]:
        apart = sorted(name for answer in said for name in answer["parts"] if name.startswith(RANKS))
        if apart:
            raise ConfigError(
                f"{apart[0].split('/', 3)[3]!r} is a part, of its layer or of a rank that trains apart, whose place in "
                "the whole is not known. Give its layout in the Plan, or save with px.save."
            )
        return _entries(said, "parts"), _note(optimizer, said)

    write_whole(ranks, described, Path(path), say=say, plan=plan)


def load_optimizer_file(path: Path, optimizer: Optimizer) -> None:
    """Give an optimizer the state in a file that `export_optimizer` wrote, at any number of ranks.

    Collective: nothing is changed unless the file fits on all ranks.

    Raises:
        ConfigError: If the file has no state of an optimizer, of another kind of one, or of other parameters.
        DataError: If the file is broken.
    """
    ranks = Ranks.meet("px.load of an optimizer", str(path))
    view = ModelView(_model_of(optimizer))
    held = dict(view.held())
    layout = agree_on_layout(ranks, held, lambda _: None)

    def merged(said: list[list[str]]) -> list[str]:
        return list(dict.fromkeys(name for names in said for name in names))

    wanted = ranks.decide("optimizer", lambda: param_names(optimizer, view), merged)
    file: list[_OptimizerFile] = []
    states: list[dict[str, dict[str, Any]]] = []

    def read() -> None:
        file.append(_OptimizerFile(path, optimizer, wanted))
        states.append(file[0].state(view, held, layout))

    ranks.decide("fits", read, lambda _: None)
    load_optimizer(optimizer, view, states[0], file[0].groups())
    for name, kept in _kept_first(optimizer).items():
        if name in file[0].kept:
            kept.keeper.load_state_dict(unpacked(file[0].kept[name], {}))
        else:
            logger.warning("%s has no state %r, which begins anew", path, name)


class _OptimizerFile:
    """What a file says of an optimizer, under the names that this one's parameters have."""

    def __init__(self, path: Path, optimizer: Optimizer, wanted: Sequence[str]) -> None:
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
                f"{path} has the state of {kind}, asked to load it into {type(optimizer).__name__}. Make the optimizer "
                "that was saved."
            )
        if len(saved) != len(wanted) or not (_are_numbers(saved) or _are_numbers(wanted)):
            require_same("parameters of the optimizer", wanted, saved, path)
            wanted = saved
        self._saved_name = dict(zip(wanted, saved, strict=True))
        self._name = dict(zip(saved, wanted, strict=True))

    def groups(self) -> list[dict[str, Any]]:
        """Return the options and parameters of the groups."""
        groups: list[dict[str, Any]] = unpacked(self._note["groups"], {})
        return [group | {"params": [self._name[name] for name in group["params"]]} for group in groups]

    def state(
        self, view: ModelView, held: Mapping[str, Held], layout: Mapping[str, Entry]
    ) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters that this rank holds, as it is to hold it."""
        state: dict[str, dict[str, Any]] = {}
        slots = self._file.slots()
        for local_name, one in held.items():
            name = local_name.rpartition(MODEL)[2]
            saved = self._saved_name.get(name)
            if saved is None:
                continue  # a buffer, or a parameter that this optimizer does not train
            entry = layout[local_name]
            if saved in self._shapes and tuple(self._shapes[saved]) != entry.shape:
                raise ConfigError(
                    f"{self._path} does not fit: {name!r} has shape {self._shapes[saved]} there, as {saved!r}, and "
                    f"{list(entry.shape)} in this optimizer. Make the optimizer over the parameters that were saved, "
                    "in their order."
                )
            state[name] = dict(self._note["numbers"].get(saved, {}))
            box = entry.box_of(one.part).within(Box.whole(entry.shape))
            for key, slot in slots.items():
                if key.rpartition("/")[0] == saved:
                    whole = self._file.tensor(slot)
                    is_alike = slot.shape == entry.shape
                    state[name][key.rpartition("/")[2]] = (
                        placed_as(view.tensors[name], whole[box].to(one.tensor.device, copy=True))
                        if is_alike
                        else whole.clone()
                    )
        return {name: entries for name, entries in state.items() if entries}


def _model_of(optimizer: Optimizer) -> nn.Module:
    """Return the distributed model that an optimizer trains, or else one of its parameters alone, by number."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for model in distributed_models():
        known = ModelView(model).names
        if params and all(id(param) in known for param in params):
            return model
    numbered = nn.Module()
    for number, param in enumerate(params):
        numbered.register_parameter(str(number), param)
    return numbered


def _entries(said: list[dict[str, Any]], word: str) -> dict[str, Entry]:
    return deal_out([{name: Part.from_json(part) for name, part in answer[word].items()} for answer in said])


def _note(optimizer: Optimizer, said: list[dict[str, Any]]) -> str:
    """Return what the header says: all but the tensors, of all ranks."""
    groups: list[dict[str, Any]] = []
    for answer in said:
        for number, group in enumerate(answer["groups"]):
            if number == len(groups):
                groups.append(group)
            else:
                groups[number]["params"] = list(dict.fromkeys(groups[number]["params"] + group["params"]))
    shapes = {name: entry.shape for name, entry in _entries(said, "params").items() if not name.startswith(RANKS)}
    trained = set(_names(groups))
    return json.dumps(
        {
            "kind": type(optimizer).__name__,
            "groups": groups,
            "numbers": {name: numbers for answer in said for name, numbers in answer["numbers"].items() if numbers},
            "shapes": {name: shape for name, shape in shapes.items() if name in trained},
            "kept": said[0]["kept"],
        }
    )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters of all groups, in their order."""
    return [str(name) for group in groups for name in group["params"]]


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _kept_first(optimizer: Optimizer) -> dict[str, Kept]:
    """Return what techniques keep for an optimizer between steps and is the same on all ranks."""
    return {name: kept for name, kept in kept_state(optimizer).items() if kept.elsewhere == "first"}


def _without_tensors(value: object, where: str) -> Any:
    tensors: dict[str, Any] = {}
    tree = packed(value, where, tensors)
    if tensors:
        raise ConfigError(
            f"{next(iter(tensors))} of the optimizer is a tensor, which one file of an optimizer has no place for. "
            "Save it with px.save(folder, model, optimizer)."
        )
    return tree

"""Load a model's weights from one file, or from a state dict of any framework."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.held import MODEL, ModelView
from phalanx.checkpoint.names import require_same, stripped
from phalanx.checkpoint.planning import Entry
from phalanx.checkpoint.tensor_file import TensorFile
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.checkpoint")


@torch.no_grad()
def load_weights(source: str | Path | Mapping[str, Tensor], view: ModelView, layout: Mapping[str, Entry]) -> None:
    """Copy whole tensors into a model, of which each rank takes what it holds. Not collective.

    Args:
        source: A safetensors file, or a state dict.
        view: The model.
        layout: How the ranks hold its tensors.

    Raises:
        ConfigError: If the source is a pickle, holds other values than tensors, or other names or shapes.
        DataError: If the file is broken.
    """
    where = "the state dict" if isinstance(source, Mapping) else str(source)
    found = _of_mapping(source) if isinstance(source, Mapping) else _of_file(Path(source))
    plain, prefixes = stripped(found, {_plain(name) for name in layout})
    if prefixes:
        logger.info("took %s off the names in %s", " and ".join(map(repr, prefixes)), where)
    for alias, name in view.aliases.items():
        if alias in plain:
            plain.setdefault(name, plain.pop(alias))
    require_same("parameters and buffers", (_plain(name) for name in layout), plain, where)
    held = dict(view.held())
    for name in held:
        entry, tensor = layout[name], plain[_plain(name)]
        if tuple(tensor.shape) != entry.shape:
            raise ConfigError(
                f"{where} does not fit: {name!r} has shape {list(tensor.shape)} there and {list(entry.shape)} in this "
                "model. Build the model that was saved."
            )
    for name, one in held.items():
        box = layout[name].box_of(one.part)
        tensor = plain[_plain(name)]
        one.tensor.copy_(tensor[tuple(slice(at, at + n) for at, n in zip(box.offset, box.size, strict=True))])


def _plain(name: str) -> str:
    return name.partition(MODEL)[2]


def _of_mapping(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wrong = next((name for name, value in source.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ConfigError(
            f"a state dict maps names to tensors, and {wrong!r} is a {type(source[wrong]).__name__}. Hand over the "
            "part that holds the model's tensors, such as state['model']."
        )
    return dict(source)


def _of_file(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        head = file.read(9)
        # The first bytes of our format are a length, which may be those of a pickle or a zip; its ninth is a brace.
        if head[8:] != b"{" and head.startswith((b"PK", b"\x80")):
            raise ConfigError(
                f"{path} is a pickle, which runs code of whoever wrote it when it is read. If you trust it, read it "
                "yourself and hand over the dict: px.load(torch.load(path, weights_only=True), model)."
            )
    file_of_tensors = TensorFile(path)
    return {name: file_of_tensors.tensor(slot) for name, slot in file_of_tensors.slots().items()}

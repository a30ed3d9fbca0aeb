"""`px.load_weights`: load full weights from a file or a state dict into a sharded model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.tensors.chunk import TensorChunk
from phalanx.checkpoint.tensors.local_tensors import MODEL, ModelView
from phalanx.checkpoint.tensors.names import check_names, strip_prefixes
from phalanx.checkpoint.tensors.safetensors_file import TensorFile
from phalanx.checkpoint.tensors.write_plan import TensorLayout
from phalanx.errors import ConfigError

logger = logging.getLogger("phalanx.checkpoint")


def load_weights(
    source: str | Path | Mapping[str, Tensor], ranks: Ranks, view: ModelView, layout: Mapping[str, TensorLayout]
) -> None:
    """Copy full tensors into a model, of which each rank takes its shards.

    Collective: nothing is changed unless the source fits on all ranks.

    Args:
        source: A safetensors file, or a state dict.
        ranks: All ranks.
        view: The model.
        layout: How the ranks hold its tensors.

    Raises:
        ConfigError: If the source is a pickle, holds other values than tensors, or other names or shapes.
        DataError: If the file is broken.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    ranks.decide("fits", lambda: copies.extend(_parts(source, view, layout)), lambda _: None)
    with torch.no_grad():
        for mine, part in copies:
            mine.copy_(part)


def _parts(
    source: str | Path | Mapping[str, Tensor], view: ModelView, layout: Mapping[str, TensorLayout]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors of the model, each with the part of the source to copy into it."""
    where = "the state dict" if isinstance(source, Mapping) else str(source)
    tensors = _of_mapping(source) if isinstance(source, Mapping) else _of_file(Path(source))
    plain, prefixes = strip_prefixes(tensors, {_plain(name) for name in layout})
    if prefixes:
        logger.info("took %s off the names in %s", " and ".join(map(repr, prefixes)), where)
    for alias, name in view.aliases.items():
        if alias in plain:
            plain.setdefault(name, plain.pop(alias))
    check_names("parameters and buffers", (_plain(name) for name in layout), plain, where)
    for name, local in view.local_tensors():
        entry, tensor = layout[name], plain[_plain(name)]
        if tuple(tensor.shape) != entry.shape:
            raise ConfigError(
                f"{where} does not fit: {name!r} has shape {list(tensor.shape)} there and {list(entry.shape)} in this "
                "model. Build the model that was saved."
            )
        yield local.tensor, tensor[entry.chunk_of(local.part).within(TensorChunk.full(entry.shape))]


def _plain(name: str) -> str:
    return name.partition(MODEL)[2]


def _of_mapping(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    other = next((name for name, value in source.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise ConfigError(
            f"a state dict maps names to tensors, and {other!r} is a {type(source[other]).__name__}. Pass the part "
            "that holds the model's tensors, such as state['model']."
        )
    return dict(source)


def _of_file(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        head = file.read(9)
        # The first bytes of our format are a length, which may be those of a pickle or a zip; its ninth is a brace.
        if head[8:] != b"{" and head.startswith((b"PK", b"\x80")):
            raise ConfigError(
                f"{path} is a pickle, which runs code of whoever wrote it when it is read. If you trust it, read it "
                "yourself and pass the dict: px.load(torch.load(path, weights_only=True), model)."
            )
    file_of_tensors = TensorFile(path)
    if file_of_tensors.note():
        raise ConfigError(f"{path} has the state of an optimizer. Load it into that: px.load(path, optimizer).")
    return {name: file_of_tensors.tensor(slot) for name, slot in file_of_tensors.slots().items()}

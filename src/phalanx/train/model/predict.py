"""`Model.predict`: outputs for all samples of a dataset, in order, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from phalanx.comm import context
from phalanx.comm.collectives import all_gather
from phalanx.data.loader.loader import ShardedLoader
from phalanx.errors import ConfigError
from phalanx.train.loss.batch_reader import columns_of


def one_batch(data: tuple[Any, ...]) -> dict[Any, Any] | None:
    """Return the columns of one batch that `predict` was given, by name or number; None if it was given none."""
    columns = columns_of(data[0] if len(data) == 1 and isinstance(data[0], Mapping) else data)
    return columns if columns and all(isinstance(part, Tensor | np.ndarray) for part in columns.values()) else None


def outputs_in_order(loader: ShardedLoader, outputs: Callable[[Any], Any]) -> Any:
    """Return the outputs of all batches and ranks, gathered in the order of the samples, on the CPU.

    Collective: every rank calls it with its own part of the batches.

    Args:
        loader: Every rank's samples, those of all ranks side by side.
        outputs: From a batch to a tensor with the batch's samples along dim 0, or tensors in tuples, lists and dicts;
            of a mapping what has these samples is taken, and the rest (a loss, a cache) left out.

    Raises:
        ConfigError: If the data has no samples, or an output is not one sample for each sample.
    """
    parts: list[list[Tensor]] = []
    structure = None
    for batch in loader:
        assert loader.share is not None
        values, structure = tree_flatten(_of_rows(outputs(batch), _rows_of(batch)))
        parts.append([_whole(value, loader.share.rows) for value in values])
    if structure is None:
        raise ConfigError("Asked to predict on data without rows. Check the dataset.")
    return tree_unflatten([torch.cat(column) for column in zip(*parts, strict=True)], structure)


def _rows_of(batch: Any) -> int:
    """Return how many samples a batch has here, also one that does not count; -1 where none of its columns tells."""
    leaves = tree_leaves(columns_of(batch))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), -1)


def _of_rows(output: Any, rows: int) -> Any:
    """Return an output, of a mapping only the entries with one row for each sample of the batch."""
    if not isinstance(output, Mapping):
        return output

    def has_rows(value: Any) -> bool:
        leaves = tree_leaves(value)
        return bool(leaves) and all(isinstance(x, Tensor) and x.dim() and len(x) == rows for x in leaves)

    entries = {name: value for name, value in output.items() if has_rows(value)}
    if not entries:
        raise ConfigError(
            f"Model.predict needs one output for each of {rows} rows, and none of {', '.join(output)} is one."
        )
    return entries


def _whole(value: Any, rows: int) -> Tensor:
    """Return the samples of all ranks; a batch that only keeps the ranks in step adds none."""
    if not isinstance(value, Tensor) or value.dim() == 0 or (rows and len(value) != rows):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"Model.predict needs one output for each of {rows} rows, found {shape}.")
    mine = value[:rows].contiguous()
    if not context.is_initialized() or context.current().readers.count == 1:
        return mine.cpu()
    return all_gather(mine, 0, group=context.current().readers.group).cpu()

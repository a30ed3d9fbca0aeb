"""`start_from_torch`, `rows_for_torch`: rows of torch's embeddings into a table, and out of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.ps.client.parameter import TableParameter, is_named
from phalanx.ps.client.table_client import current
from phalanx.ps.ids import check_ids, keys_of

PULL_KEYS = 1 << 18
"""Rows that are read with one request."""


def check_convertible(module: nn.Module, kind: type[nn.Module], name: str | None) -> None:
    """Raise unless a module of torch can become one whose rows are in a new table.

    Args:
        module: What to convert.
        kind: `nn.Embedding` or `nn.EmbeddingBag`.
        name: Of the table.

    Raises:
        ConfigError: If it is of another kind, does what tables do not, or the table is there already.
    """
    if not isinstance(module, kind) or isinstance(getattr(module, "weight", None), TableParameter):
        raise ConfigError(f"from_torch takes an nn.{kind.__name__} with a weight, found {type(module).__name__}.")
    if module.weight.is_meta:
        raise ConfigError(f"the weight of the nn.{kind.__name__} is on the meta device, without values. Give it some.")
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ConfigError(f"the nn.{kind.__name__} has {option}, which tables do not do. Build it without.")
    if is_named(name):
        raise ConfigError(
            f"this process has a table {name!r} already, with rows of its own. Convert before modules of this name are "
            "made, or give another name."
        )


def start_from_torch(parameter: TableParameter, weight: Tensor) -> None:
    """Let a table that was not made yet start from rows, shape (n, dim), of the ids 0 to n - 1; padding is zeros."""
    values, padding = weight.detach().to("cpu", torch.float32).clone(), parameter.settings.padding_idx
    if padding is not None and 0 <= padding < len(values):
        values[padding] = 0.0
    parameter.first_values = values


def rows_for_torch(parameter: TableParameter, ids: int | Tensor) -> tuple[Tensor, int | None]:
    """Return rows of a table as the weight of a module of torch.

    Args:
        parameter: Of the table.
        ids: The ids of the rows, shape (n,); an int n for 0 to n - 1.

    Returns:
        The rows, shape (n, dim), and which of them is that of the padding id.

    Raises:
        ConfigError: If ids are no integers in one row, or occur twice.
    """
    ids = torch.arange(ids) if isinstance(ids, int) else ids
    check_ids(ids)
    keys = keys_of(ids)
    if ids.dim() != 1 or len(np.unique(keys)) != len(keys):
        raise ConfigError(
            f"to_torch takes the number of rows, or the different ids of the rows in one dimension; found shape "
            f"{tuple(ids.shape)}{'' if ids.dim() != 1 else ' with ids that occur twice'}."
        )
    parts = [current().pull([(parameter, keys[at : at + PULL_KEYS])])[0] for at in range(0, len(keys), PULL_KEYS)]
    rows = torch.from_numpy(np.concatenate([np.empty((0, parameter.settings.dim), np.float32), *parts]))
    positions = np.flatnonzero(keys == parameter.settings.padding_idx)
    padding = int(positions[0]) if len(positions) else None
    if padding is not None:
        rows[padding] = 0.0
    return rows.to(parameter.device, parameter.dtype), padding

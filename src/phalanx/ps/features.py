"""`read_features`: look up the rows of several features with one request per server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.ps.client.parameter import TableParameter, UniqueKeys
from phalanx.ps.client.table_client import TableClient, current
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.dedup import unique


@dataclass(frozen=True, slots=True)
class Feature:
    """Ids of one feature, and the table they are looked up in."""

    parameter: TableParameter
    ids: Tensor
    """Any shape, any integer dtype."""

    clicks: Tensor | None = None
    """Clicks of each occurrence, the shape of `ids`."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows of one feature."""

    rows: Tensor
    """Rows of the unique ids of the table, shape (n, dim); a leaf when gradients are wanted."""

    index: Tensor
    """Which row each id is, shape of `ids`, int64."""

    padding: int | None
    """The row of the padding id, if it occurs."""


def read_features(features: Sequence[Feature]) -> list[FeatureRows]:
    """Read the rows of all features, with one request for each server.

    Args:
        features: Features of any tables; those of one table are read together.

    Returns:
        One entry per feature. Gradients that reach its rows go to the parameter of the table.
    """
    client = current()
    by_table: dict[TableParameter, list[int]] = {}
    for position, feature in enumerate(features):
        by_table.setdefault(feature.parameter, []).append(position)
    lookups = [_TableLookup(parameter, [features[p] for p in positions]) for parameter, positions in by_table.items()]
    arrays = client.pull([(lookup.parameter, lookup.seen.keys) for lookup in lookups])
    feature_rows: dict[int, FeatureRows] = {}
    for lookup, rows, positions in zip(lookups, arrays, by_table.values(), strict=True):
        feature_rows |= zip(positions, lookup.split(rows, client), strict=True)
    return [feature_rows[position] for position in range(len(features))]


class _TableLookup:
    """The unique ids that several features ask of one table."""

    def __init__(self, parameter: TableParameter, features: list[Feature]) -> None:
        self.parameter = parameter
        self._features = features
        keys, self._inverse, counts = unique([keys_of(feature.ids) for feature in features])
        self.seen = UniqueKeys(keys, counts, self._clicks(len(keys)))

    def split(self, rows: Rows, client: TableClient) -> list[FeatureRows]:
        """Return the rows as each feature sees them."""
        parameter, padding = self.parameter, self._padding()
        if padding is not None:
            rows[padding] = 0.0
        leaf = torch.from_numpy(rows).to(parameter.device, parameter.dtype)
        if torch.is_grad_enabled() and parameter.requires_grad:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_accumulate, client, parameter, self.seen, padding))
        sizes = [feature.ids.numel() for feature in self._features]
        index = torch.from_numpy(self._inverse).to(parameter.device).split(sizes)
        return [FeatureRows(leaf, i.view(f.ids.shape), padding) for f, i in zip(self._features, index, strict=True)]

    def _padding(self) -> int | None:
        if self.parameter.settings.padding_idx is None:
            return None
        places = np.flatnonzero(self.seen.keys == self.parameter.settings.padding_idx)
        return int(places[0]) if len(places) else None

    def _clicks(self, size: int) -> NDArray[np.float32] | None:
        if all(feature.clicks is None for feature in self._features):
            return None
        each = [
            np.zeros(f.ids.numel()) if f.clicks is None else f.clicks.detach().cpu().numpy().ravel()
            for f in self._features
        ]
        return np.bincount(self._inverse, weights=np.concatenate(each), minlength=size).astype(np.float32)


def _accumulate(
    client: TableClient, parameter: TableParameter, seen: UniqueKeys, padding: int | None, leaf: Tensor
) -> None:
    """Move the gradient of looked-up rows to the table parameter, without the row of the padding id."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if padding is not None:
        others = np.delete(np.arange(len(seen.keys)), padding)
        clicks = None if seen.clicks is None else seen.clicks[others]
        seen = UniqueKeys(seen.keys[others], seen.counts[others], clicks)
        gradient = gradient[torch.from_numpy(others).to(gradient.device)]
    client.add(parameter, seen, gradient)


def keys_of(ids: Tensor) -> Keys:
    """Return ids of any shape as the keys of a table, int64 in one row.

    Raises:
        ConfigError: If they are no tensor of integers.
    """
    check_ids(ids)
    keys: Keys = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous().numpy()
    return keys


def check_ids(ids: object) -> None:
    """Raise unless ids are a tensor of integers; it may be nested.

    Raises:
        ConfigError: If they are no tensor of integers; says what makes one of them.
    """
    if not isinstance(ids, Tensor):
        raise ConfigError(f"ids must be a tensor of integers, found {_describe(ids)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise ConfigError(f"ids must be integers, found dtype {ids.dtype}. Convert them with ids.long().")


def check_per_id(name: str, values: Tensor | None, ids: Tensor) -> None:
    """Raise unless there is one value for each id, or no values.

    Raises:
        ConfigError: If the shapes differ.
    """
    if values is not None and values.shape != ids.shape:
        raise ConfigError(
            f"{name} have shape {tuple(values.shape)}, and the ids {tuple(ids.shape)}. Give one for each id."
        )


def _describe(ids: object) -> str:
    """Return what something other than a tensor is, and how to make ids of it."""
    kind = type(ids).__name__
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return f"{kind} of {ids.dtype}. Convert it with torch.from_numpy."
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes) or not len(ids):
        return f"{kind}. Convert it with torch.tensor."
    first = ids[0]
    if isinstance(first, str | bytes):
        return f"{kind} of {type(first).__name__}. Hash the texts: phalanx.ps.hash_ids(texts, salt)."
    if isinstance(first, Sequence | np.ndarray | Tensor):
        return (
            f"{kind} of {type(first).__name__}. Where lengths differ, make a jagged tensor of it: "
            "torch.nested.nested_tensor(ids, layout=torch.jagged); else convert it with torch.tensor."
        )
    return f"{kind} of {type(first).__name__}. Convert it with torch.tensor."

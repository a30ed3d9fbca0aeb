"""`read_features`: look up the rows of several features with one request per server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.ps.client.parameter import TableParameter, UniqueKeys
from phalanx.ps.client.table_client import TableClient, current
from phalanx.ps.ids import keys_of
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
    """Which row each id is, flat, int64."""

    padding: int | None
    """The row of the padding id, if it occurs."""


def read_features(features: Sequence[Feature]) -> list[FeatureRows]:
    """Read the rows of all features, with one request for each server, or none if the model's pass has them already.

    Args:
        features: Features of any tables; those of one table are read together.

    Returns:
        One entry per feature. Gradients that reach its rows go to the parameter of the table.
    """
    client = current()
    if client.model_passes:
        reads, arrays = client.model_passes[-1].read(features, client)
    else:
        reads = FeatureReads(features)
        arrays = client.pull(reads.pull_specs)
    return reads.rows_of(features, arrays, client)


class FeatureReads:
    """The unique ids that the features of one call ask of each table.

    Args:
        features: Features of any tables.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self._parameters = [feature.parameter for feature in features]
        self._ids = [keys_of(feature.ids) for feature in features]
        by_table: dict[TableParameter, list[int]] = {}
        for position, parameter in enumerate(self._parameters):
            by_table.setdefault(parameter, []).append(position)
        self._tables = [_TableReads(p, positions, self._ids) for p, positions in by_table.items()]

    @property
    def pull_specs(self) -> list[tuple[TableParameter, Keys]]:
        """What to pull, one entry per table."""
        return [(table.parameter, table.keys) for table in self._tables]

    def is_of(self, features: Sequence[Feature]) -> bool:
        """Return whether these features have the same tables and ids."""
        return (
            len(features) == len(self._ids)
            and all(feature.parameter is p for feature, p in zip(features, self._parameters, strict=True))
            and all(np.array_equal(keys_of(f.ids), ids) for f, ids in zip(features, self._ids, strict=True))
        )

    def rows_of(self, features: Sequence[Feature], arrays: Sequence[Rows], client: TableClient) -> list[FeatureRows]:
        """Return the rows as each feature sees them.

        Args:
            features: Those it was made of, or others with the same tables and ids.
            arrays: The rows of `pull_specs`; they are changed.
            client: Takes the gradients.
        """
        feature_rows: dict[int, FeatureRows] = {}
        for table, rows in zip(self._tables, arrays, strict=True):
            of_table = [features[position] for position in table.positions]
            feature_rows |= zip(table.positions, table.split(of_table, rows, client), strict=True)
        return [feature_rows[position] for position in range(len(features))]


class _TableReads:
    """The unique ids that several features ask of one table."""

    def __init__(self, parameter: TableParameter, positions: list[int], ids: Sequence[Keys]) -> None:
        self.parameter, self.positions = parameter, positions
        self.keys, self._inverse, self._counts = unique([ids[position] for position in positions])

    def split(self, features: Sequence[Feature], rows: Rows, client: TableClient) -> list[FeatureRows]:
        """Return the rows as each feature sees them."""
        parameter, padding = self.parameter, self._padding()
        seen = UniqueKeys(self.keys, self._counts, self._clicks(features))
        if padding is not None:
            rows[padding] = 0.0
        leaf = torch.from_numpy(rows).to(parameter.device, parameter.dtype)
        if torch.is_grad_enabled() and parameter.requires_grad:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_accumulate, client, parameter, seen, padding))
        sizes = [feature.ids.numel() for feature in features]
        index = torch.from_numpy(self._inverse).to(parameter.device).split_with_sizes(sizes)
        return [FeatureRows(leaf, places, padding) for places in index]

    def _padding(self) -> int | None:
        if self.parameter.settings.padding_idx is None:
            return None
        places = np.flatnonzero(self.keys == self.parameter.settings.padding_idx)
        return int(places[0]) if len(places) else None

    def _clicks(self, features: Sequence[Feature]) -> NDArray[np.float32] | None:
        if all(feature.clicks is None for feature in features):
            return None
        each = [
            np.zeros(f.ids.numel()) if f.clicks is None else f.clicks.detach().cpu().numpy().ravel() for f in features
        ]
        return np.bincount(self._inverse, weights=np.concatenate(each), minlength=len(self.keys)).astype(np.float32)


def _accumulate(
    client: TableClient, parameter: TableParameter, seen: UniqueKeys, padding: int | None, leaf: Tensor
) -> None:
    """Move the gradient of looked-up rows to the table parameter, without the row of the padding id."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:  # of rows whose bags had none, where those of other tables had
        return
    if padding is not None:
        others = np.delete(np.arange(len(seen.keys)), padding)
        clicks = None if seen.clicks is None else seen.clicks[others]
        seen = UniqueKeys(seen.keys[others], seen.counts[others], clicks)
        gradient = gradient[torch.from_numpy(others).to(gradient.device)]
    client.add(parameter, seen, gradient)

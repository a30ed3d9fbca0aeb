"""The updates of a push as they are sent and logged, and their checks before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from phalanx.errors import ConfigError
from phalanx.ps.snapshot.records import Array
from phalanx.ps.stores.base import Keys, TableUpdate, get_table
from phalanx.ps.table.arrays import PUSH_COLUMNS, check_push, check_rows
from phalanx.ps.table.rules import TableSpec

KINDS = ("gradient", "delta", "assign")


def describe_update(update: TableUpdate) -> dict[str, Any]:
    """Return the JSON object of an update: `table`, `kind`, `lr`, and true for each of its `PUSH_COLUMNS`."""
    columns = {column: True for column in PUSH_COLUMNS if getattr(update, column) is not None}
    return {"table": update.table, "kind": update.kind, "lr": update.lr, **columns}


def list_arrays(update: TableUpdate) -> list[Array]:
    """Return the arrays of an update in the order they are sent: keys, values, `PUSH_COLUMNS`."""
    columns = [getattr(update, column) for column in PUSH_COLUMNS]
    return [update.keys, update.values, *(column for column in columns if column is not None)]


def pack_updates(updates: Sequence[TableUpdate]) -> tuple[list[dict[str, Any]], list[Array]]:
    """Return the `changes` list and the arrays that `unpack_updates` reads."""
    arrays = [array for update in updates for array in list_arrays(update)]
    return [describe_update(update) for update in updates], arrays


def unpack_updates(
    described: Sequence[Mapping[str, Any]],
    arrays: Sequence[Array],
    pulled_keys: Mapping[int, Mapping[str, Keys]] = MappingProxyType({}),
) -> list[TableUpdate]:
    """Return the updates of a push.

    Args:
        described: What `describe_update` returns of each, with `pull` where the keys are those of an earlier pull.
        arrays: Per update what `list_arrays` returns, without the keys where there is a `pull`.
        pulled_keys: Keys of earlier pulls, by pull and table.

    Raises:
        ConfigError: If there are too few or too many arrays.
    """
    rest = iter(arrays)
    try:
        updates = [_unpack_update(update, rest, pulled_keys) for update in described]
    except StopIteration:
        raise ConfigError(f"A push of {len(described)} changes came with only {len(arrays)} arrays.") from None
    if next(rest, None) is not None:
        raise ConfigError(f"A push of {len(described)} changes came with {len(arrays)} arrays, which are too many.")
    return updates


def _unpack_update(
    update: Mapping[str, Any], rest: Iterator[Array], pulled_keys: Mapping[int, Mapping[str, Keys]]
) -> TableUpdate:
    name, pull = update["table"], update.get("pull")
    keys = next(rest) if pull is None else pulled_keys[pull][name]
    values = next(rest)
    columns: dict[str, Any] = {column: next(rest) for column in PUSH_COLUMNS if update.get(column)}
    return TableUpdate(name, keys, values, kind=update.get("kind", "gradient"), lr=update.get("lr"), **columns)


def check_updates(updates: Sequence[TableUpdate], weight: float, specs: Mapping[str, TableSpec]) -> None:
    """Check updates against the tables, so that none fails once it is in the log.

    Raises:
        ConfigError: If a weight, table, kind, type, shape or learning rate does not fit.
    """
    if not 0 <= weight < float("inf"):
        raise ConfigError(f"Asked for a push of weight {weight}. Its weight is the rows of its batch: at least 0.")
    for update in updates:
        spec = get_table(specs, update.table)
        if update.kind not in KINDS:
            raise ConfigError(f"Asked table '{update.table}' for a change of kind {update.kind!r}; kinds: {KINDS}.")
        check_rows(spec, update.keys, update.values, f"{update.kind} rows")
        check_push(spec, len(update.keys), update.lr, (update.counts, update.shows, update.clicks))

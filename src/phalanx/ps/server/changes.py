"""The changes of a push as they travel and lie in the log, and their checks before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from phalanx.errors import ConfigError
from phalanx.ps.snapshot.records import Array
from phalanx.ps.stores.base import Keys, TableUpdate, get_table
from phalanx.ps.table.arrays import check_push, check_rows
from phalanx.ps.table.rules import TableSpec

KINDS = ("gradient", "delta", "assign")
_COLUMNS = ("counts", "shows", "clicks")


def unpack(
    meta: Mapping[str, Any], arrays: Sequence[Array], kept: Mapping[int, Mapping[str, Keys]] = MappingProxyType({})
) -> list[TableUpdate]:
    """Return the changes of a push.

    Args:
        meta: `updates`: a list of objects with `table`, `kind`, `lr`, and true for each of `counts`, `shows` and
            `clicks` that is there; `pull` where the keys are those of an earlier pull.
        arrays: Per change its keys (without `pull`), values and those columns, in this order.
        kept: Keys of earlier pulls, by pull and table.

    Raises:
        ConfigError: If there are too few or too many arrays.
    """
    left = iter(arrays)
    try:
        updates = [_unpack_one(update, left, kept) for update in meta["changes"]]
    except StopIteration:
        raise ConfigError(f"A push of {len(meta['changes'])} changes came with only {len(arrays)} arrays.") from None
    if next(left, None) is not None:
        raise ConfigError(
            f"A push of {len(meta['changes'])} changes came with {len(arrays)} arrays, which are too many."
        )
    return updates


def _unpack_one(update: Mapping[str, Any], left: Any, kept: Mapping[int, Mapping[str, Keys]]) -> TableUpdate:
    name, pull = update["table"], update.get("pull")
    keys = next(left) if pull is None else kept[pull][name]
    values = next(left)
    columns = {column: next(left) for column in _COLUMNS if update.get(column)}
    return TableUpdate(name, keys, values, kind=update.get("kind", "gradient"), lr=update.get("lr"), **columns)


def pack(updates: Sequence[TableUpdate]) -> tuple[list[dict[str, Any]], list[Array]]:
    """Return the `updates` object and the arrays that `unpack` reads, keys included."""
    meta: list[dict[str, Any]] = []
    arrays: list[Array] = []
    for update in updates:
        columns = {c: getattr(update, c) for c in _COLUMNS if getattr(update, c) is not None}
        meta.append({"table": update.table, "kind": update.kind, "lr": update.lr, **dict.fromkeys(columns, True)})
        arrays += [update.keys, update.values, *columns.values()]
    return meta, arrays


def check(updates: Sequence[TableUpdate], weight: float, specs: Mapping[str, TableSpec]) -> None:
    """Check changes against the tables, so that none fails once it is in the log.

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

"""`lookup`: the rows of several modules with one request for each server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.ps.table_module import Query, TableModule, results_of

Lookups = Sequence[tuple[Any, ...]]
"""A module, then the arguments of its `forward`; those by keyword in a dict at the end."""


def lookup(lookups: Lookups) -> list[Tensor]:
    """Look up several features with one request for each server, and pool the bags of all at once.

    Args:
        lookups: Modules and what their `forward` takes: `(embedding, ids)`, `(bag, ids, offsets)`,
            `(bag, ids, offsets, per_sample_weights)`; what it takes by keyword in a dict at the end, as in
            `(bag, ids, {"clicks": clicks})`.

    Returns:
        What each module's `forward` would return, in order.

    Raises:
        ConfigError: If an entry is no such tuple, or a module cannot look up what it is given.
    """
    queries = queries_of(lookups)
    if not queries:
        return []
    module: TableModule = lookups[0][0]
    return results_of(queries, module._read([query.feature for query in queries]))


def queries_of(lookups: Lookups) -> list[Query]:
    """Return what each entry reads.

    Raises:
        ConfigError: If an entry cannot be looked up; names it.
    """
    return [_query_of(entry, position) for position, entry in enumerate(lookups)]


def _query_of(entry: object, position: int) -> Query:
    if not isinstance(entry, tuple) or len(entry) < 2 or not isinstance(entry[0], TableModule):
        raise ConfigError(
            f"entry {position} of a lookup is {_describe(entry)}. Give (embedding, ids), (bag, ids, offsets) or (bag, "
            'ids, offsets, per_sample_weights), and keywords in a dict at the end: (bag, ids, {"clicks": clicks}).'
        )
    module: TableModule = entry[0]
    args = list(entry[1:])
    keywords = args.pop() if isinstance(args[-1], Mapping) else {}
    try:
        return module.query(*args, **keywords)
    except TypeError as error:
        raise ConfigError(
            f"entry {position} of a lookup gives {type(module).__name__}.forward what it does not take: {error}."
        ) from None


def _describe(entry: object) -> str:
    if isinstance(entry, tuple):
        return f"({', '.join(type(item).__name__ for item in entry)})"
    return f"a {type(entry).__name__}"

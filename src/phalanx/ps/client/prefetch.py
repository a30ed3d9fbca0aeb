"""`prefetch`: pull the rows of later batches while the current batch is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from phalanx.errors import ConfigError
from phalanx.ps.client.consistency import ConsistencyMode
from phalanx.ps.client.table_client import current
from phalanx.ps.ids import keys_of
from phalanx.ps.queries import Lookups, queries_of
from phalanx.ps.stores.base import Keys, PullSpec
from phalanx.ps.stores.dedup import unique

Batch = TypeVar("Batch")


def prefetch(loader: Iterable[Batch], ids: Callable[[Batch], Lookups], *, depth: int = 1) -> Iterator[Batch]:
    """Iterate over a loader, asking for the rows of later batches before each batch is handed out.

    In async mode rows are then at most `depth` of this worker's own steps older than without. The other modes promise
    newer rows than that; there nothing is asked ahead and results are the same with and without.

    Args:
        loader: Batches; it is read `depth` batches ahead, and so is its state.
        ids: What the model will look up for a batch: what `phalanx.ps.lookup` takes. Ids of one table are looked up
            together if the model does so with one `lookup`, else by one entry per table.
        depth: Batches to ask ahead.

    Raises:
        ConfigError: If `depth` is less than 1.
    """
    if depth < 1:
        raise ConfigError(f"prefetch reads at least 1 batch ahead, found depth={depth}. Use the loader itself instead.")
    client = current()
    batches, waiting = client.context.batches, deque[Batch]()
    for batch in loader:
        _ask(client.mode, ids(batch))
        waiting.append(batch)
        if len(waiting) > depth:
            batches.use(waiting[0])
            yield waiting.popleft()
    while waiting:
        batches.use(waiting[0])
        yield waiting.popleft()


def _ask(mode: ConsistencyMode, lookups: Lookups) -> None:
    by_table: dict[str, list[Keys]] = {}
    for feature in (query.feature for query in queries_of(lookups)):
        if feature.parameter.table is not None:
            by_table.setdefault(feature.parameter.table, []).append(keys_of(feature.ids))
    mode.prefetch([PullSpec(table, unique(keys)[0]) for table, keys in by_table.items()])

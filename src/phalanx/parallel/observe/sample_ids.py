"""`SampleIds`: the dataset indices of the batch that a loader gave out last, ours or torch's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import dataloader

from phalanx.parallel.session import session


class SampleIds:
    """Follows what loaders give out.

    Of a `ShardedLoader` the indices follow from its position. Torch's iterators draw their indices here, in this
    process, and give out batches in that order, with workers too.
    """

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._latest: list[int] | None = None
        self._is_watching = False

    def watch(self) -> None:
        """Follow torch's loaders from now on, in this process."""
        if self._is_watching:
            return
        self._is_watching = True
        base: Any = dataloader._BaseDataLoaderIter
        draw, give, reset = base._next_index, base.__next__, base._reset

        def next_index(iterator: Any) -> Any:
            index = draw(iterator)
            self._drawn.setdefault(iterator, deque()).append(index)
            return index

        def next_batch(iterator: Any) -> Any:
            batch = give(iterator)
            drawn = self._drawn.get(iterator)
            self._latest = _indices(drawn.popleft()) if drawn else None
            return batch

        def begin_again(iterator: Any, *args: Any, **options: Any) -> None:
            if (drawn := self._drawn.get(iterator)) is not None:
                drawn.clear()  # of batches that were requested ahead, and that a loop which was left never got
            reset(iterator, *args, **options)

        base._next_index, base.__next__, base._reset = next_index, next_batch, begin_again

    def current(self) -> list[int] | None:
        """Return the indices of the batch at hand; None where nobody knows them, as of a stream."""
        return self.look_up()()

    def look_up(self) -> Callable[[], list[int] | None]:
        """Return what computes the indices of the batch at hand, also later: they are seldom asked for."""
        loader, latest = session.loader, self._latest
        if loader is None or not loader.training:
            return lambda: latest
        batch_at = loader.batch_at
        return lambda: latest if (ids := loader.sample_ids(batch_at)) is None else ids


def _indices(drawn: Any) -> list[int] | None:
    drawn = getattr(drawn, "indices", drawn)  # of a `BatchRequest`
    entries = [drawn] if isinstance(drawn, int) else drawn
    try:
        return [int(entry) for entry in entries]
    except (TypeError, ValueError):  # None of a stream, or keys that are no numbers
        return None


sample_ids = SampleIds()
"""This process's own."""

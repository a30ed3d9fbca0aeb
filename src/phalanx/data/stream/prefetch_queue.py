"""`PrefetchQueue`: runs an iterator in a thread, a bounded number of items ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_END: Any = object()


class PrefetchQueue(Generic[T]):
    """Runs an iterator in its own thread, at most `capacity` items ahead.

    Iterate it once. An error of the iterator is raised where the items are taken. Leaving the loop early closes the
    iterator and ends the thread.
    """

    def __init__(self, make: Callable[[], Iterator[T]], capacity: int) -> None:
        self._make, self._capacity = make, capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_done = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="phalanx reader", daemon=True)

    def __iter__(self) -> Generator[T, None, None]:
        self._thread.start()
        try:
            while (item := self._take()) is not None:
                yield item[0]
        finally:
            self._close()
        if self._error is not None:
            raise self._error

    def _take(self) -> tuple[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_done)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return (item,)

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _read(self) -> None:
        try:
            items = iter(self._make())
            # Room comes first: an item that waited for it would be one more read ahead than was allowed.
            while self._has_room() and (item := next(items, _END)) is not _END:
                self._append(item)
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that takes the items
            self._error = error
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait for room; False once the other side has closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._capacity or self._is_closed)
            return not self._is_closed

    def _append(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

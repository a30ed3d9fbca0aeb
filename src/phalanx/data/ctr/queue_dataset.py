"""`QueueDataset`: click logs streamed from files during training (Fleet's API)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from queue import SimpleQueue
from typing import Any

from phalanx.data.ctr.slot_dataset import SlotDataset
from phalanx.data.ctr.slot_rows import Batch, SlotRows, join
from phalanx.data.stream.file_sources import FileLease
from phalanx.data.stream.prefetch_queue import PrefetchQueue

READ_AHEAD = 16
"""Batches read ahead of training."""

_Mark = tuple[str, int, bool]
"""A file, its rows read so far, and whether these were all."""


_Item = tuple[SlotRows | None, list[_Mark]] | None
"""A batch and the progress it marks, or None to request the next file."""


class QueueDataset(SlotDataset):
    """Streams this worker's files in order; a thread prefetches a bounded number of batches.

    `state_dict` holds how far each file was trained on, so a resumed job reads no row twice and skips none. Arguments:
    see `SlotDataset`.

        dataset = QueueDataset("logs/", criteo_schema(), batch_size=512)
        for epoch in range(2):
            for dense, ids, label in dataset: ...
    """

    _epoch: int | None = None

    def _begin_epoch(self, rows: int, drop_last: bool) -> Iterator[Batch]:
        epoch = self.source.next_epoch() if self._epoch is None else self._epoch
        self._epoch = epoch + 1
        return self._train_on(epoch, rows, drop_last)

    def _train_on(self, epoch: int, rows: int, drop_last: bool) -> Iterator[Batch]:
        leases: SimpleQueue[FileLease | None] = SimpleQueue()
        with closing(iter(PrefetchQueue(lambda: self._read(leases, rows, drop_last), READ_AHEAD))) as read:
            try:
                for item in read:
                    self.source.settle()
                    # Requested here and not by the reader: a source may share its connection with training.
                    if item is None:
                        leases.put(self.source.lease(epoch))
                        continue
                    batch, marks = item
                    for file, rows_read, is_finished in marks:
                        self.source.advance(epoch, file, rows_read, is_finished=is_finished)
                    if batch is not None:
                        yield batch.tensors()
                self.source.settle()
            finally:
                leases.put(None)

    def _read(self, leases: SimpleQueue[FileLease | None], rows: int, drop_last: bool) -> Iterator[_Item]:
        pending: list[SlotRows] = []
        marks: list[_Mark] = []
        missing = rows
        yield None
        while (lease := leases.get()) is not None:
            row = lease.first_row
            for block in self.reader.blocks(lease.file, row):
                start = 0
                while start < len(block):
                    piece = block.slice(start, start + missing)
                    pending.append(piece)
                    start, row, missing = start + len(piece), row + len(piece), missing - len(piece)
                    if not missing:
                        yield join(pending), [*marks, (lease.file, row, False)]
                        pending, marks, missing = [], [], rows
            marks.append((lease.file, row, True))
            yield None
        yield (join(pending) if pending and not drop_last else None), marks

    def state_dict(self) -> dict[str, Any]:
        """Return how far the files were read, the current batch included; see `FileSource`. Not collective."""
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state` in the next iteration; for another number of workers `merge_states` first."""
        self.source.load_state_dict(state)
        self._epoch = None

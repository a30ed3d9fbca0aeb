"""`SlotDataset`: base class of the click-log datasets, sharded over workers by file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import IterableDataset, get_worker_info

from phalanx.data.ctr.slot_files import SlotReader, list_files
from phalanx.data.ctr.slot_rows import Batch
from phalanx.data.ctr.slots import SlotSchema
from phalanx.data.samples.bad_records import OnCorrupt
from phalanx.data.stream.file_sources import FileSource, SplitFiles
from phalanx.errors import ConfigError

_REPLACED = {
    "set_use_var": "schema=SlotSchema(label=..., dense=[...], sparse=[...])",
    "set_pipe_command": "nothing: lines are parsed natively, as schema= says",
    "set_parse_ins_id": "nothing: a row is known by its file and place",
    "set_thread": "nothing: one thread reads ahead",
    "set_sample_generator": "for dense, ids, label in dataset: ...",
    "set_sample_list_generator": "for dense, ids, label in dataset: ...",
    "set_batch_generator": "for dense, ids, label in dataset: ...",
    "start": "for dense, ids, label in dataset: ... (each loop is the next epoch; no EOFException, no reset)",
    "reset": "for dense, ids, label in dataset: ... (each loop is the next epoch; no EOFException, no reset)",
}


class ClickDataset(IterableDataset[Batch], ABC):
    """Click logs that yield ready batches (`phalanx.data.ctr.slot_rows.Batch`) of this worker's own rows.

    Each iteration is the next epoch, without communication: workers may have different numbers of batches. Given to
    `px.distribute` or `ShardedLoader` the workers take the same number of steps, weighted by their rows.
    """

    decides_batches: ClassVar[bool] = True
    """Tells `ShardedLoader` that `batches` yields ready batches of this worker's own rows."""

    batch_size: int | None
    drop_last: bool = False

    def __iter__(self) -> Iterator[Batch]:
        if self.batch_size is None:
            raise ConfigError(f"{type(self).__name__} has no batch size. Give batch_size=.")
        return self.batches(self.batch_size, drop_last=self.drop_last)

    def batches(self, rows: int, *, drop_last: bool = False) -> Iterator[Batch]:
        """Return an iterator over one epoch of this worker's rows in batches of `rows`.

        Raises:
            ConfigError: If batches of `rows` rows cannot be read here.
            DataError: While iterating, if a file cannot be read or a line is broken.
        """
        if rows < 1:
            raise ConfigError(f"Asked for batches of {rows} rows. Give at least 1.")
        if get_worker_info() is not None:
            raise ConfigError(
                f"{type(self).__name__} was given to a DataLoader with worker processes, each of which would read all "
                "its files. It reads ahead in a thread of its own: leave num_workers at 0."
            )
        return self._begin_epoch(rows, drop_last)

    @abstractmethod
    def _begin_epoch(self, rows: int, drop_last: bool) -> Iterator[Batch]: ...


class SlotDataset(ClickDataset):
    """Files of click logs, sharded over the workers by file; see its two subclasses.

    Args:
        files: A file, a folder or a list of files; the same on every worker.
        schema: What a line holds.
        batch_size: Rows of this worker's batches; may be left to the loader.
        drop_last: Whether to drop a last batch that is not full.
        on_corrupt: `stop` at a broken line, or `skip` it: it is dropped and counted in `corrupt`.
        source: What assigns the files; split by rank when omitted.
        seed: Start of every shuffle; the same on every worker.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        schema: SlotSchema,
        *,
        batch_size: int | None = None,
        drop_last: bool = False,
        on_corrupt: OnCorrupt = "stop",
        source: FileSource | None = None,
        seed: int = 0,
    ) -> None:
        self.schema, self.drop_last, self.seed = schema, drop_last, seed
        self.reader = SlotReader(schema, on_corrupt)
        self.corrupt = self.reader.corrupt
        self.batch_size = batch_size
        self.files = list_files(files)
        self.source = source or SplitFiles(self.files)

    def set_batch_size(self, rows: int) -> None:
        """Set the rows of a batch, as `batch_size=` does."""
        self.batch_size = rows

    def set_filelist(self, files: Sequence[str | Path]) -> None:
        """Read other files from now on, split by rank."""
        self.files = list_files(files)
        self.source = SplitFiles(self.files)

    def __getattr__(self, name: str) -> Any:
        if name in _REPLACED:
            raise AttributeError(f"'{name}' belongs to an older framework. Write instead: {_REPLACED[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

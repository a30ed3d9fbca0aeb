"""`Cifar10Dataset`: CIFAR-10 in its binary version (A. Krizhevsky, 2009).

A file is a run of records of 3,073 bytes: the label, then 1,024 red, 1,024 green and 1,024 blue pixels by rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.readers.image_dataset import ImageDataset
from phalanx.data.readers.mmap_records import MappedRecords, find_file
from phalanx.data.samples.bad_records import BadRecords, OnCorrupt
from phalanx.data.vision.pointwise import Normalize, ToTensor
from phalanx.errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of red, green and blue over the training images, whose pixels run from 0 to 1."""


class Cifar10Dataset(ImageDataset):
    """CIFAR-10: 32 x 32 colour images of ten classes; see `ImageDataset` for the two ways to read it.

    Images are read from the files where they are used; all processes of a node share the kernel's copy.

    Args:
        folder: Where the `.bin` files are, or the folder above their `cifar-10-batches-bin`.
        train: The five training files, or the test file.
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.
        on_corrupt: `stop` at a broken record, or `skip` it: it is dropped and counted in `corrupt`.

    Raises:
        ConfigError: If the folder does not exist, or an argument is out of range.
        DataError: If a file is missing, or a record is broken; names the file and the byte.
    """

    def __init__(
        self,
        folder: str | Path,
        train: bool = True,
        *,
        num_shards: int | None = None,
        shard_id: int | None = None,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        folder = Path(folder)
        if (folder / "cifar-10-batches-bin").is_dir():
            folder = folder / "cifar-10-batches-bin"
        self.corrupt = BadRecords(on_corrupt)
        self._files = [
            _map_file(find_file(folder, name), self.corrupt) for name in (TRAIN_FILES if train else TEST_FILES)
        ]
        good = [file.table[:, 0] <= 9 for file in self._files]
        for file, is_good in zip(self._files, good, strict=True):
            _note_wrong_labels(file, is_good, self.corrupt)
        self._file_of = np.repeat(np.arange(len(good), dtype=np.uint8), [int(is_good.sum()) for is_good in good])
        self._record_of = np.concatenate([np.flatnonzero(is_good) for is_good in good])
        labels = [file.table[is_good, 0] for file, is_good in zip(self._files, good, strict=True)]
        if not len(self._file_of):
            raise DataError(
                f"{folder}: no record is complete; the first: {self.corrupt.first}. Download the files again."
            )
        self._describe(
            torch.from_numpy(np.concatenate(labels)).long(),
            CLASSES,
            [ToTensor(), Normalize(MEAN, STD)],
            num_shards,
            shard_id,
        )

    def read_images(self, indices: NDArray[np.int64], *, ready: bool) -> Tensor:
        """See `ImageDataset`."""
        pixels = np.empty((len(indices), RECORD_BYTES - 1), np.uint8)
        files, records = self._file_of[indices], self._record_of[indices]
        for number, file in enumerate(self._files):
            is_in_file = files == number
            pixels[is_in_file] = file.table[records[is_in_file], 1:]
        # The three colours stay where they are; only the view has them last.
        return torch.from_numpy(pixels).view(-1, 3, 32, 32).permute(0, 2, 3, 1)


def _map_file(path: Path, corrupt: BadRecords) -> MappedRecords:
    records, rest = divmod(path.stat().st_size, RECORD_BYTES)
    if rest or not records:
        corrupt.add(
            f"{path}: {RECORD_BYTES} bytes a record do not divide its {records * RECORD_BYTES + rest} bytes; the last "
            f"record begins at byte {records * RECORD_BYTES} and has {rest}"
        )
    return MappedRecords(path, 0, records, RECORD_BYTES)


def _note_wrong_labels(file: MappedRecords, is_good: NDArray[np.bool_], corrupt: BadRecords) -> None:
    wrong = np.flatnonzero(~is_good)
    if wrong.size:
        record = int(wrong[0])
        corrupt.add(
            f"{file.path}: record {record}, at byte {record * RECORD_BYTES}, has label {file.table[record, 0]}; "
            f"CIFAR-10 has 0 to 9, CIFAR-100 another format ({wrong.size} of the file's {len(file)} records)",
            wrong.size,
        )

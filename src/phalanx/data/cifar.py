"""CIFAR-10 in its binary version (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

A file is a run of records of 3,073 bytes: the label, then 1,024 red, 1,024 green and 1,024 blue pixels by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.idx import find_file
from phalanx.errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of red, green and blue over the training images, whose pixels run from 0 to 1."""


def read_cifar(path: str | Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return (pixels, labels) of one CIFAR-10 file, shapes (n, 3, 32, 32) and (n,).

    Raises:
        DataError: If the file cannot be read, is cut off, or holds a label above 9; names it and the byte offset.
    """
    path = Path(path)
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the folder and its files.") from None
    records, rest = divmod(len(content), RECORD_BYTES)
    if rest or not records:
        raise DataError(
            f"{path}: {RECORD_BYTES} bytes a record do not divide its {len(content)} bytes; the last record begins "
            f"at byte {records * RECORD_BYTES} and has {rest}. Download the binary version again."
        )
    table = content.reshape(records, RECORD_BYTES)
    labels = table[:, 0]
    wrong = np.flatnonzero(labels > 9)
    if wrong.size:
        record = int(wrong[0])
        raise DataError(
            f"{path}: record {record}, at byte {record * RECORD_BYTES}, has label {labels[record]}; CIFAR-10 has 0 "
            "to 9. Check that this is the binary version of CIFAR-10, not of CIFAR-100."
        )
    return table[:, 1:].reshape(-1, 3, 32, 32), labels


class Cifar10Dataset(Dataset[tuple[Tensor, int]]):
    """CIFAR-10 as normalised float32 images of shape (3, 32, 32) with an int label.

    Args:
        folder: Where the `.bin` files are, or the folder above their `cifar-10-batches-bin`.
        train: The five training files, or the test file.

    Raises:
        DataError: If a file is missing or broken; names the file and the place.
    """

    class_dim = 10

    def __init__(self, folder: str | Path, train: bool = True) -> None:
        folder = Path(folder)
        if (folder / "cifar-10-batches-bin").is_dir():
            folder = folder / "cifar-10-batches-bin"
        parts: list[Any] = [read_cifar(find_file(folder, name)) for name in (TRAIN_FILES if train else TEST_FILES)]
        self.pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in parts]))
        self.labels = torch.from_numpy(np.concatenate([labels for _, labels in parts])).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several samples at once, which is faster than one by one."""
        chosen = torch.as_tensor(indices)
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        images = (self.pixels[chosen].float() / 255 - mean) / std
        return list(zip(images, self.labels[chosen].tolist(), strict=True))

"""IDX files, the format of MNIST and Fashion-MNIST (Y. LeCun, C. Cortes, C. J. C. Burges).

offset 0    0x00 0x00                 always
offset 2    element type              0x08 for unsigned bytes
offset 3    number of dimensions
offset 4    one size for each         32 bits, most significant byte first
then        the elements, the last dimension changing fastest
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.labels import check_labels
from phalanx.errors import ConfigError, DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path, dims: int | None = None) -> NDArray[Any]:
    """Return the array in an IDX file, plain or compressed with gzip (`.gz`).

    Args:
        path: The file.
        dims: Number of dimensions it must have; any when omitted.

    Returns:
        The elements in the machine's byte order, of the shape the file states.

    Raises:
        DataError: If the file is missing, cut off, too long or not an IDX file; names it and the byte offset.
    """
    path = Path(path)
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            return _read(file, path, dims)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is broken ({error}). Download the file again.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the folder and its files.") from None


def _read(file: BinaryIO, path: Path, dims: int | None) -> NDArray[Any]:
    magic = _take(file, path, 0, 4)
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        raise DataError(
            f"{path}: asked for an IDX file, but at byte 0 found {magic.hex(' ')}, where 00 00, an element type "
            "(08, 09, 0b to 0e) and the number of dimensions belong. Check that this is the right file."
        )
    if magic[3] == 0 or (dims is not None and magic[3] != dims):
        raise DataError(
            f"{path}: at byte 3 it says it has {magic[3]} dimensions, expected {dims or 'at least 1'}. "
            "Images have 3 and labels 1; check that the files are not mixed up."
        )
    shape = np.frombuffer(_take(file, path, 4, 4 * magic[3]), ">u4").tolist()
    element = np.dtype(_TYPES[magic[2]])
    start, size = 4 + 4 * magic[3], math.prod(shape) * element.itemsize
    content = _take(file, path, start, size)
    if file.read(1):
        raise DataError(
            f"{path}: {size} bytes of {'x'.join(map(str, shape))} elements end at byte {start + size}, but the file "
            "goes on. Download it again."
        )
    array = np.frombuffer(content, element).reshape(shape)
    return array.astype(element.newbyteorder("="))


def _take(file: BinaryIO, path: Path, offset: int, size: int) -> bytes:
    # Read in pieces: a corrupt header may ask for more than there is memory.
    pieces, left = [], size
    while left and (piece := file.read(min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise DataError(
            f"{path}: needs {size} bytes from byte {offset} on, but ends after {size - left} of them. "
            "Download the file again."
        )
    return b"".join(pieces)


class IdxDataset(Dataset[tuple[Tensor, int]]):
    """MNIST, Fashion-MNIST or another set of the same four files, plain or `.gz`.

    An image is float32 (channels, height, width), normalised; a label is an int.

    Args:
        folder: Where `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
            `t10k-labels-idx1-ubyte` are.
        train: The training or the test images.
        channels: 1, or 3 equal ones for models of colour images.
        mean: Taken off the pixels, which run from 0 to 1; MNIST's when omitted.
        std: What the rest is divided by; MNIST's when omitted.
        class_dim: Number of classes; every label is checked.

    Raises:
        DataError: If a file is missing or broken, or a label is not a class; names the file and the place.
    """

    def __init__(
        self,
        folder: str | Path,
        train: bool = True,
        *,
        channels: int = 1,
        mean: float = 0.1307,
        std: float = 0.3081,
        class_dim: int = 10,
    ) -> None:
        stem = "train" if train else "t10k"
        images, labels = find_file(folder, f"{stem}-images-idx3-ubyte"), find_file(folder, f"{stem}-labels-idx1-ubyte")
        pixels, classes = read_idx(images, dims=3), read_idx(labels, dims=1)
        if len(pixels) != len(classes):
            raise DataError(
                f"{images} has {len(pixels)} images at byte 4, {labels} has {len(classes)} labels at byte 4. "
                "Use files of one set."
            )
        self.pixels = torch.from_numpy(pixels)
        self.labels = torch.from_numpy(classes).long()
        self.channels, self.mean, self.std, self.class_dim = channels, mean, std, class_dim
        try:
            check_labels(self.labels, class_dim)
        except DataError as error:
            raise DataError(f"{labels}: {error}") from None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several samples at once, which is faster than one by one."""
        chosen = torch.as_tensor(indices)
        images = (self.pixels[chosen].float() / 255 - self.mean) / self.std
        return list(
            zip(images.unsqueeze(1).expand(-1, self.channels, -1, -1), self.labels[chosen].tolist(), strict=True)
        )


def find_file(folder: str | Path, name: str) -> Path:
    """Return the file `name` or `name.gz` in a folder.

    Raises:
        ConfigError: If the folder does not exist.
        DataError: If neither file does; lists what is there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"Asked for data in {folder}, which is not a folder. Give the folder that holds {name}.")
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise DataError(f"{folder} holds neither {name} nor {name}.gz; found {there}. Put the file there.")

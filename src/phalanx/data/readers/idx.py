"""`MnistDataset`, `FashionMnistDataset`: image datasets in IDX files (Y. LeCun, C. Cortes, C. J. C. Burges).

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.readers.image_dataset import ImageDataset
from phalanx.data.readers.mmap_records import MappedRecords, find_file
from phalanx.data.samples.bad_records import BadRecords, OnCorrupt
from phalanx.data.samples.labels import check_labels
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.pointwise import Normalize, ToTensor
from phalanx.data.vision.transform import Transform
from phalanx.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path, dims: int | None = None) -> NDArray[Any]:
    """Return the array in an IDX file, plain or compressed with gzip (`.gz`).

    Args:
        path: The file.
        dims: Number of dimensions it must have; any when omitted.

    Returns:
        The elements in native byte order, of the shape the file states.

    Raises:
        DataError: If the file is missing, cut off, too long or not an IDX file; names it and the byte offset.
    """
    path = Path(path)
    with _open(path) as file:
        header = _read_header(file, path, dims)
        size = math.prod(header.shape) * header.element.itemsize
        content = _take(file, path, header.bytes, size)
        if file.read(1):
            raise DataError(
                f"{path}: {size} bytes of {'x'.join(map(str, header.shape))} elements end at byte "
                f"{header.bytes + size}, but the file is longer. Download it again."
            )
    array = np.frombuffer(content, header.element).reshape(header.shape)
    return array.astype(header.element.newbyteorder("="))


class _Header(NamedTuple):
    element: np.dtype[Any]
    shape: tuple[int, ...]
    bytes: int


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is broken ({error}). Download the file again.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the folder and its files.") from None


def _read_header(file: BinaryIO, path: Path, dims: int | None) -> _Header:
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
    return _Header(np.dtype(_TYPES[magic[2]]), tuple(shape), 4 + 4 * magic[3])


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


class IdxDataset(ImageDataset):
    """A set of grey images in the four files of MNIST, plain or `.gz`; see `ImageDataset` for the two ways to read it.

    Plain files are read where they are used; all processes of a node share the kernel's copy. Compressed ones are held
    in memory. Indexed samples are normalised.

    Args:
        folder: Where `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
            `t10k-labels-idx1-ubyte` are.
        train: The training or the test images.
        channels: Of indexed samples: 1, or 3 equal ones for models of colour images.
        mean: Taken off the pixels, which run from 0 to 1; that of the set when omitted (MNIST's for `IdxDataset`).
        std: What the rest is divided by; likewise.
        class_dim: Number of classes; every label is checked.
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.
        on_corrupt: `stop` where a file is cut off, or `skip` what is not there: it is left out and counted in
            `corrupt`. A compressed file must be whole.

    Raises:
        DataError: If a file is missing or broken, or a label is not a class; names the file and the place.
    """

    MEAN, STD = 0.1307, 0.3081
    """Of all pixels of the training images, which run from 0 to 1."""

    NAMES: tuple[str, ...] = ()
    """What the labels mean; the numbers themselves when empty."""

    def __init__(
        self,
        folder: str | Path,
        train: bool = True,
        *,
        channels: int = 1,
        mean: float | None = None,
        std: float | None = None,
        class_dim: int = 10,
        num_shards: int | None = None,
        shard_id: int | None = None,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        stem, endings = "train" if train else "t10k", ("", ".gz")
        images = find_file(folder, f"{stem}-images-idx3-ubyte", endings)
        labels = find_file(folder, f"{stem}-labels-idx1-ubyte", endings)
        self.corrupt = BadRecords(on_corrupt)
        self._side, promised, self._pixels = _open_records(images, 3, self.corrupt)
        _, promised_labels, classes = _open_records(labels, 1, self.corrupt)
        if promised != promised_labels:
            raise DataError(
                f"{images} has {promised} images at byte 4, {labels} has {promised_labels} labels at byte 4. "
                "Use files of one set."
            )
        whole = min(len(self._pixels), len(classes))
        if not whole:
            raise DataError(f"{images}: holds no complete image with a label. Download both files again.")
        normalize = Normalize((self.MEAN if mean is None else mean,), (self.STD if std is None else std,))
        self._describe(
            torch.from_numpy(classes.table[:whole, 0].astype(np.int64)),
            self.NAMES[:class_dim] or tuple(map(str, range(class_dim))),
            [ToTensor(), normalize, _Channels(channels)],
            num_shards,
            shard_id,
        )
        try:
            check_labels(self.labels, class_dim)
        except DataError as error:
            raise DataError(f"{labels}: {error}") from None

    def read_images(self, indices: NDArray[np.int64], *, ready: bool) -> Tensor:
        """See `ImageDataset`."""
        return torch.from_numpy(self._pixels.table[indices]).view(-1, *self._side, 1)


class MnistDataset(IdxDataset):
    """MNIST: handwritten digits of 28 x 28 pixels (Y. LeCun, C. Cortes, C. J. C. Burges); see `IdxDataset`."""


class FashionMnistDataset(IdxDataset):
    """Fashion-MNIST: pieces of clothing of 28 x 28 pixels (H. Xiao, K. Rasul, R. Vollgraf, 2017); see `IdxDataset`."""

    MEAN, STD = 0.2860, 0.3530
    NAMES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


class _Channels(Transform):
    """As many equal channels, from one."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        return samples.expand(-1, self.channels, -1, -1)


class _Table:
    """Records in memory, as `MappedRecords` has them in a file."""

    def __init__(self, table: NDArray[np.uint8]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)


def _open_records(path: Path, dims: int, corrupt: BadRecords) -> tuple[tuple[int, ...], int, MappedRecords | _Table]:
    """Return the shape of a record, how many the file promises, and those it has as bytes."""
    with _open(path) as file:
        header = _read_header(file, path, dims)
    promised, shape = header.shape[0], header.shape[1:]
    if header.element.itemsize != 1:
        raise DataError(
            f"{path}: at byte 2 it says its elements are {header.element.name}; images and labels are bytes (08). "
            "Read it with read_idx."
        )
    if path.suffix == ".gz":
        return shape, promised, _Table(read_idx(path, dims).astype(np.uint8, copy=False).reshape(promised, -1))
    size, there = math.prod(shape), path.stat().st_size - header.bytes
    if there > promised * size:
        raise DataError(
            f"{path}: its {promised} records end at byte {header.bytes + promised * size}, but the file is longer. "
            "Download it again."
        )
    whole = there // size if size else promised
    if whole < promised:
        corrupt.add(
            f"{path}: record {whole} of {promised}, at byte {header.bytes + whole * size}, is cut off: the file has "
            f"{header.bytes + there} bytes",
            promised - whole,
        )
    return shape, promised, MappedRecords(path, header.bytes, whole, size)

"""Grey images of ten classes: MNIST's own files, or the small digits of scikit-learn."""

import gzip
import logging
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


class InputError(Exception):
    """A file, a variable or a flag is invalid; the message has the fix."""


class Images(NamedTuple):
    """Grey images as bytes, shape (n, 28, 28), and their classes, shape (n,)."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def batch(self, rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some samples as float tensors, normalised by the mean and standard deviation of MNIST."""
        return (self.pixels[rows].unsqueeze(1) / 255 - 0.1307) / 0.3081, self.labels[rows]


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file of bytes, plain or gz, whose items have `shape`; every header field is checked."""

    def expect(offset: int, field: str, asked: int, found: int) -> None:
        if found != asked:
            words = f"{path}, offset {offset}: {field} should be {asked}, found {found}."
            raise InputError(f"{words} Fetch the file again, or give --data the folder of MNIST's IDX files.")

    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}). Fetch it again.") from error
    dims = 1 + len(shape)
    start = 4 + 4 * dims
    if len(raw) < start:
        expect(len(raw), "the length of the header", start, len(raw))
    zeros, kind, found_dims, count, *found_shape = struct.unpack_from(f">HBB{dims}I", raw)
    expect(0, "the first two bytes", 0, zeros)
    expect(2, "the type of the values (8 is bytes)", 8, kind)
    expect(3, "the number of dimensions", dims, found_dims)
    expect(4, "the number of items (at least 1)", max(count, 1), count)
    for offset, asked, found in zip((8, 12), shape, found_shape, strict=False):
        expect(offset, "a side of the images", asked, found)
    expect(start, f"the bytes of {count} items", count * math.prod(shape), len(raw) - start)
    return np.frombuffer(raw, np.uint8, offset=start).reshape(count, *shape)


def read_mnist(folder: Path, part: str) -> Images:
    """Read `train` or `t10k` from a folder with MNIST's file names, each plain or with .gz."""

    def find(name: str) -> Path:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
        raise InputError(f"--data {folder} holds neither {name} nor {name}.gz. Give the folder of MNIST's IDX files.")

    paths = find(f"{part}-images-idx3-ubyte"), find(f"{part}-labels-idx1-ubyte")
    pixels, labels = read_idx(paths[0], (28, 28)), read_idx(paths[1], ())
    if len(pixels) != len(labels):
        raise InputError(f"{paths[1]}, offset 4: {len(labels)} labels, but {paths[0]} has {len(pixels)} images.")
    if labels.max() > 9:
        row = int(labels.argmax())
        raise InputError(f"{paths[1]}, offset {8 + row}: label {labels[row]} of item {row} is not one of 0 to 9.")
    return Images(torch.tensor(pixels), torch.tensor(labels, dtype=torch.long))


def read_digits() -> tuple[Images, Images]:
    """Return scikit-learn's 1797 digits, enlarged to MNIST's size; every fifth is a test image."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError("The default images come with scikit-learn: pip install it, or give --data DIR.") from error
    small, labels = load_digits(return_X_y=True)
    eight = torch.tensor(small * 255 / 16).round().to(torch.uint8).view(-1, 8, 8)
    pixels = F.pad(eight.repeat_interleave(3, 1).repeat_interleave(3, 2), (2, 2, 2, 2))
    digits, is_test = torch.tensor(labels), torch.arange(len(labels)) % 5 == 4
    return Images(pixels[~is_test], digits[~is_test]), Images(pixels[is_test], digits[is_test])


def read_data(folder: Path | None) -> tuple[Images, Images]:
    if folder is None:
        train, test = read_digits()
        source = "scikit-learn's digits, 8x8 pixels enlarged 3 times and padded by 2 to 28x28"
    else:
        train, test = read_mnist(folder, "train"), read_mnist(folder, "t10k")
        source = str(folder)
    logging.info("data = %s (%d images to train on, %d to test)", source, len(train.labels), len(test.labels))
    return train, test

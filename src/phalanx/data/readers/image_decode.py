"""`decode_all`: decode JPEG and PNG files to uint8 tensors with Pillow, in threads."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from phalanx.errors import ConfigError, DataError

_T = TypeVar("_T")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""Errors of Pillow for files that are no images, or truncated."""


def require_pillow() -> Any:
    """Return the module `PIL.Image`.

    Raises:
        ConfigError: If Pillow is not installed; says what to install.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            'Photographs are decoded by Pillow, which is not installed. Run: pip install "phalanx[examples]"'
        ) from None
    return Image


def decode_all(paths: list[Path], side: int | None, threads: int | None) -> list[Tensor]:
    """Return images as uint8 (height, width, 3), in the order of `paths`.

    Args:
        paths: Their files.
        side: Length their shorter sides are scaled to; None keeps their size.
        threads: How many decode; None for as many as this process has cores, 1 in a worker process.

    Raises:
        DataError: If one cannot be decoded; names it.
    """
    return list(_map_in_threads(lambda path: torch.from_numpy(_decode(path, side)), paths, threads))


def find_problems(paths: list[Path], threads: int | None) -> Iterator[str | None]:
    """Yield for each image what is wrong with it, None if it can be decoded."""

    def read(path: Path) -> str | None:
        try:
            _decode(path, 1)
        except DataError as error:
            return str(error).removesuffix(". Replace or remove the file.")
        return None

    return _map_in_threads(read, paths, threads)


def _decode(path: Path, side: int | None) -> Any:
    pillow = require_pillow()
    try:
        with pillow.open(path) as image:
            if side is None:
                return np.array(image.convert("RGB"))
            # JPEG can be decoded at half or a quarter of its size at once.
            image.draft("RGB", (side, side))
            scale = side / min(image.size)
            size = [max(side, round(length * scale)) for length in image.size]
            return np.array(image.convert("RGB").resize(size, pillow.Resampling.BILINEAR))
    except (*_BROKEN, pillow.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}). Replace or remove the file.") from None


def _map_in_threads(work: Callable[[Path], _T], paths: list[Path], threads: int | None) -> Iterator[_T]:
    # Pillow lets other threads run while it decodes.
    threads = threads or (1 if get_worker_info() is not None else len(os.sched_getaffinity(0)))
    if threads == 1 or len(paths) < 2:
        yield from map(work, paths)
        return
    with ThreadPoolExecutor(threads, "phalanx decode") as pool:
        yield from pool.map(work, paths)

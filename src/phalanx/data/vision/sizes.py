"""`read_size`: parse and check the size and padding arguments of image transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.data.vision.transform import layout_of
from phalanx.errors import ConfigError


def read_size(size: Any, operation: str) -> tuple[int, int]:
    """Return (height, width) of an integer or a pair.

    Raises:
        ConfigError: If it is neither, or below 1.
    """
    pair = (size, size) if isinstance(size, int) else size
    if not _are_whole(pair, (2,)) or min(pair) < 1:
        raise ConfigError(
            f"{operation} got size {size!r}. Give a side of at least 1, or (height, width), such as (32, 32)."
        )
    return pair[0], pair[1]


def read_padding(padding: Any, operation: str) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of one number for all sides, (left and right, top and bottom), or all four.

    Raises:
        ConfigError: If it is none of these, or below 0.
    """
    sides = (padding,) * 4 if isinstance(padding, int) else padding
    if not _are_whole(sides, (2, 4)) or min(sides) < 0:
        raise ConfigError(
            f"{operation} got padding {padding!r}. Give one number of pixels, or (left, top, right, bottom), of 0 or "
            "more."
        )
    sides = tuple(sides) * (4 // len(sides))
    return sides[0], sides[1], sides[2], sides[3]


def read_share(name: str, value: Any, operation: str) -> float:
    """Return a probability.

    Raises:
        ConfigError: If it is no number from 0 to 1.
    """
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{operation} got {name}={value!r}. Give a number from 0 to 1.")
    return float(value)


def height_and_width(images: Tensor, operation: str) -> tuple[int, int, bool]:
    """Return (height, width, whether channels are last) of a batch of images."""
    is_last = layout_of(images, operation) == "HWC"
    height, width = images.shape[1:3] if is_last else images.shape[2:4]
    return height, width, is_last


def channels_first(images: Tensor, is_last: bool) -> Tensor:
    """Return a view with channels first; `channels_as_before` takes it back."""
    return images.permute(0, 3, 1, 2) if is_last else images


def channels_as_before(images: Tensor, is_last: bool) -> Tensor:
    """Return a view of channels-first images with channels where they were."""
    return images.permute(0, 2, 3, 1) if is_last else images


def as_stored(images: Tensor, is_last: bool) -> tuple[Tensor, bool]:
    """Return (view in the order in which the pixels lie in memory, whether channels are last in it).

    Files such as CIFAR-10's have whole channels one after the other: seen with channels last, they still lie so.
    """
    first = channels_first(images, is_last)
    return (first, False) if first.is_contiguous() else (images, is_last)


def _are_whole(values: Any, lengths: Sequence[int]) -> bool:
    is_row = isinstance(values, Sequence) and not isinstance(values, str) and len(values) in lengths
    return is_row and all(isinstance(value, int) for value in values)

"""`RandomCrop`, `CenterCrop`, `RandomResizedCrop`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.resize import Interpolation, check_interpolation, resized
from phalanx.data.vision.sizes import (
    as_stored,
    channels_as_before,
    channels_first,
    height_and_width,
    read_padding,
    read_size,
)
from phalanx.data.vision.transform import Transform
from phalanx.errors import ConfigError

_ATTEMPTS = 10
"""Boxes that `RandomResizedCrop` tries, as is usual; the middle of the image if none fits."""


class RandomCrop(Transform):
    """Pads images with zeros and crops each to a given size at a random position.

    Args:
        size: Side of the part, or (height, width).
        padding: Pixels added before: one number for every side, or (left, top, right, bottom).

    Raises:
        ConfigError: If an argument is no size; when called, if the padded image is smaller than the part.
    """

    def __init__(self, size: int | tuple[int, int], padding: int | tuple[int, ...] = 0) -> None:
        self.size, self.padding = read_size(size, "RandomCrop"), read_padding(padding, "RandomCrop")

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        height, width, is_last = height_and_width(samples, "RandomCrop")
        left, top, right, bottom = self.padding
        height, width = height + top + bottom, width + left + right
        _check_fits(self, self.size, height, width)
        tops = draws.integers(height - self.size[0] + 1).numpy()
        lefts = draws.integers(width - self.size[1] + 1).numpy()
        stored, stored_last = as_stored(samples, is_last)
        parts = _parts(_padded(stored, self.padding, stored_last), self.size, tops, lefts, stored_last)
        return channels_as_before(parts, is_last and not stored_last)


class CenterCrop(Transform):
    """Crops images at their centre.

    Args:
        size: Side of the part, or (height, width).

    Raises:
        ConfigError: If `size` is no size; when called, if the image is smaller.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = read_size(size, "CenterCrop")

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        height, width, is_last = height_and_width(samples, "CenterCrop")
        _check_fits(self, self.size, height, width)
        top, left = (height - self.size[0]) // 2, (width - self.size[1]) // 2
        part = channels_first(samples, is_last)[..., top : top + self.size[0], left : left + self.size[1]]
        return channels_as_before(part, is_last)


class RandomResizedCrop(Transform):
    """Crops each image to a random area and aspect ratio, and scales it to one size.

    Args:
        size: Side of the result, or (height, width).
        scale: Least and largest share of the image's area.
        ratio: Least and largest width of the part, as a multiple of its height.
        interpolation: As `Resize` has it.

    Raises:
        ConfigError: If an argument is out of range.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size, self.interpolation = read_size(size, "RandomResizedCrop"), interpolation
        self.scale, self.ratio = _range("scale", scale), _range("ratio", ratio)
        check_interpolation(interpolation, "RandomResizedCrop")

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        height, width, is_last = height_and_width(samples, "RandomResizedCrop")
        images = channels_first(samples, is_last)
        boxes = self._boxes(height, width, draws).tolist()
        parts = [image[:, y : y + h, x : x + w] for image, (y, x, h, w) in zip(images, boxes, strict=True)]
        scaled = torch.cat([resized(part.unsqueeze(0), self.size, self.interpolation) for part in parts])
        return channels_as_before(scaled, is_last)

    def _boxes(self, height: int, width: int, draws: Draws) -> NDArray[np.int64]:
        """Return (top, left, height, width) of every row's part, shape (n, 4)."""
        heights, widths = (np.full(len(draws), side) for side in self._middle(height, width))
        is_open = np.ones(len(draws), bool)
        for _ in range(_ATTEMPTS):
            area = height * width * draws.uniform(*self.scale).numpy()
            ratio = np.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])).numpy())
            wide, high = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
            fits = is_open & (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
            widths[fits], heights[fits] = wide[fits], high[fits]
            is_open &= ~fits
        tops, lefts = draws.uniform().numpy(), draws.uniform().numpy()
        # The middle is for images too long and narrow for any box; its place is not drawn.
        tops[is_open] = lefts[is_open] = 0.5
        tops, lefts = np.floor(tops * (height - heights + 1)), np.floor(lefts * (width - widths + 1))
        return np.stack([tops, lefts, heights, widths], axis=1).astype(np.int64)

    def _middle(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the largest part of a permitted shape."""
        high, wide = min(height, width / self.ratio[0]), min(width, height * self.ratio[1])
        return max(1, round(high)), max(1, round(wide))


def _padded(images: Tensor, padding: tuple[int, int, int, int], is_last: bool) -> Tensor:
    left, top, right, bottom = padding
    if not any(padding):
        return images
    return F.pad(images, (0, 0, left, right, top, bottom) if is_last else (left, right, top, bottom))


def _parts(
    images: Tensor, size: tuple[int, int], tops: NDArray[np.int64], lefts: NDArray[np.int64], is_last: bool
) -> Tensor:
    """Return images[i, tops[i] : tops[i] + height, lefts[i] : lefts[i] + width] for every i."""
    # A view with every part of every image, of which one of each is taken; NumPy copies whole rows of a part at once,
    # where torch would go element by element.
    down, right = (1, 2) if is_last else (2, 3)
    array = images.numpy()
    shape, strides = list(array.shape), array.strides
    places = shape[down] - size[0] + 1, shape[right] - size[1] + 1
    shape[down], shape[right] = size
    parts = np.lib.stride_tricks.as_strided(
        array,
        (shape[0], *places, *shape[1:]),
        (strides[0], strides[down], strides[right], *strides[1:]),
        writeable=False,
    )
    return torch.from_numpy(parts[np.arange(len(array)), tops, lefts])


def _check_fits(operation: Transform, size: tuple[int, int], height: int, width: int) -> None:
    if size[0] > height or size[1] > width:
        with_padding = ", its padding included" if isinstance(operation, RandomCrop) and any(operation.padding) else ""
        raise ConfigError(
            f"{operation!r} was given an image of {height} x {width}{with_padding}, which is smaller than the part. "
            "Give a smaller size, or scale the image up first with Resize."
        )


def _range(name: str, value: Any) -> tuple[float, float]:
    try:
        low, high = float(value[0]), float(value[1])
        is_range = len(value) == 2 and 0 < low <= high
    except (TypeError, ValueError, IndexError):
        is_range = False
    if not is_range:
        raise ConfigError(f"RandomResizedCrop got {name}={value!r}. Give two numbers above 0, the smaller one first.")
    return low, high

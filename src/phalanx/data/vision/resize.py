"""`Resize`: scale images to a size."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.sizes import channels_as_before, channels_first, height_and_width, read_size
from phalanx.data.vision.transform import Transform
from phalanx.errors import ConfigError, did_you_mean

Interpolation = Literal["bilinear", "bicubic", "nearest"]


class Resize(Transform):
    """Scales images, whose type stays what it is.

    Scaling down averages over all pixels, as Pillow does; bytes come out within one level of Pillow's (bicubic: two).

    Args:
        size: (height, width); or one number for the shorter side, the shape being kept.
        interpolation: `bilinear`, `bicubic` or `nearest`.

    Raises:
        ConfigError: If an argument is unknown or out of range.
    """

    def __init__(self, size: int | tuple[int, int], interpolation: Interpolation = "bilinear") -> None:
        read_size(size, "Resize")
        check_interpolation(interpolation, "Resize")
        self.size, self.interpolation = size, interpolation

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        height, width, is_last = height_and_width(samples, "Resize")
        size = self._size_of(height, width)
        return channels_as_before(resized(channels_first(samples, is_last), size, self.interpolation), is_last)

    def _size_of(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        scale = self.size / min(height, width)
        return max(self.size, int(height * scale)), max(self.size, int(width * scale))


def resized(images: Tensor, size: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Return images of shape (n, channels, height, width) scaled to `size`."""
    if images.shape[2:] == size:
        return images
    if images.dtype == torch.uint8:
        images = images.contiguous(memory_format=torch.channels_last)  # three times as fast
    if interpolation == "nearest":
        return F.interpolate(images, size, mode="nearest-exact")
    return F.interpolate(images, size, mode=interpolation, antialias=True, align_corners=False)


def check_interpolation(name: str, operation: str) -> None:
    """Raise ConfigError unless there is an interpolation of this name."""
    if name not in get_args(Interpolation):
        names = get_args(Interpolation)
        raise ConfigError(
            f"{operation} got interpolation={name!r}.{did_you_mean(name, names)} Give {', '.join(names)}."
        )

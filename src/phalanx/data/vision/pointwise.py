"""`Rescale`, `Normalize`, `HWC2CHW`, `ToTensor`: per-pixel transforms, neighbours fused into one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.samples.buffer_pool import batches
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.transform import CHANNELS, Transform, layout_of
from phalanx.errors import ConfigError
from phalanx.versions import HAS_NATIVE

if HAS_NATIVE:
    from phalanx import _core

_CHUNK_BYTES = 1 << 19
"""Work on parts of a batch that stay in a core's second cache from the first operation on them to the last."""


class Pointwise(Transform):
    """pixel * scale + shift as float32, with one pair for all channels or one for each.

    Args:
        scale: Factors, shape () or (channels,); None leaves pixels and their type as they are.
        shift: What is added, of the shape of `scale`.
        channels_first: Whether (height, width, channels) becomes (channels, height, width).
    """

    _scale: NDArray[np.float64] | None
    _shift: NDArray[np.float64]
    _channels_first: bool

    @classmethod
    def of(cls, scale: Any, shift: Any, channels_first: bool) -> Pointwise:
        """Return the operation with these numbers."""
        operation = cls()
        operation._set(scale, shift, channels_first)
        return operation

    def _set(self, scale: Any, shift: Any, channels_first: bool) -> None:
        self._scale = None if scale is None else np.asarray(scale, np.float64)
        self._shift, self._channels_first = np.asarray(shift, np.float64), channels_first

    def then(self, after: Pointwise) -> Pointwise | None:
        """Return one operation for this one and `after`; None if both move channels or their numbers do not fit."""
        if self._channels_first and after._channels_first:
            return None
        moves = self._channels_first or after._channels_first
        if self._scale is None or after._scale is None:
            scaling = after if self._scale is None else self
            return Pointwise.of(scaling._scale, scaling._shift, moves)
        if self._scale.ndim and after._scale.ndim and len(self._scale) != len(after._scale):
            return None
        return Pointwise.of(self._scale * after._scale, self._shift * after._scale + after._shift, moves)

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        if self._channels_first:
            samples = _channels_to_front(samples)
        if self._scale is None:
            return samples.contiguous()
        result = batches.empty(samples.shape)
        if HAS_NATIVE and self._channels_first and samples.dtype == torch.uint8 and not samples.is_contiguous():
            self._compute_native(samples, result)
        else:
            self._compute(samples, result)
        return result

    def _compute(self, samples: Tensor, result: Tensor) -> None:
        scale, shift = self._shaped_factors(samples)
        rows = max(1, _CHUNK_BYTES // max(1, 4 * samples[:1].numel()))
        for start in range(0, len(samples), rows):
            part = result[start : start + rows]
            # Moving bytes and then making floats of them is faster than both at once.
            part.copy_(samples[start : start + rows].contiguous()).mul_(scale).add_(shift)

    def _compute_native(self, samples: Tensor, result: Tensor) -> None:
        # Three times as fast as the steps above, of which each costs a pass; the same bits.
        images, channels = samples.shape[:2]
        scale, shift = (np.broadcast_to(numbers, channels).copy() for numbers in self._factors(channels))
        pixels = samples.permute(0, 2, 3, 1).contiguous().numpy().reshape(images, -1, channels)
        _core.scaled_planes(pixels, scale, shift, result.numpy().reshape(images, channels, -1))

    def _shaped_factors(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        assert self._scale is not None
        shape: tuple[int, ...] = ()
        channels = 1
        if self._scale.ndim:
            is_last = not self._channels_first and layout_of(samples, "Normalize") == "HWC"
            channels, shape = samples.shape[-1 if is_last else 1], (-1,) if is_last else (-1, 1, 1)
        scale, shift = self._factors(channels)
        return torch.from_numpy(scale).view(shape), torch.from_numpy(shift).view(shape)

    def _factors(self, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        assert self._scale is not None
        if self._scale.ndim and len(self._scale) != channels:
            raise ConfigError(
                f"Normalize has numbers for {len(self._scale)} channels and was given images with {channels}. "
                "Give one mean and one deviation for each channel of the images."
            )
        return np.asarray(self._scale, np.float32), np.asarray(self._shift, np.float32)


class Rescale(Pointwise):
    """Turns pixels into float32 pixel * rescale + shift.

    Args:
        rescale: The factor, such as 1 / 255.
        shift: What is added.

    Raises:
        ConfigError: If one is not a number.
    """

    def __init__(self, rescale: float, shift: float = 0.0) -> None:
        if not all(isinstance(value, int | float) for value in (rescale, shift)):
            raise ConfigError(f"Rescale got ({rescale!r}, {shift!r}). Give two numbers, such as Rescale(1 / 255, 0).")
        self.rescale, self.shift = rescale, shift
        self._set(rescale, shift, channels_first=False)


class Normalize(Pointwise):
    """Turns pixels into float32 (pixel - mean) / std.

    Args:
        mean: Of each channel, in the unit the pixels have by then: 0 to 1 after `Rescale(1 / 255)` or `ToTensor`,
            else 0 to 255.
        std: Standard deviation of each channel, in the same unit.

    Raises:
        ConfigError: If the two are not 1, 3 or 4 numbers each, or one of `std` is not above 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = _per_channel("mean", mean), _per_channel("std", std)
        if len(self.mean) != len(self.std):
            raise ConfigError(f"Normalize got {len(self.mean)} means and {len(self.std)} deviations. Give as many.")
        if min(self.std) <= 0:
            raise ConfigError(f"Normalize got std={std!r}. Give deviations above 0.")
        scale = 1 / np.asarray(self.std)
        self._set(scale, -np.asarray(self.mean) * scale, channels_first=False)


class HWC2CHW(Pointwise):
    """Turns (height, width, channels) into (channels, height, width), the order of torch's layers."""

    def __init__(self) -> None:
        self._set(None, 0.0, channels_first=True)


class ToTensor(Pointwise):
    """Turns pixels of shape (height, width, channels), 0 to 255, into float32 (channels, height, width), 0 to 1."""

    def __init__(self) -> None:
        self._set(1 / 255, 0.0, channels_first=True)


def fuse(operations: Sequence[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
    """Return the operations with neighbours of this kind made one; results agree to a few parts in ten million."""
    chain: list[Callable[[Any], Any]] = []
    for operation in operations:
        before = chain[-1] if chain else None
        both = before.then(operation) if isinstance(before, Pointwise) and isinstance(operation, Pointwise) else None
        if both is None:
            chain.append(operation)
        else:
            chain[-1] = both
    return chain


def _channels_to_front(samples: Tensor) -> Tensor:
    if samples.ndim != 4 or samples.shape[3] not in CHANNELS:
        raise ConfigError(
            f"Asked to move the channels of a sample of shape {tuple(samples.shape[1:])} to the front; expected "
            "(height, width, channels) with 1, 3 or 4 channels. Leave HWC2CHW out if they are in front already."
        )
    return samples.permute(0, 3, 1, 2)


def _per_channel(name: str, values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in CHANNELS:
        raise ConfigError(
            f"Normalize got {name}={values!r}. Give one number for each channel, such as (0.5, 0.5, 0.5)."
        )
    return numbers

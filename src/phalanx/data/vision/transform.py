"""`Transform`: base class of image transforms, for one sample or a batch.

    op(sample)                   # by hand: its random numbers follow from torch's global generator
    op(sample, draws)            # draws: the numbers of this one sample
    op.batched(samples, draws)   # samples: a tensor (n, ...); draws: the numbers of the n samples

Both forms give the same bits for the same numbers. Any other callable may stand where a transform does; it is called
with one sample at a time (`data/vision/compose.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.data.sampling.row_rng import Draws
from phalanx.errors import ConfigError

CHANNELS = (1, 3, 4)
"""How many channels an image may have; distinguishes (height, width, channels) from (channels, height, width)."""


class Transform(ABC):
    """An operation on samples, one or many at a time."""

    @abstractmethod
    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """Return the transformed samples of a batch.

        Args:
            samples: Samples of one shape side by side, (n, ...); not modified.
            draws: Random numbers of the n samples. How many are taken may not depend on the samples.
        """

    def __call__(self, sample: Any, draws: Draws | None = None) -> Tensor:
        """Return one transformed sample.

        Args:
            sample: A tensor, NumPy array, Pillow image or number.
            draws: Random numbers of this sample; when omitted they follow from torch's global generator.
        """
        return self.batched(as_tensor(sample).unsqueeze(0), draws or Draws.from_torch(1))[0]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"


def as_tensor(sample: Any) -> Tensor:
    """Return a sample as a tensor; a Pillow image becomes (height, width, channels)."""
    if isinstance(sample, Tensor):
        return sample
    if isinstance(sample, int | float):
        return torch.tensor(sample)
    array = np.asarray(sample)
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory it could not write to
    is_grey_picture = array.ndim == 2 and not isinstance(sample, np.ndarray)
    return torch.from_numpy(array[..., None] if is_grey_picture else array)


def layout_of(images: Tensor, operation: str) -> Literal["HWC", "CHW"]:
    """Return the layout of a batch of images: channels last, or first.

    Args:
        images: Shape (n, height, width, channels) or (n, channels, height, width), with 1, 3 or 4 channels. Images
            that could be either are read as channels last.
        operation: Name of the operation, for the message.

    Raises:
        ConfigError: If they are neither.
    """
    if images.ndim == 4 and images.shape[3] in CHANNELS:
        return "HWC"
    if images.ndim == 4 and images.shape[1] in CHANNELS:
        return "CHW"
    raise ConfigError(
        f"{operation} works on images of (height, width, channels) or (channels, height, width) with 1, 3 or 4 "
        f"channels, found a sample of shape {tuple(images.shape[1:])}. Give a grey image its channel with image[..., "
        "None]."
    )

"""`RandomHorizontalFlip`."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.sizes import channels_as_before, channels_first, height_and_width, read_share
from phalanx.data.vision.transform import Transform


class RandomHorizontalFlip(Transform):
    """Mirrors images left to right, each with a given probability.

    Args:
        prob: The probability.

    Raises:
        ConfigError: If `prob` is no number from 0 to 1.
    """

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = read_share("prob", prob, "RandomHorizontalFlip")

    def batched(self, samples: Tensor, draws: Draws) -> Tensor:
        """See `Transform`."""
        is_last = height_and_width(samples, "RandomHorizontalFlip")[2]
        is_mirrored = (draws.uniform() < self.prob).numpy()
        # Samples are taken and put back by NumPy, which copies an image at once; torch has a fast mirror.
        array = samples.numpy().copy(order="K")
        mirrored = channels_first(torch.from_numpy(array[is_mirrored]), is_last).flip(-1)
        array[is_mirrored] = channels_as_before(mirrored, is_last).numpy()
        return torch.from_numpy(array)

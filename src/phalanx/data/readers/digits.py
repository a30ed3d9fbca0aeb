"""`DigitsDataset`: the handwritten digits of scikit-learn, 1,797 images of 8 x 8 pixels."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.pipeline.columns import Columns
from phalanx.data.pipeline.pipeline import PipelineMethods
from phalanx.data.sampling.shuffle import shuffled
from phalanx.errors import ConfigError

TEST_IMAGES = 360
MEAN, STD = 4.884, 6.017
"""Of all pixels of the set, whose values run from 0 to 16."""

_SPLIT_SEED = 8


class DigitsDataset(PipelineMethods, Dataset[tuple[Tensor, int]]):
    """Digits as normalised float32 images of shape (channels, size, size) with an int label, in a pipeline too.

    Args:
        train: The 1,437 training images, or the 360 test images; the split never changes.
        image_size: Side of the images; other than 8 they are scaled bilinearly.
        channels: 1, or 3 equal ones for models of colour images.

    Raises:
        ConfigError: If scikit-learn is not installed; says what to install.
    """

    class_dim = 10
    column_names = ("image", "label")

    def __init__(self, train: bool = True, *, image_size: int = 8, channels: int = 1) -> None:
        rows = _rows()
        images = torch.from_numpy(rows[:, :-1]).reshape(-1, 8, 8).float().sub_(MEAN).div_(STD).unsqueeze(1)
        labels = torch.from_numpy(rows[:, -1]).long()
        order = torch.from_numpy(shuffled(len(labels), _SPLIT_SEED, 0, len(labels)))
        selected = order[TEST_IMAGES:] if train else order[:TEST_IMAGES]
        if image_size != 8:
            images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", align_corners=False)
        self.images = images[selected].expand(-1, channels, -1, -1)
        self.labels = labels[selected]

    def read_columns(self, indices: NDArray[np.int64]) -> Columns:
        """Return the columns of samples; see `phalanx.data.pipeline.columns.Columnar`."""
        index = torch.from_numpy(indices)
        return {"image": self.images[index], "label": self.labels[index]}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def _rows() -> NDArray[np.float64]:
    """Return one row for each image: its pixels, and its class. The file is read without its package: 1 s to import.

    Raises:
        ConfigError: If the package is not installed.
    """
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            'The digits come with scikit-learn, which is not installed. Run: pip install "phalanx[examples]"'
        )
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",")

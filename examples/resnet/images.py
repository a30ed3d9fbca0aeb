"""Open the images that the ResNet example trains on."""

from dataclasses import dataclass

from torch.utils.data import Dataset

from phalanx.data.digits import DigitsDataset

SOURCES = ("digits",)


@dataclass(frozen=True)
class Images:
    """A training and a test set of images of one size."""

    train: Dataset
    test: Dataset
    class_dim: int
    size: int


def open_images(name: str, folder: str | None, class_dim: int | None) -> Images:
    """Return the images called `name`."""
    train, test = DigitsDataset(True, channels=3), DigitsDataset(False, channels=3)
    return Images(train, test, class_dim or 10, 8)

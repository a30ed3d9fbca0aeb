"""Open the images that the ResNet example trains on."""

from dataclasses import dataclass
from typing import Any

from phalanx.data import (
    Cifar10Dataset,
    DigitsDataset,
    FashionMnistDataset,
    FlowersDataset,
    MnistDataset,
    check_labels,
)

SOURCES = ("digits", "mnist", "fashion-mnist", "cifar10", "flowers")
FOLDERS = {
    "mnist": "data/mnist",
    "fashion-mnist": "/usr/share/datasets/fashion-mnist",  # where Debian's dataset-fashion-mnist puts it
    "cifar10": "data/cifar10",
    "flowers": "data/flowers",
}


@dataclass(frozen=True)
class Images:
    """A training and a test set of colour images of one size."""

    train: Any
    test: Any
    class_dim: int
    size: int


def open_images(name: str, folder: str | None, class_dim: int | None) -> Images:
    """Return the images called `name`, for a model of `class_dim` classes; default: those of the data."""
    folder = folder or FOLDERS.get(name, "")
    if name == "digits":
        train, test, size = DigitsDataset(True, channels=3), DigitsDataset(False, channels=3), 8
    elif name == "cifar10":
        train, test, size = Cifar10Dataset(folder), Cifar10Dataset(folder, train=False), 32
    elif name == "flowers":
        train, test, size = FlowersDataset(folder), FlowersDataset(folder, train=False), 224
    else:
        reader = MnistDataset if name == "mnist" else FashionMnistDataset
        train, test, size = reader(folder, channels=3), reader(folder, train=False, channels=3), 28
    class_dim = class_dim or train.class_dim
    for part in (train, test):
        check_labels(part, class_dim)
    return Images(train, test, class_dim, size)

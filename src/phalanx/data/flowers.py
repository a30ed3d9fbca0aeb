"""The 102 flower categories (M.-E. Nilsback, A. Zisserman, 2008), or any folder with one folder of images per class.

As published:    jpg/image_00001.jpg ...    imagelabels.mat (labels 1 to 102)    setid.mat (trnid, valid, tstid)
By class:        train/<class>/*.jpg    test/<class>/*.jpg    the classes in the order of their names
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.errors import ConfigError, DataError

CLASSES = 102
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue over ImageNet, as models of such images are commonly fed."""

_SUFFIXES = {".jpg", ".jpeg", ".png"}


class FlowersDataset(Dataset[tuple[Tensor, int]]):
    """Photographs as normalised float32 images of shape (3, size, size) with an int label from 0.

    The shorter side is scaled to 8/7 of `image_size`; a training image is cropped at random and mirrored half the
    time, a test image is cropped in its middle. Decoding takes milliseconds: load with `num_workers`.

    Args:
        folder: One of the two layouts above.
        train: The training images (`trnid`, `train/`) or the test images (`tstid`, `test/`).
        image_size: Side of the images handed out.
        class_dim: Number of classes; every label is checked here, before training.

    Raises:
        ConfigError: If Pillow or, for the `.mat` files, SciPy is missing; or the folder has neither layout.
        DataError: If a label is not a class, or an image is missing or broken; names the sample.
    """

    def __init__(
        self, folder: str | Path, train: bool = True, *, image_size: int = 224, class_dim: int = CLASSES
    ) -> None:
        _pillow()
        folder = Path(folder)
        if (folder / "imagelabels.mat").exists():
            self.paths, labels = _published(folder, train)
        else:
            self.paths, labels = _by_class(folder, train)
        for path, label in zip(self.paths, labels, strict=True):
            if not 0 <= label < class_dim:
                raise DataError(
                    f"{path}: its label is {label}, outside the {class_dim} classes (0 to {class_dim - 1}). "
                    "Correct the label, or build the dataset and the model with more classes."
                )
        self.labels = torch.tensor(labels)
        self.train, self.image_size, self.class_dim = train, image_size, class_dim

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = _decode(self.paths[index], self.image_size * 8 // 7)
        top, left = self._corner(*pixels.shape[:2])
        image = torch.from_numpy(pixels[top : top + self.image_size, left : left + self.image_size].copy())
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(1)
        normal = (image.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        return normal.permute(2, 0, 1).contiguous(), int(self.labels[index])

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        spare = (height - self.image_size, width - self.image_size)
        if not self.train:
            return spare[0] // 2, spare[1] // 2
        return int(torch.randint(spare[0] + 1, ())), int(torch.randint(spare[1] + 1, ()))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            'Photographs are decoded by Pillow, which is not installed. Run: pip install "phalanx[examples]"'
        ) from None
    return Image


def _decode(path: Path, side: int) -> NDArray[np.uint8]:
    """Return the image as (height, width, 3), its shorter side `side` pixels."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            # JPEG can be decoded at half or a quarter of its size at once.
            image.draft("RGB", (side, side))
            scale = side / min(image.size)
            size = [max(side, round(length * scale)) for length in image.size]
            return np.asarray(image.convert("RGB").resize(size, pillow.Resampling.BILINEAR))
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}). Replace or remove the file.") from None


def _published(folder: Path, train: bool) -> tuple[list[Path], list[int]]:
    ids = _matrix(folder / "setid.mat", "trnid" if train else "tstid")
    labels = _matrix(folder / "imagelabels.mat", "labels")
    outside = [i for i in ids if not 1 <= i <= len(labels)]
    if outside:
        raise DataError(
            f"{folder / 'setid.mat'}: names image {outside[0]}, but imagelabels.mat has labels for 1 to "
            f"{len(labels)}. Use both files of one download."
        )
    paths = [folder / "jpg" / f"image_{i:05d}.jpg" for i in ids]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise DataError(f"{missing[0]} is missing, with {len(missing) - 1} others. Unpack 102flowers.tgz there.")
    return paths, [labels[i - 1] - 1 for i in ids]


def _matrix(path: Path, name: str) -> list[int]:
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            'Files of type .mat are read by SciPy, which is not installed. Run: pip install "phalanx[examples]"'
        ) from None
    try:
        numbers: list[int] = loadmat(path)[name].reshape(-1).astype(np.int64).tolist()
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path}: holds no readable {name!r} ({error}). Download the file again.") from None
    return numbers


def _by_class(folder: Path, train: bool) -> tuple[list[Path], list[int]]:
    part = folder / ("train" if train else "test")
    classes = sorted(p for p in part.iterdir() if p.is_dir()) if part.is_dir() else []
    if not classes:
        raise ConfigError(
            f"Asked for images in {folder}, found neither imagelabels.mat nor {part.name}/<class>/ folders there. "
            "Give the folder of the 102 flowers (jpg/, imagelabels.mat, setid.mat), or one folder of images per class."
        )
    found = [(path, label) for label, one in enumerate(classes) for path in _images(one)]
    return [path for path, _ in found], [label for _, label in found]


def _images(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)

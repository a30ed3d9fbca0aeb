"""`FlowersDataset`: Oxford 102 Flowers (M.-E. Nilsback, A. Zisserman, 2008), or any folder of class folders.

As published:    jpg/image_00001.jpg ...    imagelabels.mat (labels 1 to 102)    setid.mat (trnid, valid, tstid)
By class:        train/<class>/*.jpg    test/<class>/*.jpg    the classes in the order of their names
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.readers.image_dataset import ImageDataset
from phalanx.data.readers.image_decode import decode_all, find_problems, require_pillow
from phalanx.data.samples.bad_records import BadRecords, OnCorrupt
from phalanx.data.vision.crop import CenterCrop, RandomCrop
from phalanx.data.vision.flip import RandomHorizontalFlip
from phalanx.data.vision.pointwise import Normalize, ToTensor
from phalanx.data.vision.transform import Transform
from phalanx.errors import ConfigError, DataError

CLASSES = 102
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue over ImageNet, as models of such images are commonly fed."""

_SUFFIXES = {".jpg", ".jpeg", ".png"}


class FlowersDataset(ImageDataset):
    """Photographs with labels from 0; see `ImageDataset` for the two ways to read them.

    In a pipeline an image is as large as in its file. In an indexed sample the shorter side is scaled to 8/7
    of `image_size`; a training image is cropped at random and mirrored half the time, a test image is cropped in its
    middle. Decoding takes milliseconds: the images of a batch are decoded by several threads, and `num_workers` of a
    loader adds processes.

    Args:
        folder: One of the two layouts above.
        train: The training images (`trnid`, `train/`) or the test images (`tstid`, `test/`).
        image_size: Side of the images of indexed samples.
        class_dim: Number of classes; every label is checked here, before training.
        threads: How many decode; as many as this process has cores when omitted, 1 in a worker process.
        num_shards: Load as one of this many ranks instead of this job's; with `shard_id`.
        shard_id: Which of them, from 0.
        on_corrupt: `stop` at an image that cannot be decoded, when it is met; or `skip` it. All images are read here
            then, before training, so that every rank leaves out the same ones; they are counted in `corrupt`.

    Raises:
        ConfigError: If Pillow or, for the `.mat` files, SciPy is missing; or the folder has neither layout.
        DataError: If a label is not a class, or an image is missing or broken; names the sample.
    """

    def __init__(
        self,
        folder: str | Path,
        train: bool = True,
        *,
        image_size: int = 224,
        class_dim: int = CLASSES,
        threads: int | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        require_pillow()
        folder = Path(folder)
        self.corrupt, self.threads, self.image_size = BadRecords(on_corrupt), threads, image_size
        if (folder / "imagelabels.mat").exists():
            paths, labels = _published(folder, train)
            names: Sequence[str] = [str(number + 1) for number in range(class_dim)]
        else:
            paths, labels, names = _by_class(folder, train)
        _check_labels(paths, labels, class_dim)
        good = _readable(paths, self.corrupt, threads) if on_corrupt == "skip" else range(len(paths))
        self.paths = [paths[i] for i in good]
        names = [*names, *map(str, range(len(names), class_dim))][:class_dim]
        self._describe(torch.tensor([labels[i] for i in good]), names, _usual(train, image_size), num_shards, shard_id)

    def read_images(self, indices: NDArray[np.int64], *, ready: bool) -> list[Tensor]:
        """See `ImageDataset`."""
        side = self.image_size * 8 // 7 if ready else None
        return decode_all([self.paths[index] for index in indices.tolist()], side, self.threads)


def _usual(train: bool, image_size: int) -> list[Transform]:
    crop = [RandomCrop(image_size), RandomHorizontalFlip()] if train else [CenterCrop(image_size)]
    return [*crop, ToTensor(), Normalize(MEAN, STD)]


def _check_labels(paths: list[Path], labels: list[int], class_dim: int) -> None:
    for path, label in zip(paths, labels, strict=True):
        if not 0 <= label < class_dim:
            raise DataError(
                f"{path}: its label is {label}, outside the {class_dim} classes (0 to {class_dim - 1}). "
                "Correct the label, or build the dataset and the model with more classes."
            )


def _readable(paths: list[Path], corrupt: BadRecords, threads: int | None) -> list[int]:
    """Return the numbers of the images that can be decoded."""
    good = []
    for number, problem in enumerate(find_problems(paths, threads)):
        if problem is None:
            good.append(number)
        else:
            corrupt.add(problem)
    if not good:
        raise DataError(f"None of the {len(paths)} images can be decoded; the first: {corrupt.first}.")
    return good


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


def _by_class(folder: Path, train: bool) -> tuple[list[Path], list[int], list[str]]:
    part = folder / ("train" if train else "test")
    classes = sorted(p for p in part.iterdir() if p.is_dir()) if part.is_dir() else []
    if not classes:
        raise ConfigError(
            f"Asked for images in {folder}, found neither imagelabels.mat nor {part.name}/<class>/ folders there. "
            "Give the folder of the 102 flowers (jpg/, imagelabels.mat, setid.mat), or one folder of images per class."
        )
    images = [(path, label) for label, folder in enumerate(classes) for path in _images(folder)]
    return [path for path, _ in images], [label for _, label in images], [folder.name for folder in classes]


def _images(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)

"""`ImageDataset`: base class of labelled image datasets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.pipeline.columns import Column, Columns
from phalanx.data.pipeline.pipeline import PipelineMethods
from phalanx.data.samples.bad_records import BadRecords
from phalanx.data.sampling.ranks import read_shard
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision.compose import Chain
from phalanx.data.vision.transform import Transform


class ImageDataset(PipelineMethods, Dataset[tuple[Tensor, int]]):
    """Images with labels.

    In a pipeline (`map`, `shuffle`, `batch`, `repeat`) it has two columns: `image`, bytes of (height, width, channels)
    as the file has them, and `label`, int64. Given to a loader as it is, or indexed, it yields samples ready for a
    model: the image as float32 (channels, height, width) after the reader's usual transforms, and the label as int.
    """

    column_names = ("image", "label")

    labels: Tensor
    """The label of every image, int64 of shape (images,)."""

    class_names: tuple[str, ...]
    """What the labels mean, by label."""

    corrupt: BadRecords
    """The records that were left out."""

    usual: Chain
    """The transforms of the samples that are indexed."""

    def _describe(
        self,
        labels: Tensor,
        class_names: Sequence[str],
        usual: Sequence[Transform],
        num_shards: int | None,
        shard_id: int | None,
    ) -> None:
        self.labels, self.class_names, self.usual = labels, tuple(class_names), Chain(usual)
        self.shard = read_shard(num_shards, shard_id)

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def class_dim(self) -> int:
        """The same."""
        return len(self.class_names)

    @abstractmethod
    def read_images(self, indices: NDArray[np.int64], *, ready: bool) -> Column:
        """Return images as bytes of (height, width, channels): a tensor where they have one shape, else a list.

        Args:
            indices: Of which images, shape (n,).
            ready: Whether they go through the usual transforms next, and may be decoded at the size these need.
        """

    def read_columns(self, indices: NDArray[np.int64]) -> Columns:
        """Return the columns of samples; see `phalanx.data.pipeline.columns.Columnar`."""
        return {"image": self.read_images(indices, ready=False), "label": self.labels[torch.from_numpy(indices)]}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several samples at once, which is faster than one by one."""
        array = np.asarray(indices, np.int64)
        images = self.usual.batched(self.read_images(array, ready=True), Draws.from_torch(len(array)))
        return list(zip(images, self.labels[torch.from_numpy(array)].tolist(), strict=True))

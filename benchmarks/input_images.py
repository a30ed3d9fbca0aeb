"""CIFAR-10's shape in two hands: our pipeline over a batch, and transforms of torch on one sample at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from phalanx.data import Cifar10Dataset, ShardedLoader, vision
from phalanx.data.readers.cifar import MEAN, RECORD_BYTES, STD, TRAIN_FILES

BATCH = 32
_MEAN, _STD = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)


def write_cifar(folder: Path, records: int) -> None:
    """Write five files of CIFAR-10's format with random pixels, `records` in all."""
    table = np.random.default_rng(0).integers(0, 256, (records, RECORD_BYTES), np.uint8)
    table[:, 0] %= 10
    for name, part in zip(TRAIN_FILES, np.array_split(table, len(TRAIN_FILES)), strict=True):
        (folder / name).write_bytes(part.tobytes())


def transforms(side: int) -> list[vision.Transform]:
    """Return the training transforms of CIFAR-10, scaled to `side` pixels in between unless that is 32."""
    scale = [] if side == 32 else [vision.Resize((side, side))]
    return [
        vision.RandomCrop(32, 4),
        vision.RandomHorizontalFlip(),
        *scale,
        vision.ToTensor(),
        vision.Normalize(MEAN, STD),
    ]


def transform_one(image: Tensor, side: int) -> Tensor:
    """Do the same to one image, uint8 of (height, width, channels), the way libraries of transforms do."""
    image = F.pad(image.permute(2, 0, 1), (4, 4, 4, 4))
    top, left = random.randint(0, 8), random.randint(0, 8)
    image = image[:, top : top + 32, left : left + 32]
    if random.random() < 0.5:
        image = image.flip(-1)
    if side != 32:
        image = F.interpolate(image.unsqueeze(0), (side, side), mode="bilinear", antialias=True).squeeze(0)
    return image.to(torch.float32).div_(255).sub_(_MEAN).div_(_STD).contiguous()


class OneByOne(Dataset[Any]):
    """The images in memory, transformed when they are asked for."""

    def __init__(self, folder: Path, side: int) -> None:
        tables = [np.fromfile(folder / name, np.uint8).reshape(-1, RECORD_BYTES) for name in TRAIN_FILES]
        table = np.concatenate(tables)
        pixels = table[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self.images, self.labels, self.side = torch.from_numpy(pixels.copy()), table[:, 0].tolist(), side

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return transform_one(self.images[index], self.side), self.labels[index]


def ours(folder: Path, side: int, num_workers: int) -> ShardedLoader:
    """Return our loader of half of the images."""
    dataset = Cifar10Dataset(folder).map(transforms(side), "image").batch(BATCH)
    return ShardedLoader(dataset, shuffle=True, num_workers=num_workers, shard=(0, 2))


def peer(folder: Path, side: int, num_workers: int) -> DataLoader[Any]:
    """Return torch's loader of half of the images."""
    dataset = OneByOne(folder, side)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=num_workers)

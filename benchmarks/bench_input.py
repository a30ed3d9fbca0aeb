"""Rows/s of `ShardedLoader` against torch's DataLoader with a DistributedSampler, as rank 0 of 2 sees them.

tensors   a TensorDataset of MNIST's shape; batches of 64 rows a rank
samples   a Dataset that hands out one real digit at a time
workers   the same with two worker processes
images    a pipeline over CIFAR-10's files with crop, flip and normalisation; batches of 32 rows a rank
large     the same, scaled to 224 pixels
large_workers   the same with two worker processes
crops     no loader: the transforms of `images` on batches, against the same on one image at a time
scaled    the transforms of `large` likewise
resume    seconds until the first batch when a run continues in the middle of an epoch of 1,000,000 rows
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks import input_images
from benchmarks.report import Row, arguments, measure_pairs, show
from phalanx.data import ShardedLoader, vision
from phalanx.data.readers.digits import DigitsDataset
from phalanx.data.sampling.row_rng import Draws

LOADED = {"images": (32, 0), "large": (224, 0), "large_workers": (224, 2)}
"""Side of the images, worker processes."""

TRANSFORMED = {"crops": 32, "scaled": 224}
CASES = ("tensors", "samples", "workers", *LOADED, *TRANSFORMED, "resume")
BATCH = 64
PEER = "torch DataLoader + DistributedSampler"
ONE_BY_ONE = "the same transforms with torch, one image at a time"


class OneByOne(Dataset[Any]):
    """The digits, several times over, without a way to fetch more than one."""

    def __init__(self, times: int) -> None:
        self.digits, self.times = DigitsDataset(), times

    def __len__(self) -> int:
        return len(self.digits) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.digits[index % len(self.digits)]


def ours(dataset: Dataset[Any], num_workers: int) -> ShardedLoader:
    """Return our loader of half of the rows."""
    return ShardedLoader(dataset, batch_size=BATCH, num_workers=num_workers, shard=(0, 2))


def peer(dataset: Dataset[Any], num_workers: int) -> DataLoader[Any]:
    """Return torch's loader of half of the rows."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=num_workers)


def rows_per_s(loader: Iterable[Any]) -> float:
    """Read one epoch and return its rows per second, the start of the workers included."""
    started, rows = time.perf_counter(), 0
    for _, label in loader:
        rows += len(label)
    return rows / (time.perf_counter() - started)


def seconds_to_resume_ours(dataset: Dataset[Any]) -> float:
    """Return the seconds from the saved position to the first batch after it."""
    loader = ours(dataset, 0)
    loader.load_state_dict({"version": 1, "epoch": 3, "position": len(dataset) // 2, "seed": 0})  # type: ignore[arg-type]
    started = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - started


def seconds_to_resume_peer(dataset: Dataset[Any]) -> float:
    """Return the same for torch's loader, which is read up to the position."""
    loader = peer(dataset, 0)
    loader.sampler.set_epoch(3)  # type: ignore[attr-defined]
    started = time.perf_counter()
    next(itertools.islice(loader, len(loader) // 2, None))
    return time.perf_counter() - started


def images_per_s_ours(images: torch.Tensor, side: int) -> float:
    """Return the images per second that our transforms take on batches."""
    chain = vision.Chain(input_images.transforms(side))
    started = time.perf_counter()
    for first, batch in enumerate(images.split(input_images.BATCH)):
        chain.batched(batch, Draws.of_rows(0, first, range(len(batch))))
    return len(images) / (time.perf_counter() - started)


def images_per_s_peer(images: torch.Tensor, side: int) -> float:
    """Return the images per second of transforms on one image at a time, stacked to the same batches."""
    started = time.perf_counter()
    for batch in images.split(input_images.BATCH):
        torch.stack([input_images.transform_one(image, side) for image in batch])
    return len(images) / (time.perf_counter() - started)


def measure_images(case: str, pairs: int, *, quick: bool) -> Row:
    """Measure transforms, with and without a loader around them."""
    with tempfile.TemporaryDirectory() as folder:
        input_images.write_cifar(Path(folder), 200 if quick else 4_000)
        if case in LOADED:
            side, workers = LOADED[case]
            loaders = [make(Path(folder), side, workers) for make in (input_images.ours, input_images.peer)]
            return _row(case, lambda: rows_per_s(loaders[0]), lambda: rows_per_s(loaders[1]), pairs, "rows/s")
        side, images = TRANSFORMED[case], input_images.OneByOne(Path(folder), 32).images
        sides = lambda: images_per_s_ours(images, side), lambda: images_per_s_peer(images, side)
        return _row(case, *sides, pairs, "images/s", ONE_BY_ONE)


def measure(case: str, *, quick: bool) -> Row:
    """Measure one case on both sides in turn."""
    pairs = 1 if quick else 9
    if case in LOADED or case in TRANSFORMED:
        return measure_images(case, pairs, quick=quick)
    if case == "resume":
        rows = torch.arange(10_000 if quick else 1_000_000)
        many = TensorDataset(rows, rows)
        return _row(case, lambda: seconds_to_resume_ours(many), lambda: seconds_to_resume_peer(many), pairs, "s")
    workers = 2 if case == "workers" else 0
    dataset: Dataset[Any] = OneByOne(1 if quick else 10)
    if case == "tensors":
        rows = torch.zeros(1_000 if quick else 60_000, dtype=torch.long)
        dataset = TensorDataset(torch.zeros(len(rows), 1, 28, 28), rows)
    # Made once, as a script makes them; each reading is one more epoch.
    loaders = ours(dataset, workers), peer(dataset, workers)
    return _row(case, lambda: rows_per_s(loaders[0]), lambda: rows_per_s(loaders[1]), pairs, "rows/s")


def _row(
    case: str, ours: Callable[[], float], peer: Callable[[], float], pairs: int, unit: str, name: str = PEER
) -> Row:
    better, against = "lower" if unit == "s" else "higher", "torch DataLoader" if name == PEER else "one by one"
    return measure_pairs(f"{case} {against}", ours, peer, pairs=pairs, unit=unit, better=better, peer_name=name)


def main() -> None:
    """Run the cases asked for."""
    asked = arguments(CASES)
    torch.set_num_threads(1)
    show("bench_input", [measure(case, quick=asked.quick) for case in asked.cases], as_json=asked.json)


if __name__ == "__main__":
    main()

"""`Chain`: compose transforms, applied to whole batches where possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.local.random_state import seed_all
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.sampling.seeding import seeded
from phalanx.data.vision.pointwise import fuse
from phalanx.data.vision.transform import Transform, as_tensor
from phalanx.errors import ConfigError

Operation = Callable[[Any], Any]


class Chain:
    """Operations in order: transforms, and any other callables on one sample.

    Samples of one shape go through a transform side by side. Others, and callables that are no transforms, go one by
    one; torch's, NumPy's and Python's generators are started from the row's own numbers before such calls, so what
    it draws does not depend on ranks, workers or batches either.

    Args:
        operations: One operation or a list of them.

    Raises:
        ConfigError: If one is not callable.
    """

    def __init__(self, operations: Operation | Sequence[Operation]) -> None:
        listed = list(operations) if isinstance(operations, Sequence) else [operations]
        for operation in listed:
            is_class = isinstance(operation, type) and issubclass(operation, Transform)
            if is_class or not callable(operation):
                raise ConfigError(
                    f"Asked to map {operation!r}, which is not an operation. Give a transform such as "
                    "vision.HWC2CHW(), with its brackets, or a function of one sample."
                )
        self.operations = fuse(listed)

    def __call__(self, sample: Any, draws: Draws | None = None) -> Any:
        """Return one sample after all operations."""
        return self.batched([sample], draws or Draws.from_torch(1))[0]

    def batched(self, samples: Tensor | Sequence[Any], draws: Draws) -> Tensor | list[Any]:
        """Return the samples after all operations: a tensor (n, ...) where they have one shape at the end, else a list.

        Args:
            samples: A tensor (n, ...), or n samples of any kind.
            draws: Random numbers of the n samples.
        """
        for is_transform, run in itertools.groupby(self.operations, lambda operation: isinstance(operation, Transform)):
            if not is_transform:
                samples = _call_each(list(run), samples, draws)
                continue
            for operation in run:
                assert isinstance(operation, Transform)
                samples = _apply_transform(operation, samples, draws)
        return _side_by_side(samples)


def _apply_transform(operation: Transform, samples: Tensor | Sequence[Any], draws: Draws) -> Tensor | list[Any]:
    if not isinstance(samples, Tensor):
        samples = _side_by_side([as_tensor(sample) for sample in samples])
    return operation.batched(samples, draws) if isinstance(samples, Tensor) else _one_by_one(operation, samples, draws)


def _side_by_side(samples: Tensor | Sequence[Any]) -> Tensor | list[Any]:
    if isinstance(samples, Tensor):
        return samples
    kinds = {(sample.shape, sample.dtype) if isinstance(sample, Tensor) else None for sample in samples}
    return torch.stack(list(samples)) if len(kinds) == 1 and None not in kinds else list(samples)


def _one_by_one(operation: Transform, tensors: list[Tensor], draws: Draws) -> list[Tensor]:
    rows = [draws.row(i) for i in range(len(tensors))]
    results = [operation(tensor, row) for tensor, row in zip(tensors, rows, strict=True)]
    draws.skip_like(rows[0])
    return results


def _call_each(operations: list[Operation], samples: Tensor | Sequence[Any], draws: Draws) -> list[Any]:
    """Return the samples after operations that are no transforms; each sample is seeded once for all of them."""
    results, seeds = [], draws.words().tolist()
    with seeded(seeds[0]):
        for sample, seed in zip(samples, seeds, strict=True):
            seed_all(seed)
            for operation in operations:
                sample = operation(sample)
            results.append(sample)
    return results

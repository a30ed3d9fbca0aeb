"""`Streams`: random number streams of a pipeline: one per micro-batch and stage, so dropout matches one process.

Ranks of a pipeline share one random stream, and take one number of it for a step. From that each stage seeds a stream
for every micro-batch. Which rank holds a stage, and in what order a schedule runs, then makes no difference: one
process that runs the micro-batches in turn, and seeds before each stage, drops the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx import accelerator
from phalanx.data.sampling.hash64 import GOLDEN, WORD, mix_one
from phalanx.data.sampling.seeding import seeded


class Streams:
    """The streams of one rank's stages.

    Args:
        stages: Number of stages of the model.
        device: Whose random numbers are seeded, beside those of the CPU.
    """

    def __init__(self, stages: int, device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._base: int | None = None
        self._turns: Counter[int] = Counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step: all ranks of a pipeline take a number of their stream."""
        self._base = draw_base()
        self._turns.clear()
        try:
            yield
        finally:
            self._base = None

    @contextmanager
    def of_next(self, stage: int) -> Iterator[None]:
        """Run a stage on its next micro-batch, or the loss, which counts as the stage behind the last.

        Outside a step the random numbers are this rank's.
        """
        if self._base is None:
            yield
            return
        number = self._turns[stage]
        self._turns[stage] += 1
        seed = seed_of(self._base, number * (self._stages + 1) + stage)
        has_own = accelerator.is_accelerator(self._device)
        with seeded(seed), accelerator.fork_random_numbers(self._device, enabled=has_own):
            accelerator.seed_device(self._device, seed)
            yield


def draw_base() -> int:
    """Return what the streams of a step are made of, from torch's default generator."""
    return int(torch.randint(2**62, ()))


def seed_of(base: int, index: int) -> int:
    """Return the seed of one place of a step: `index` is micro-batch x (stages + 1) + stage, of the loss the last."""
    return mix_one((base + GOLDEN * (index + 1)) & WORD)

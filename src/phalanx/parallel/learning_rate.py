"""Scale the learning rate with the global batch, and warm it up (Goyal et al., arXiv:1706.02677, section 2.2).

The user's own scheduler is left alone: the factor is applied around each optimizer step and taken off again, so
`param_group["lr"]` always shows the user's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from phalanx.errors import StrategyError
from phalanx.parallel.step_hooks import hook_steps
from phalanx.strategy import DistributedStrategy

WARMUP_EPOCHS = 5
WARMUP_STEPS_WITHOUT_LOADER = 500


@dataclass(frozen=True, slots=True)
class LearningRateFactor:
    """Multiplier of the user's learning rate at each optimizer step."""

    scale: float
    """Multiplier once warm."""

    warmup_steps: int

    def at(self, step: int) -> float:
        """Return the multiplier of step `step`, counted from 0.

        A scaled rate rises from 1 to `scale`; an unscaled one from 1/`warmup_steps` to 1.
        """
        if step >= self.warmup_steps:
            return self.scale
        done = (step + 1) / self.warmup_steps
        return done if self.scale == 1.0 else 1.0 + (self.scale - 1.0) * done


def factor_for(
    strategy: DistributedStrategy, world_size: int, global_batch: int | None, steps_per_epoch: int | None
) -> LearningRateFactor | None:
    """Return the factor a strategy asks for, or None when the rate stays as it is.

    Args:
        strategy: The settings.
        world_size: Number of ranks.
        global_batch: Rows of a global batch, if the loader is known.
        steps_per_epoch: Steps of one epoch, if the loader is known.

    Raises:
        StrategyError: If the rate is to grow with a global batch that is not known.
    """
    scale = 1.0
    if strategy.scale_lr != "none":
        base = strategy.base_batch
        if base and not global_batch:
            raise StrategyError(
                f"strategy.base_batch = {base} asks for a learning rate that grows with the global batch, which is not "
                "known here. Hand the data to phalanx.distribute, or leave base_batch out: the rate then grows with "
                "the number of ranks."
            )
        grown = global_batch / base if base and global_batch else float(world_size)
        scale = grown if strategy.scale_lr == "linear" else math.sqrt(grown)
    warmup = strategy.warmup_steps
    if warmup is None:
        long_enough = steps_per_epoch * WARMUP_EPOCHS if steps_per_epoch else WARMUP_STEPS_WITHOUT_LOADER
        warmup = long_enough if scale > 1.0 else 0
    return None if scale == 1.0 and warmup == 0 else LearningRateFactor(scale, warmup)


def apply_factor(optimizer: Optimizer, factor: LearningRateFactor) -> None:
    """Multiply the learning rate during every `optimizer.step()` by the factor of that step.

    Args:
        optimizer: The optimizer; its `param_groups` show the user's own rates again after each step.
        factor: The multiplier of each step.
    """
    step = 0
    own: list[Any] = []

    def multiply(optimizer: Optimizer) -> None:
        own[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor.at(step)

    def restore(optimizer: Optimizer) -> None:
        nonlocal step
        step += 1
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr

    hook_steps(optimizer, before=multiply, after=restore)

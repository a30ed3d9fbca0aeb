"""`apply_factor`: learning rate scaled with the global batch, and warm-up (Goyal et al., arXiv:1706.02677, 2.2).

The user's own scheduler is left alone: the factor is applied around each optimizer step and taken off again, so
`param_group["lr"]` always shows the user's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from phalanx.errors import StrategyError
from phalanx.parallel.session import StepPhase
from phalanx.parallel.stateful import keep_state
from phalanx.parallel.step.hooks import add_action
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


class _Warmup:
    """Multiplies the learning rate around every step by the factor of that step."""

    def __init__(self, factor: LearningRateFactor) -> None:
        self._factor = factor
        self._raised: list[tuple[dict[str, Any], Any, Any]] = []
        """Groups, with the rate that is the user's and the one in its place."""

        self.step = 0

    def multiply(self, optimizer: Optimizer) -> None:
        """Apply the factor of the step that begins."""
        self._take_off()  # the step before may have been interrupted
        for group in optimizer.param_groups:
            own, group["lr"] = group["lr"], group["lr"] * self._factor.at(self.step)
            self._raised.append((group, own, group["lr"]))

    def restore(self, _optimizer: Optimizer) -> None:
        """Take the factor off again, and count the step."""
        self.step += 1
        self._take_off()

    def _take_off(self) -> None:
        for group, own, raised in self._raised:
            if group["lr"] is raised:  # else a script has set another since
                group["lr"] = own
        self._raised.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were made."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after as many steps."""
        self.step = state["step"]


def apply_factor(optimizer: Optimizer, factor: LearningRateFactor) -> None:
    """Multiply the learning rate during every `optimizer.step()` by the factor of that step.

    Args:
        optimizer: The optimizer; its `param_groups` show the user's own rates again after each step.
        factor: The multiplier of each step.
    """
    warmup = _Warmup(factor)
    add_action(optimizer, StepPhase.SCALE_LEARNING_RATE, warmup.multiply)
    add_action(optimizer, StepPhase.RESTORE_LEARNING_RATE, warmup.restore)
    keep_state(optimizer, "learning_rate", warmup, elsewhere="first")

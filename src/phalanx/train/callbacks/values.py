"""The numbers of a run at one moment, for whoever writes or shows them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.train.callbacks.measure import Speed

if TYPE_CHECKING:  # a run has callbacks
    from phalanx.train.callbacks.run import Run


def learning_rates(run: Run) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def values_of(run: Run, speed: Speed) -> dict[str, float | int]:
    """Return epoch, step (from 0), samples, loss over all ranks, learning rate, and samples/s of all ranks.

    Collective: the loss is averaged over the ranks.
    """
    rates = learning_rates(run)
    named = {"lr": rates[0]} if len(rates) == 1 else {f"lr/{number}": rate for number, rate in enumerate(rates)}
    return {
        "epoch": run.epoch,
        "step": run.step - 1,
        "samples": run.samples,
        "loss": math.nan if run.loss is None else run.global_loss(),
        **named,
        "samples_per_s": round(speed.rate(run), 1),
    }

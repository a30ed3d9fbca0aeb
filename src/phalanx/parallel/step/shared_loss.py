"""Optimizers that decide by the loss, as LBFGS does, get that of all ranks' rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.comm.batches import row_weight_of
from phalanx.comm.collectives import all_reduce
from phalanx.parallel.data.sample_weights import times
from phalanx.parallel.session import list_applied
from phalanx.parallel.step.gate import wrap_closures


def share_losses(optimizer: Optimizer) -> None:
    """Let the closures of an optimizer's steps return the loss of the global batch; each call is collective then.

    Ranks take the same number of steps along the same line only if they see the same loss.
    """
    wrap_closures(optimizer, _of_all_rows)


def _of_all_rows(closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> torch.Tensor:
        loss = torch.as_tensor(closure()).detach()
        context = context_of.current()
        readers = context.readers
        is_sum = _is_summed()
        weight = row_weight_of(context.passes.of_update(), readers.count, is_sum=is_sum)
        summed = all_reduce(times(loss, weight), "sum", group=readers.group)  # what does not count may be undefined
        return summed if is_sum else summed / readers.count

    return evaluate


def _is_summed() -> bool:
    rules = [rule for made in list_applied() for rule in made.plan.params]
    return any(getattr(rule.update, "reduce", "mean") == "sum" for rule in rules)

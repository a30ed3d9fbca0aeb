"""`share_losses`: average the closure loss over ranks for optimizers that use it, such as LBFGS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.comm.batch.share import row_weight_of
from phalanx.comm.collectives import all_reduce
from phalanx.parallel.data.sample_weights import times
from phalanx.parallel.session import OptimizerRecord, applied_to, optimizer_record
from phalanx.parallel.step.gate import wrap_closures
from phalanx.plan.mesh import is_sum_of_ranks


def share_losses(optimizer: Optimizer) -> None:
    """Let the closures of an optimizer's steps return the loss of the global batch; each call is collective then.

    Ranks take the same number of steps along the same line only if they see the same loss.
    """
    wrap_closures(optimizer, partial(_over_all_samples, optimizer_record(optimizer)))


def _over_all_samples(record: OptimizerRecord, closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> torch.Tensor:
        loss = torch.as_tensor(closure()).detach()
        context = context_of.current()
        readers = context.readers
        trained = [applied for model in record.models if (applied := applied_to(model)) is not None]
        is_sum = any(is_sum_of_ranks(applied.plan) for applied in trained)
        weight = row_weight_of(context.passes.of_update(), readers.count, is_sum=is_sum)
        summed = all_reduce(times(loss, weight), "sum", group=readers.group)  # what does not count may be undefined
        return summed if is_sum else summed / readers.count

    return evaluate

"""`check_runs_in_parts`: whether a model's code runs where several ranks share the sequence of its blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from phalanx.auto.capture.fake_copy import copy_parts
from phalanx.auto.capture.sequence_blocks import SequenceBlocks
from phalanx.auto.shape_check import find_failure, on_meta
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import PlanError
from phalanx.plan.styles import ContextAttention


def check_runs_in_parts(
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None,
    blocks: SequenceBlocks,
    ranks: int,
    *,
    rows: Collection[int] = (),
    way: ContextAttention = "all_gather",
) -> str | None:
    """Return why a model fails if so many ranks share the sequence of its blocks; None if it runs.

    What style `context` refuses in a first step is refused here: modules that count their tokens from 0, make their own
    masks of them or take the beginning of a table.

    Args:
        model: The whole model; not changed.
        sample: As `capture` takes it.
        loss_fn: As `capture` takes it.
        blocks: Of the model.
        ranks: How many, which divide its tokens.
        rows: Numbers of samples that ranks have.
        way: How keys and values would reach other ranks.
    """
    from phalanx.parallel.tensor.context.trial import share_on_shapes  # what trains, which few searches need

    narrow, batch, loss = copy_parts((model, sample, loss_fn), on_meta)
    try:
        share_on_shapes(narrow, blocks.path, ranks, rows, way)
    except PlanError as error:
        return str(error)
    failure = find_failure(narrow, batch, loss)
    return None if failure is None else str(failure).partition("\n")[0] or type(failure).__name__

"""Weight the gradients of a rank by the rows of its batch, so that uneven batches stay exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.comm.context import Context, Readers


def weigher(context: Context, readers: Readers, gain: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return a hook that weights a gradient by this rank's part of the rows; even parts weigh 1.

    Apply it before gradients accumulate, so that batches of different sizes can be added up.

    Args:
        context: Tells the rows of the current batch.
        readers: Tells how many ranks read other rows.
        gain: A further factor.
    """

    def weigh(gradient: Tensor) -> Tensor:
        factor = gain * row_weight(context, readers)
        if factor == 1.0:
            return gradient
        return gradient * factor if factor else torch.zeros_like(gradient)

    return weigh


def row_weight(context: Context, readers: Readers) -> float:
    """Return the weight of this rank's rows: 1 for an even part, 0 for a batch that does not count."""
    share = context.batch
    return 1.0 if share is None else share.weight * readers.count

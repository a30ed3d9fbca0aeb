"""`Batch`: split a batch into micro-batches, and merge their losses and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError
from phalanx.parallel.pipeline.stage_io import unpack


class Batch:
    """A batch cut into micro-batches of equal size.

    Args:
        inputs: Arguments of the model for each micro-batch.
        targets: What the loss compares with, for each.
        loss_fn: The mean over the rows it is given.
        weight: Of each micro-batch's loss in that of the job.
        keeps_outputs: Whether outputs are wanted after the step (`full_output`), and stay until then.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[Any, ...]],
        targets: Sequence[Any],
        loss_fn: LossFunction,
        weight: float,
        *,
        keeps_outputs: bool,
    ) -> None:
        self.inputs = inputs
        self._targets = targets
        self._loss_fn = loss_fn
        self._weight = weight
        self._keeps_outputs = keeps_outputs
        self.losses: list[Tensor] = []
        self._outputs: list[tuple[Tensor, ...]] = []

    def shapes(self) -> str:
        """Return what stages must know of a micro-batch to run it, as text: shapes, dtypes and values between them."""
        leaves, structure = tree_flatten(self.inputs[0])
        leaf_shapes = [(tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in leaves]
        return f"{len(self.inputs)} x {structure} {leaf_shapes}"

    def loss(self, form: Any, tensors: tuple[Tensor, ...], number: int) -> Tensor:
        """Return the weighted loss of one micro-batch."""
        loss = self._loss_fn(unpack(form, tensors), self._targets[number])
        self.losses.append(loss.detach())
        if self._keeps_outputs:
            self._outputs.append(tuple(tensor.detach() for tensor in tensors))
        return loss * self._weight

    def full_output(self, form: Any) -> Any:
        """Return the output of the whole batch; what has no rows is averaged."""
        parts = zip(*self._outputs, strict=True)
        return unpack(form, [torch.cat(part) if part[0].dim() else torch.stack(part).mean() for part in parts])


def batch_size(inputs: Any, target: Any) -> int:
    """Return the rows of a batch.

    Raises:
        ConfigError: If its tensors do not have the same rows along dim 0, or none.
    """
    sizes = {tuple(x.shape[:1]) for x in tree_flatten((inputs, target))[0] if isinstance(x, Tensor)}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ConfigError(
            f"a pipeline cuts batches by rows, along dim 0 of inputs and targets; found sizes {sorted(sizes)}. Give "
            "all tensors of a batch the same rows, at least one."
        )
    ((rows,),) = sizes
    return rows


def split(values: Any, rows: int, count: int) -> list[Any]:
    """Return `count` equal parts of values whose tensors have rows along dim 0."""
    size = rows // count
    return [tree_map_only(Tensor, itemgetter(slice(at, at + size)), values) for at in range(0, rows, size)]

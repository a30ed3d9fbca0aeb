"""What a `Model` makes of a batch and of a loss function: inputs and target, and one number."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ConfigError

TARGETS = ("label", "labels", "target", "targets", "y")
"""Columns that are the target of a batch by column, wherever they stand."""

LossFunction = Callable[[Any, Any], Tensor]

_TAKES_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)

_TAKES_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_NUMBERS_BY_FUNCTION = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)


def inputs_and_target(batch: Any, *, has_target: bool = True) -> tuple[tuple[Any, ...], Any]:
    """Return a batch as the net's inputs and the loss's target.

    The target is the last column; in a dictionary the one named `label`, `labels`, `target`, `targets` or `y`, where
    there is exactly one of these. The others are inputs, in their order.

    Args:
        batch: A tuple, list or dictionary of columns, or a tensor.
        has_target: Whether one of the columns is the target; else all are inputs, and the target is None.

    Raises:
        ConfigError: If there are too few columns.
    """
    if not has_target:
        return tuple(columns_of(batch).values()), None
    columns = columns_of(batch)
    if len(columns) < 2:
        found = f"a {type(batch).__name__} of {len(columns)} column{'s' * (len(columns) != 1)}"
        raise ConfigError(
            f"Model takes batches (input, ..., target), found {found}. Let the data yield the target too, or leave "
            "loss_fn out if the net returns its own loss."
        )
    named = [name for name in columns if name in TARGETS]
    target = named[0] if len(named) == 1 else list(columns)[-1]
    return tuple(value for name, value in columns.items() if name != target), columns[target]


def inputs_of(batch: Any, net: nn.Module) -> tuple[Any, ...]:
    """Return the net's inputs of a batch that may hold a target too: all columns if it takes as many, else the others.

    Raises:
        ConfigError: If the net takes neither.
    """
    takes, every = inspect.signature(net.forward), tuple(columns_of(batch).values())
    others = inputs_and_target(batch)[0] if len(every) > 1 else every
    if not _binds(takes, len(others)) and _binds(takes, len(every)):
        return every
    check_call(net, others, has_target=len(every) > 1)
    return others


def columns_of(batch: Any, names: Sequence[str] | None = None) -> dict[Any, Any]:
    """Return the columns of a batch by name, or by number where neither the batch nor `names` say one."""
    if isinstance(batch, dict):
        return batch
    columns = batch if isinstance(batch, tuple | list) else (batch,)
    return dict(zip(names if names and len(names) == len(columns) else range(len(columns)), columns, strict=True))


_SPEAKS_OF_TYPES = re.compile("same d?type|should be the same|expected scalar type|same datatype|[Ff]ound dtype")
"""Torch's words about operands whose element types do not go together."""


@contextlib.contextmanager
def types_explained(net: nn.Module, columns: Mapping[Any, Any]) -> Iterator[None]:
    """Let torch's error about element types say which column of a batch has another than the net.

    Args:
        net: Called in the block.
        columns: The batch it is called with, by name or number.

    Raises:
        ConfigError: Instead of torch's error, if there is such a column; says what to do.
    """
    try:
        yield
    except RuntimeError as error:
        own = {param.dtype for param in net.parameters() if param.is_floating_point()}
        others = {name: part.dtype for name, part in columns.items() if isinstance(part, Tensor)}
        # Whole numbers beside a float64 column are labels or indices, as a rule.
        found = {name: dtype for name, dtype in others.items() if dtype not in own}
        found = {name: dtype for name, dtype in found.items() if dtype.is_floating_point} or found
        if len(own) != 1 or not found or not _SPEAKS_OF_TYPES.search(str(error)):
            raise
        wanted, (name, dtype) = _short(own.pop()), next(iter(found.items()))
        said = name if isinstance(name, str) else f"column{name}"  # as pipelines call it
        raise ConfigError(
            f"column {name!r} of the batch is {_short(dtype)} and {type(net).__name__} computes in {wanted}, which "
            f"torch does not mix. Convert it where the data is made, array.astype({wanted!r}) or "
            f"tensor.to(torch.{wanted}), or in a pipeline: .map(vision.TypeCast({wanted!r}), {said!r})."
        ) from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_call(net: nn.Module, inputs: tuple[Any, ...], *, has_target: bool) -> None:
    """Raise unless the net can be called with this many inputs.

    Raises:
        ConfigError: If it cannot; says what it takes and what the batch has.
    """
    takes = inspect.signature(net.forward)
    if _binds(takes, len(inputs)):
        return
    beside = " beside the target, which is the last or the one called label" if has_target else ""
    raise ConfigError(
        f"{type(net).__name__} takes {_names(takes)}, and the batch has {len(inputs)} input{'s' * (len(inputs) != 1)}"
        f"{beside}. Let the data yield what the net takes."
    )


def check_loss(loss_fn: object) -> None:
    """Raise unless this is a function of (output, target).

    Raises:
        ConfigError: If it is a class, no function, or takes something else.
    """
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}. Make one: {loss_fn.__name__}().")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is a function of (output, target), found {type(loss_fn).__name__}.")
    try:
        takes = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except ValueError:  # some functions written in C do not tell
        return
    if not _binds(takes, 2):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ConfigError(f"loss_fn is called as loss_fn(output, target), and {name} takes {_names(takes)}. Wrap it.")


def _binds(takes: inspect.Signature, count: int) -> bool:
    try:
        takes.bind(*range(count))
    except TypeError:
        return False
    return True


def _names(takes: inspect.Signature) -> str:
    """Return the parameters as a script writes them, without types."""
    return str(
        takes.replace(
            parameters=[found.replace(annotation=found.empty) for found in takes.parameters.values()],
            return_annotation=takes.empty,
        )
    )


class MeanLoss:
    """A loss function as one step takes it: one number for a batch.

    Torch's cross entropy wants classes as int64 of shape (N,); here (N, 1) and other whole-number types will do.
    Its losses of one number a row compare every output with every target where one is (N,) and the other (N, 1); here
    row meets row, as in metrics.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self._takes_numbers = isinstance(loss_fn, _TAKES_NUMBERS) or loss_fn in _NUMBERS_BY_FUNCTION
        self._takes_classes = takes_classes(loss_fn)

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss, no dimensions."""
        if isinstance(output, Tensor) and isinstance(target, Tensor):
            if self._takes_classes:
                target = as_classes(output, target)
            elif self._takes_numbers:
                target = _as_numbers(output, target)
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {found}. Return the mean over the rows of the batch: one element.")
        return loss if not loss.dim() else loss.reshape(())  # adds no operator of its own where none is needed


def takes_classes(loss_fn: LossFunction) -> bool:
    """Return whether this is one of torch's losses whose target is one class a row."""
    loss_fn = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return isinstance(loss_fn, _TAKES_CLASSES) or loss_fn in (F.cross_entropy, F.nll_loss)


def own_loss(output: Any, _target: Any) -> Any:
    """Return what a net without a loss function returned: its loss."""
    return output


def _as_numbers(output: Tensor, target: Tensor) -> Tensor:
    is_either = {output.dim(), target.dim()} == {1, 2}
    if is_either and len(output) == len(target) and output.numel() == target.numel():
        return target.reshape(output.shape)
    return target


def as_classes(output: Tensor, target: Tensor) -> Tensor:
    """Return classes of shape (N, 1) or of another whole-number type as the loss takes them, others as they are."""
    is_whole = not target.is_floating_point() and target.dtype is not torch.bool
    if is_whole and output.dim() == 2 and target.shape in ((len(output),), (len(output), 1)):
        return (target if target.dim() == 1 else target.reshape(-1)).long()
    return target

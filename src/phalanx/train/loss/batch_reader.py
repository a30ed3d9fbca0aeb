"""`BatchReader`: split a batch into model inputs and target; `MeanLoss`: a loss function as a scalar."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.data.loader.binding import (
    Binding,
    Inputs,
    LossFunction,
    bind,
    describe_signature,
    fits,
    parameters_of,
    signature_of,
)
from phalanx.errors import ConfigError
from phalanx.train.loss.model_loss import is_torch_loss, logits_of

TARGETS = ("label", "labels", "target", "targets", "y")
"""Names of columns that are the target, at any position."""

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


Given = Literal["apart", "too", "if taken", "if needed"]
"""Whether the target is among the net's inputs: never; always; where the net has a parameter of its name or, if columns
have no names, takes as many; where it has a parameter of its name or does not take the others alone."""


class BatchReader:
    """Reads batches for one net: what it is called with, and the target.

    The target is the one column called `label`, `labels`, `target`, `targets` or `y`; where none is, the last, unless
    the net has a parameter of its name. How the others are given is decided by `bind`, once for each set of names.

    Args:
        net: A module.
        target: What becomes of the target.
        needs_target: Whether a batch without one is an error.
    """

    def __init__(self, net: nn.Module, *, target: Given, needs_target: bool = False) -> None:
        self._net = net
        self._target = target
        self._needs_target = needs_target or target == "apart"
        self._found: dict[tuple[Any, ...], tuple[Binding, Any]] = {}

    def __call__(self, batch: Any, names: Sequence[str] | None = None) -> tuple[Inputs, Any]:
        """Return the net's inputs and the target of a batch; None for one that has no target.

        Args:
            batch: A mapping, tuple or list of columns, or a tensor.
            names: Names of the columns of a tuple, if a pipeline has them.

        Raises:
            ConfigError: If the net cannot be called with it; names columns and parameters.
        """
        columns = columns_of(batch, names)
        binding, target = self.binding(batch, names)
        return binding.inputs(columns), None if target is None else columns[target]

    def binding(self, batch: Any, names: Sequence[str] | None = None) -> tuple[Binding, Any]:
        """Return how the net is called with a batch like this, and the name or number of its target; see `__call__`."""
        columns = columns_of(batch, names)
        key = *columns, isinstance(batch, Mapping)
        if key not in self._found:
            self._found[key] = self._read(tuple(columns), is_ordered=not isinstance(batch, Mapping))
        return self._found[key]

    def _read(self, columns: tuple[Any, ...], *, is_ordered: bool) -> tuple[Binding, Any]:
        target = _target_of(self._net, columns)
        if target is None and self._needs_target:
            raise ConfigError(_no_target(columns))
        others = tuple(name for name in columns if name != target)
        takes = signature_of(self._net)
        is_taken = target in parameters_of(takes) or (isinstance(target, int) and fits(takes, len(columns)))
        is_needed = target in parameters_of(takes) or (is_taken and not fits(takes, len(others)))
        as_input = {"apart": False, "too": True, "if taken": is_taken, "if needed": is_needed}[self._target]
        if as_input or target is None:
            return bind(self._net, columns, is_ordered=is_ordered), target
        beside = " beside the target, which is the last or the one called label"
        return bind(self._net, others, is_ordered=is_ordered, beside=beside), target


def _target_of(net: nn.Module, columns: Sequence[Any]) -> Any:
    """Return the column that is the target; None if there is none, or several may be."""
    own = parameters_of(signature_of(net))
    named = [name for name in columns if name in TARGETS]
    if len(named) > 1:  # one that the net takes is an input
        named = [name for name in named if name not in own]
    if named or set(columns) & set(TARGETS):
        return named[0] if len(named) == 1 else None
    return None if len(columns) < 2 or columns[-1] in own else columns[-1]


def _no_target(columns: Sequence[Any]) -> str:
    if len(columns) < 2:
        present, advice = f"{len(columns)} column{'s' * (len(columns) != 1)}", "Let the data yield the target too"
    else:
        named = [name for name in columns if name in TARGETS]
        which = f"{' and '.join(named)} may be" if named else "none is"
        present = f"the columns {', '.join(map(str, columns))}, of which {which} the target"
        advice = f"Call one column {', '.join(TARGETS[:-1])} or {TARGETS[-1]}"
    return (
        f"a batch is (input, ..., target), found {present}. {advice}, leave loss_fn out if the net returns its own "
        "loss, or give px.evaluate forward=lambda model, batch: (output, target)."
    )


def columns_of(batch: Any, names: Sequence[str] | None = None) -> dict[Any, Any]:
    """Return the columns of a batch by name, or by number where neither the batch nor `names` say one."""
    if isinstance(batch, Mapping):
        return dict(batch)
    columns = batch if isinstance(batch, tuple | list) else (batch,)
    names = getattr(batch, "_fields", names)
    return dict(zip(names if names and len(names) == len(columns) else range(len(columns)), columns, strict=True))


_SPEAKS_OF_TYPES = re.compile("same d?type|should be the same|expected scalar type|same datatype|[Ff]ound dtype")
"""Torch's words about operands whose element types do not go together."""


@contextlib.contextmanager
def explain_dtype_errors(net: nn.Module, columns: Mapping[Any, Any]) -> Iterator[None]:
    """Turn torch's error about dtypes into one that names the column whose dtype differs from the model's.

    Args:
        net: Called in the block.
        columns: The batch it is called with, by name or number.

    Raises:
        ConfigError: Instead of torch's error, if there is such a column; explains what to do.
    """
    try:
        yield
    except RuntimeError as error:
        own = {param.dtype for param in net.parameters() if param.is_floating_point()}
        others = {name: part.dtype for name, part in columns.items() if isinstance(part, Tensor)}
        # Whole numbers beside a float64 column are labels or indices, as a rule.
        others_left = {name: dtype for name, dtype in others.items() if dtype not in own}
        others_left = {name: dtype for name, dtype in others_left.items() if dtype.is_floating_point} or others_left
        if len(own) != 1 or not others_left or not _SPEAKS_OF_TYPES.search(str(error)):
            raise
        expected, (name, dtype) = _short(own.pop()), next(iter(others_left.items()))
        column_name = name if isinstance(name, str) else f"column{name}"  # as pipelines call it
        raise ConfigError(
            f"column {name!r} of the batch is {_short(dtype)} and {type(net).__name__} computes in {expected}, which "
            f"torch does not mix. Convert it where the data is made, array.astype({expected!r}) or "
            f"tensor.to(torch.{expected}), or in a pipeline: .map(vision.TypeCast({expected!r}), {column_name!r})."
        ) from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    if not fits(takes, 2):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ConfigError(
            f"loss_fn is called as loss_fn(output, target), and {name} takes {describe_signature(takes)}. Wrap it."
        )


class MeanLoss:
    """A loss function as one step takes it: one number for a batch.

    Torch's cross entropy wants classes as int64 of shape (N,); here (N, 1) and other whole-number types will do.
    Its losses of one number a sample compare every output with every target where one is (N,) and the other (N, 1);
    here sample meets sample, as in metrics. All of torch's get the `logits` of an output that has some.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self._is_torch_loss = is_torch_loss(loss_fn)
        self._takes_numbers = isinstance(loss_fn, _TAKES_NUMBERS) or loss_fn in _NUMBERS_BY_FUNCTION
        self._is_class_loss = is_class_loss(loss_fn)

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss, no dimensions."""
        if self._is_torch_loss:
            output = logits_of(output)
        if isinstance(output, Tensor) and isinstance(target, Tensor):
            if self._is_class_loss:
                target = as_classes(output, target)
            elif self._takes_numbers:
                target = _as_numbers(output, target)
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {kind}. Return the mean over the rows of the batch: one element.")
        return loss if not loss.dim() else loss.reshape(())  # adds no operator of its own where none is needed


def is_class_loss(loss_fn: LossFunction) -> bool:
    """Return whether this is one of torch's losses whose target is one class a sample."""
    loss_fn = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return isinstance(loss_fn, _TAKES_CLASSES) or loss_fn in (F.cross_entropy, F.nll_loss)


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

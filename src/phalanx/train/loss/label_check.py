"""`LabelCheckedLoss`: check labels against the model's output before the first update, on all ranks."""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from typing import Any

from torch import Tensor

from phalanx.comm.agreement import agree
from phalanx.data.loader.binding import LossFunction
from phalanx.data.samples.labels import label_problem
from phalanx.errors import ConfigError, DataError
from phalanx.train.loss.batch_reader import MeanLoss, as_classes, is_class_loss
from phalanx.train.loss.model_loss import IGNORED, is_torch_loss, logits_of

_SPEAKS_OF_LABELS = re.compile(
    "Target -?[0-9]+ is out of bounds|target tensor expected|multi-target not supported|target dtype to be Long|"
    "expected scalar type Long|to match target batch_size|index out of range in target|class index"
)
"""Torch's words about classes that are no target of its losses."""


class LabelCheckedLoss:
    """A loss function that explains what is wrong with labels.

    Args:
        loss_fn: `loss_fn(output, target)`; its first labels are looked at where it is one of torch's losses over
            classes, and in all others torch's error is explained.
        is_collective: Whether all ranks take the first step together; then labels of any rank are an error on all.
    """

    def __init__(self, loss_fn: LossFunction, *, is_collective: bool) -> None:
        self.loss_fn = loss_fn
        self._inner = loss_fn.loss_fn if isinstance(loss_fn, MeanLoss) else loss_fn
        self._is_torch_loss = is_torch_loss(self._inner)
        self._waits_for_first = is_class_loss(self._inner)
        self._is_collective = is_collective

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss. The first call is collective where the steps are.

        Raises:
            DataError: If labels have another shape or type than the loss takes, or are no classes of the output.
            ConfigError: If those of another rank do, in the first call.
        """
        if self._is_torch_loss:
            output = logits_of(output)
        if self._waits_for_first:
            self._waits_for_first = False
            self._check_first(self._problem(output, target))
        try:
            return self.loss_fn(output, target)
        except (RuntimeError, IndexError, ValueError) as error:
            if _SPEAKS_OF_LABELS.search(str(error)) and (problem := self._problem(output, target)):
                raise DataError(problem) from error
            raise

    def _check_first(self, problem: str | None) -> None:
        if problem is None:
            if self._is_collective:
                agree("the labels of the first batch", {"problem": None})
            return
        if self._is_collective:
            with suppress(ConfigError):  # this error says how ranks differ; the problem itself is more useful
                agree("the labels of the first batch", {"problem": problem})
        raise DataError(problem)

    def _problem(self, output: Any, target: Any) -> str | None:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return None
        if isinstance(self.loss_fn, MeanLoss):
            target = as_classes(output, target)
        return label_problem(output.shape, target, ignored=_ignored_by(self._inner))


def _ignored_by(loss_fn: LossFunction) -> int:
    if isinstance(loss_fn, functools.partial):
        return int(loss_fn.keywords.get("ignore_index", IGNORED))
    return int(getattr(loss_fn, "ignore_index", IGNORED))

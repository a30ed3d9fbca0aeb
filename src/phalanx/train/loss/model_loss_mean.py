"""`build_model_loss_mean`: average the loss that a model returns over the labels of all ranks.

Such a loss is a mean over the labels that count, while ranks weigh means by samples. Where ranks have unequal numbers
of labels a sample, that is the loss of one process if it is known what the mean is over: cross entropy of the net's own
`logits` and labels, of all of them or, in causal models, of those behind the first of each sample. That is tried out
with the first outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import context
from phalanx.comm.batch.share import row_weight_of
from phalanx.comm.transfers import peers_named
from phalanx.data.loader.binding import entry_of
from phalanx.errors import ConfigError
from phalanx.parallel.data.weighted_mean import mean_of_means
from phalanx.parallel.session import Applied
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.plan.value import Average, Push
from phalanx.train.loss.model_loss import IGNORED, loss_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""How far two ways to compute a loss are apart by rounding, relative to it; 1 % in other types."""


class ModelLossMean:
    """Makes of a net's own loss the mean over the labels of all ranks, or refuses it.

    Args:
        net: Returns the loss.
        is_seen: Whether its outputs can be looked at. Where the step is compiled they cannot, and the name of the class
            has to say whether it is one of transformers' causal models.
    """

    def __init__(self, net: nn.Module, *, is_seen: bool) -> None:
        self._name = type(getattr(net, "_orig_mod", net)).__name__
        self._is_seen = is_seen
        self._skipped = None if is_seen else _skipped_by_name(self._name)
        """Labels at the beginning of a sample that do not count; None while that is not known."""

        self._fits = (True, True)
        """Whether the present output is a mean over all labels, and over those behind the first."""

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss in an output; see `loss_of`."""
        value = loss_of(output)
        if self._skipped is None and _are_classes(target):
            self._fits = _fits(value.detach(), entry_of(output, "logits"), target)
        return value

    def mean(self, loss: Tensor, target: Any) -> Tensor:
        """Return the mean over the labels of all ranks. Collective over those that read their own samples.

        Args:
            loss: This rank's loss.
            target: Its labels; what is none has as many a sample everywhere.

        Raises:
            ConfigError: On all ranks, if the numbers of labels are unequal and it is not known which of them count.
        """
        if not _are_classes(target):
            return loss
        skipped = self._agree(target) if self._skipped is None else self._skipped
        return loss if skipped is None else mean_of_means(loss, _count(target, skipped))

    def _agree(self, target: Tensor) -> int | None:
        """Find with the other ranks how many labels of a sample are skipped; None if it does not matter."""
        readers = context.current().readers
        fits = [float(fit and self._is_seen) for fit in self._fits]
        message = torch.tensor(fits + _bounds(target, readers.count), dtype=torch.float64).to(target.device)
        with peers_named("the numbers of labels of a batch", readers.group):
            dist.all_reduce(message, dist.ReduceOp.MIN, group=readers.group)
        is_all, is_shifted, *bounds = message.tolist()
        if is_all != is_shifted:
            self._skipped = int(is_shifted)
            return self._skipped
        if is_all and (by_name := _skipped_by_name(self._name)) is not None:
            return by_name  # both fit a last layer of zeros: the next step may tell
        if all(least + most >= -1e-9 * abs(least) for least, most in zip(bounds[::2], bounds[1::2], strict=True)):
            return None
        raise ConfigError(
            f"the loss that {self._name} returns is a mean over labels, ranks have unequal numbers of them "
            f"(others are {IGNORED}), and the loss is not known to be the cross entropy of its logits, so the loss of "
            "all ranks' labels cannot be told. Compute it in a loss_fn of (output, target) from the logits, such as "
            "nn.CrossEntropyLoss(), or with px.weighted_mean in a loop of your own."
        )


def build_model_loss_mean(net: nn.Module, applied: Applied | None, *, is_seen: bool) -> ModelLossMean | None:
    """Return what makes a net's own loss that of all ranks, if several read their own samples and meet in every step.

    Workers of a parameter server and ranks that take local steps (localsgd) do not meet; each follows the mean over its
    own.
    """
    if applied is None or not context.is_initialized() or context.current().readers.count == 1:
        return None
    meets = not any(isinstance(rule.update, Average | Push) for rule in applied.plan.params)
    return ModelLossMean(net, is_seen=is_seen) if meets and not is_sum_of_ranks(applied.plan) else None


def check_stages(target: Any) -> None:
    """Raise if a net split into stages, which average losses of parts of a batch, leaves out labels. Collective.

    Raises:
        ConfigError: On all ranks.
    """
    if not _are_classes(target) or not context.is_initialized():
        return
    readers = context.current().readers
    ignored = (target == IGNORED).any().double()
    if readers.count > 1:
        with peers_named("the labels of a batch", readers.group):
            dist.all_reduce(ignored, dist.ReduceOp.MAX, group=readers.group)
    if ignored:
        raise ConfigError(
            f"some labels are {IGNORED}: the loss that the model returns is a mean over the others, and a model cut "
            "into stages averages losses of parts of a batch, so this is not the loss of the batch. Give loss_fn "
            "nn.CrossEntropyLoss(), which is exact there, with a model that returns logits."
        )


def _are_classes(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point() and target.dim() > 0


def _count(target: Tensor, skipped: int) -> Tensor:
    return ((target[..., skipped:] if skipped else target) != IGNORED).sum()


def _skipped_by_name(name: str) -> int | None:
    """Return how many labels of a sample a transformers model skips, by its class name; None for other classes."""
    if "ForCausalLM" in name or "LMHead" in name:
        return 1
    return 0 if any(task in name for task in ("ForMaskedLM", "ForConditionalGeneration", "Classification")) else None


def _fits(loss: Tensor, logits: Any, target: Tensor) -> tuple[bool, bool]:
    """Return whether a loss is the cross entropy over all labels, and over those after the first of a sample.

    Both if it is inconclusive, having no label that counts.
    """
    if not bool(torch.isfinite(loss)):
        return True, True
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.shape[:-1] != target.shape:
        return False, False
    if bool(((target != IGNORED) & ((target < 0) | (target >= logits.shape[-1]))).any()):
        return False, False  # no classes of these logits
    tolerance = _TOLERANCE.get(loss.dtype, 1e-2)

    def is_of(scores: Tensor, labels: Tensor) -> bool:
        whole = F.cross_entropy(scores.flatten(0, -2).to(loss.dtype), labels.flatten().long(), ignore_index=IGNORED)
        return bool((whole - loss).abs() <= tolerance * loss.abs())

    with torch.no_grad():
        is_shifted = target.dim() > 1 and is_of(logits[..., :-1, :], target[..., 1:])
        return is_of(logits, target), is_shifted


def _bounds(target: Tensor, ranks: int) -> list[float]:
    """Return the labels that count in each way, per sample, and their negatives: the minima give the range."""
    weight = row_weight_of(context.current().passes.now(), ranks)
    if not weight:
        return [float("inf")] * 4  # samples that do not count
    counts = [float(_count(target, skipped)) / weight for skipped in (0, 1 if target.dim() > 1 else 0)]
    return [bound for count in counts for bound in (count, -count)]

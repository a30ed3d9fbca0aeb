"""`GlobalMetric`: protocol of metrics over all ranks, and means over all samples."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.comm import context
from phalanx.comm.collectives import all_gather, all_gather_list
from phalanx.comm.context import BatchShare
from phalanx.comm.transfers import MAX_DIMS, peers_named
from phalanx.errors import ConfigError
from phalanx.parallel.session import session
from phalanx.train.metrics.exact_sum import ExactSum, quotient


def global_mean(value: Tensor) -> Tensor:
    """Return the mean over the global batch of a quantity of which each rank knows the mean over its own samples.

    Collective: every rank must call it. A rank's value weighs as its samples do in the batch the training loader handed
    out last, also after the end of its loop; without one, all ranks weigh the same.

    Args:
        value: This rank's mean (a loss, say), of any shape that is the same on every rank. Not modified.

    Returns:
        A tensor of the same shape and type, without gradient; float32 at least while it is added up.
    """
    if not context.is_initialized():
        return value.detach().clone()
    current = context.current()
    share, replicas = current.batch or current.ended_with, current.replicas
    session.has_means_in_loop |= current.batches.is_training
    if share is not None and replicas is not None and replicas.are_shared:
        return _mean_of_pass(value, share)
    return mean_over_ranks(value, share)


def _mean_of_pass(value: Tensor, share: BatchShare) -> Tensor:
    """Return the mean over the replicas that the ranks compute in one pass of the loop. Collective."""
    wide = torch.promote_types(value.dtype, torch.float32)
    weighted = value.detach().to(wide).flatten() * share.weight
    if not share.rows:
        weighted = torch.zeros_like(weighted)  # what does not count may be undefined
    sums = sum_over_ranks(torch.cat([weighted, weighted.new_tensor([share.weight])]))
    return (sums[:-1] / sums[-1].clamp_min(torch.finfo(wide).tiny)).view(value.shape).to(value.dtype)


def mean_over_ranks(value: Tensor, share: BatchShare | None) -> Tensor:
    """Do what `global_mean` does, for the batch of which this rank had `share`. Collective."""
    value = value.detach()
    if not context.is_initialized():
        return value.clone()
    weight = share.weight if share is not None else 1 / context.current().readers.count
    wide = torch.promote_types(value.dtype, torch.float32)
    weighted = value.to(wide) * weight if weight else torch.zeros_like(value, dtype=wide)
    return sum_over_ranks(weighted).to(value.dtype)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up `values` over all ranks that read their own samples, in place; alone it does nothing.

    Collective: every rank must call it with the same shape and type.
    """
    if context.is_initialized() and context.current().readers.count > 1:
        group = context.current().readers.group
        with peers_named("the sum of a metric", group):
            dist.all_reduce(values, group=group)
    return values


class AllRanks:
    """The collectives that `compute` of a metric may use, over all ranks that hold their own samples.

    Its methods are collective: every rank calls them in the same order.
    """

    @property
    def count(self) -> int:
        """Number of ranks that hold their own samples."""
        return context.current().readers.count if context.is_initialized() else 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, of a tensor of the same shape and dtype on each."""
        return sum_over_ranks(value.to(self._device(value)).clone()) if self.count > 1 else value

    def concat(self, rows: Tensor) -> Tensor:
        """Return the samples of all ranks along dim 0; ranks may hold different numbers of samples, also none."""
        return torch.cat(self.parts(rows)) if self.count > 1 else rows

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Return the samples of each rank; one without samples need not know their dtype or other dims.

        Raises:
            ConfigError: If samples differ in their other dims; on all ranks alike.
        """
        if self.count == 1:
            return [rows]
        group = context.current().readers.group
        rows = rows.detach().to(self._device(rows))
        forms = all_gather(_encode_shape(rows).unsqueeze(0).to(rows.device), same_shapes=True, group=group).tolist()
        shape, dtype = next((_decode_shape(form) for form in forms if form[0]), (rows.shape[1:], rows.dtype))
        if not len(rows):
            rows = torch.empty(0, *shape, dtype=dtype, device=rows.device)
        return all_gather_list(rows.contiguous(), group=group)

    def _device(self, value: Tensor) -> torch.device:
        return context.current().device if context.is_initialized() else value.device


_NAME_LENGTH = 16


def _encode_shape(rows: Tensor) -> Tensor:
    """Return samples, dims, sizes of the other dims and dtype of a tensor as integers."""
    sizes = list(rows.shape[1:])
    name = str(rows.dtype).removeprefix("torch.").ljust(_NAME_LENGTH)
    return torch.tensor([len(rows), len(sizes), *map(ord, name), *sizes, *[0] * (MAX_DIMS - len(sizes))])


def _decode_shape(form: list[int]) -> tuple[list[int], torch.dtype]:
    name = "".join(map(chr, form[2 : 2 + _NAME_LENGTH])).strip()
    return form[2 + _NAME_LENGTH :][: form[1]], getattr(torch, name)


@runtime_checkable
class GlobalMetric(Protocol):
    """A metric of all samples that is more than a mean over them; an object that `px.evaluate` takes.

    class Hits:
        def reset(self):
            self.hits = torch.zeros((), dtype=torch.int64)
        def update(self, output, target):       # samples of this rank; each sample of the data comes once, on one rank
            self.hits += (output.argmax(1) == target).sum()
        def compute(self, ranks):               # ranks.sum(tensor) and ranks.concat(rows)
            return int(ranks.sum(self.hits))
    """

    def reset(self) -> None:
        """Forget all samples."""
        ...

    def update(self, output: Any, target: Any, /) -> None:
        """Count the samples of a batch. Not collective: a rank may have fewer batches than others."""
        ...

    def compute(self, ranks: AllRanks, /) -> Any:
        """Return the metric over the samples of all ranks. Collective."""
        ...


class SampleMean:
    """The mean over all samples of a function of (output, target).

    Whole numbers and yes-or-no are added up as such, others without rounding (`ExactSum`), so the mean is that of one
    process, to the last bit. A function that returns the mean of a batch is exact up to the rounding of those means.
    """

    def __init__(self, name: str, sample_fn: Any) -> None:
        self._name, self.sample_fn = name, sample_fn
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._whole, self._exact = torch.zeros((), dtype=torch.int64), ExactSum()
        self._rows = 0

    def update(self, output: Any, target: Any) -> None:
        """Add the samples of a batch."""
        rows = count_samples(output, target)
        value = sample_values(self._name, self.sample_fn(output, target), rows)
        if value.is_floating_point():
            self._exact.add(value)
        else:
            self._whole = self._whole.to(value.device) + value.sum()
        self._rows += rows

    def compute(self, ranks: AllRanks) -> float:
        """Return the mean."""
        counts = torch.stack([self._whole, self._whole.new_tensor(self._rows)])
        totals = ranks.sum(torch.cat([self._exact.total, counts.to(self._exact.total.device)]))
        whole, rows = totals[-2:].tolist()
        exact = ExactSum.value(totals[:-2])
        return quotient(exact + whole, rows)


def count_samples(output: Any, target: Any) -> int:
    """Return the samples of a batch: those of the output, or of the first part of target and output that has some."""
    if isinstance(output, Tensor) and output.dim():
        return len(output)
    return next((len(leaf) for leaf in tree_leaves((target, output)) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def sample_values(name: str, value: Any, rows: int) -> Tensor:
    """Return the values whose sum is that of a metric over a batch: int64 for integers, else float64.

    Args:
        name: The metric's, for messages.
        value: One value per sample, shape (rows,) or (rows, 1), or their mean, no dimensions.
        rows: Samples of the batch.
    """
    if not isinstance(value, Tensor) or value.shape not in ((), (rows,), (rows, 1)):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"Metric {name!r} returned {shape} for {rows} rows. "
            "Return one value per row, or their mean without dimensions, as a tensor."
        )
    exact = value.double() if value.is_floating_point() or value.ndim == 0 else value.long()
    return exact * rows if value.ndim == 0 else exact

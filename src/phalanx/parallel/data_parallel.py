"""Data parallel: gradients of all ranks are averaged in buckets while the backward pass still runs.

Each bucket is one flat buffer. When the last gradient of a bucket has been accumulated, the bucket is scaled and its
all-reduce is issued; buckets are always issued in the same order, from the one thread that runs backward, so ranks
cannot disagree (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2). Two things ride along at no extra
collective:

* behind the gradients of a bucket, one flag per parameter, so that a parameter unused on this rank but used elsewhere
  gets its gradient, and one unused everywhere keeps `grad = None`;
* behind the last bucket of a dtype, the module's floating-point buffers of that dtype: batch-norm statistics are
  averaged, others are rank 0's. (Buffers of a dtype that no gradient has travel in a bucket of their own.)

After backward, each `param.grad` is a view into its bucket, valid until the next backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.comm.context import Context
from phalanx.errors import PeerLostError

logger = logging.getLogger("phalanx.parallel")


@dataclass(slots=True)
class _Gradient:
    """One parameter and its place in a bucket."""

    name: str
    param: nn.Parameter
    view: Tensor
    touched: bool = False
    """Whether this backward pass has produced a gradient for it."""


@dataclass(slots=True)
class _Carried:
    """A floating-point buffer of the model that rides in a bucket."""

    buffer: Tensor
    view: Tensor
    averaged: bool
    """Averaged by row weight (batch-norm statistics); otherwise rank 0's value."""


@dataclass(slots=True)
class _Bucket:
    flat: Tensor
    flags: Tensor
    gradients: list[_Gradient]
    carried: list[_Carried]
    pending: int = 0
    work: dist.Work | None = None


class Reducer:
    """Averages gradients over the ranks of a group, overlapped with the backward pass.

    Args:
        model: The module whose parameters and buffers are kept together; parameters are hooked, nothing is replaced.
        buckets: Parameter names of each bucket, in the order of issue; the same on every rank.
        context: Tells the rank and the weight of its current batch.
        reduce: `mean` weights each rank by its rows; `sum` adds the ranks' gradients.
        sync_buffers: Whether floating-point buffers ride along.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Sequence[str]],
        context: Context,
        *,
        reduce: str = "mean",
        sync_buffers: bool = True,
    ) -> None:
        self._context = context
        self._scale = 1.0 / context.world_size if reduce == "mean" else 1.0
        self._syncing = True
        self._running = False
        self._next = 0
        self.steps = 0
        self.collectives_issued = 0
        """All-reduces issued since the start."""

        self.unused: tuple[str, ...] = ()
        """Parameters that no rank used in the first backward pass."""

        self._buckets = _allocate(model, buckets, sync_buffers)
        for index, bucket in enumerate(self._buckets):
            for gradient in bucket.gradients:
                gradient.param.register_hook(self._weight_rows)
                gradient.param.register_post_accumulate_grad_hook(partial(self._on_gradient, index, gradient))

    @property
    def is_reducing(self) -> bool:
        """Whether a backward pass has begun and not ended: during it, or after one that raised."""
        return self._running

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on this rank; the first backward outside the block reduces all of them."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _weight_rows(self, gradient: Tensor) -> Tensor | None:
        # Applied to every incoming gradient, before accumulation, so uneven batches stay exact under accumulation too.
        share = self._context.batch
        if share is None:
            return None
        factor = share.weight * self._context.world_size
        if factor == 1.0:
            return None
        return gradient * factor if factor else torch.zeros_like(gradient)

    def _on_gradient(self, index: int, gradient: _Gradient, _: Tensor) -> None:
        if not self._syncing:
            return
        if not self._running:
            self._begin()
        if gradient.touched:
            return
        gradient.touched = True
        bucket = self._buckets[index]
        bucket.pending -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._issue(self._buckets[self._next])

    def _begin(self) -> None:
        self._running = True
        self._next = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.gradients)
            for gradient in bucket.gradients:
                gradient.touched = False
        # Runs when this backward pass has accumulated its last gradient, in the thread that called backward.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _issue(self, bucket: _Bucket) -> None:
        for gradient in bucket.gradients:
            found = gradient.param.grad
            if found is None:
                gradient.view.zero_()
                continue
            # A gradient left from an earlier, reduced backward is equal on all ranks: their mean is itself.
            scale = self._scale if gradient.touched else 1.0 / self._context.world_size
            if found.data_ptr() == gradient.view.data_ptr():
                gradient.view.mul_(scale)
            else:
                torch.mul(found, scale, out=gradient.view)
        if bucket.pending:
            bucket.flags.copy_(torch.tensor([g.touched for g in bucket.gradients]))
        else:
            bucket.flags.fill_(1)
        self._load_buffers(bucket.carried)
        try:
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.collectives_issued += 1
        self._next += 1

    def _load_buffers(self, carried: Sequence[_Carried]) -> None:
        share = self._context.batch
        weight = share.weight if share is not None else 1.0 / self._context.world_size
        for item in carried:
            factor = weight if item.averaged else float(self._context.rank == 0)
            if factor:
                torch.mul(item.buffer, factor, out=item.view)
            else:
                item.view.zero_()

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._issue(bucket)
        unused: list[str] = []
        for bucket in self._buckets:
            self._wait(bucket)
            unused += self._hand_back(bucket)
        self._running = False
        self.steps += 1
        if self.steps == 1 and unused:
            self.unused = tuple(unused)
            names = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            logger.warning("no rank used these parameters in the first step; they keep grad=None: %s", names)

    def _wait(self, bucket: _Bucket) -> None:
        work, bucket.work = bucket.work, None
        assert work is not None
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _hand_back(self, bucket: _Bucket) -> list[str]:
        """Give every parameter its reduced gradient; return the names of those that nobody used."""
        used_somewhere = bucket.flags.tolist() if bucket.pending else None
        unused = []
        for position, gradient in enumerate(bucket.gradients):
            if used_somewhere is not None and not used_somewhere[position]:
                unused.append(gradient.name)
                if gradient.param.grad is None:
                    continue
            gradient.param.grad = gradient.view
        for item in bucket.carried:
            # .data leaves the version counter alone: a graph that saved the buffer can still be walked.
            item.buffer.data.copy_(item.view)
        return unused

    def _lost(self, error: RuntimeError) -> PeerLostError:
        rank, world = self._context.rank, self._context.world_size
        return PeerLostError(
            f"rank {rank} of {world}: the all-reduce of gradients in step {self.steps + 1} failed: {error}. "
            "Another rank ended or stopped answering; its log says why."
        )


def _allocate(model: nn.Module, buckets: Sequence[Sequence[str]], sync_buffers: bool) -> list[_Bucket]:
    params = dict(model.named_parameters())
    buffers = list(_synced_buffers(model)) if sync_buffers else []
    last_of = {params[names[0]].dtype: index for index, names in enumerate(buckets)}
    made = []
    for index, names in enumerate(buckets):
        members = [params[name] for name in names]
        dtype = members[0].dtype
        riding = [b for b in buffers if b[0].dtype == dtype] if last_of[dtype] == index else []
        made.append(_allocate_bucket(names, members, riding))
    homeless = dict.fromkeys(b.dtype for b, _ in buffers if b.dtype not in last_of)
    return made + [_allocate_bucket((), (), [b for b in buffers if b[0].dtype == dtype]) for dtype in homeless]


def _allocate_bucket(
    names: Sequence[str], members: Sequence[nn.Parameter], riding: Sequence[tuple[Tensor, bool]]
) -> _Bucket:
    like = members[0] if members else riding[0][0]
    sizes = [p.numel() for p in members] + [len(members)] + [b.numel() for b, _ in riding]
    flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
    pieces = list(flat.split(sizes))
    gradients = [
        _Gradient(name, param, _view_like(piece, param))
        for name, param, piece in zip(names, members, pieces, strict=False)
    ]
    carried = [
        _Carried(buffer, piece.view(buffer.shape), averaged)
        for (buffer, averaged), piece in zip(riding, pieces[len(members) + 1 :], strict=True)
    ]
    return _Bucket(flat=flat, flags=pieces[len(members)], gradients=gradients, carried=carried)


def _view_like(piece: Tensor, param: Tensor) -> Tensor:
    # A gradient keeps its parameter's memory layout (channels-last convolutions), as autograd promises.
    if param.is_contiguous() or not param.is_non_overlapping_and_dense():  # type: ignore[attr-defined]
        return piece.view(param.shape)
    return piece.as_strided(param.shape, param.stride(), piece.storage_offset())


def _synced_buffers(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Yield each floating-point buffer once, and whether it is a batch-norm statistic."""
    seen: set[int] = set()
    for module in model.modules():
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point() and buffer.numel() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer, isinstance(module, _NormBase)

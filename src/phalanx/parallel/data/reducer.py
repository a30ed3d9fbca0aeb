"""`Reducer`: data-parallel gradient averaging in buckets, overlapped with the backward pass.

Each bucket is one flat buffer. When the last gradient of a bucket has been accumulated, the bucket is scaled and its
all-reduce is issued; buckets are always issued in the same order, from the one thread that runs backward, so ranks
cannot disagree (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2). Three things ride along at no extra
collective:

* behind the gradients of a bucket, one flag per parameter, so that a parameter unused on this rank but used elsewhere
  gets its gradient, and one unused everywhere keeps `grad = None`;
* behind the last bucket of a dtype, the module's floating-point buffers of that dtype: batch-norm statistics are
  averaged, others are rank 0's. (Buffers of a dtype that no gradient has travel in a bucket of their own.)
* the number of the model and the bucket, so that ranks which issue buckets of two models in different orders are told,
  whatever the backend. (Over shared memory a label says it in words, before anything is added up.)

What is averaged is `param.grad` whole. A part of it that was reduced before is equal on all ranks, so its mean is
itself; that makes accumulation exact with and without `no_sync`.

After backward, each `param.grad` is a view into its bucket. A bucket whose gradients a script keeps, as gradient
surgery does, moves to new memory before the next backward pass writes to it.

Several models may be trained by one backward pass. The one whose gradient comes first reduces while it runs, the others
after it, in the order in which they were distributed: which branches a rank uses does not change the order of issue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.comm.batch.backward_end import at_backward_end
from phalanx.comm.context import Context
from phalanx.comm.groups import Group
from phalanx.comm.labels import label_calls
from phalanx.comm.waits.waiting import waits
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.data.bucket_buffers import (
    Bucket,
    Gradient,
    SyncedBuffer,
    allocate,
    are_of_one_bucket,
    require_still_frozen,
)
from phalanx.parallel.data.bucket_copies import put_buffers, put_gradient, take_back
from phalanx.parallel.data.grad_reduction import FlatAllReduce, WireOverflow, reduction_for
from phalanx.parallel.data.reduction_errors import UnusedParameters, check_overflow, label_of, peer_lost
from phalanx.parallel.data.replicas.replica_round import ReplicaRound, gradient_group
from phalanx.parallel.data.running_reducers import RunningReducers, check_no_graph
from phalanx.parallel.data.sample_weights import sample_weight_hook, times
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.session import session
from phalanx.plan.buckets import GradientBucket

logger = logging.getLogger("phalanx.parallel")

_numbers = count(1)
"""Of models, in the order in which they are distributed, which is the same on every rank."""

_running: RunningReducers[Reducer] = RunningReducers()
"""In this process."""


def _groups_within(buckets: Sequence[GradientBucket], mesh: Mesh) -> dict[int, Group]:
    """Return, by bucket, the ranks that have a term each of one replica's gradients: they hold parts of a sequence.

    Collective.

    Raises:
        PlanError: If gradients are not added up over the ranks that hold replicas.
    """
    along = {axis for axis in mesh.batch_axes if mesh.size((axis,)) > 1}
    groups = {}
    for index, bucket in enumerate(buckets):
        if not along <= set(bucket.axes):
            raise PlanError(
                f"gradients of {bucket.names[0]!r} are added up along {bucket.axes}, and logical replicas along "
                f"{mesh.batch_axes}. Turn one of the two off."
            )
        if within := tuple(axis for axis in bucket.axes if axis not in mesh.batch_axes):
            groups[index] = mesh.gradient_group(within)
    return groups


class Reducer:
    """Averages gradients over the ranks that read other rows, overlapped with the backward pass.

    Args:
        model: The module whose parameters and buffers are kept together; parameters are hooked, nothing is replaced.
        buckets: What travels together, in the order of issue; the same on every rank.
        mesh: Tells the ranks over which each bucket is reduced.
        context: Tells the rank and the weight of its current batch.
        sync_buffers: Whether floating-point buffers ride along.
        overlapped: Whether backward passes start the reduction; only `reduce` does otherwise, of gradients that are
            weighted by rows already.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[GradientBucket],
        mesh: Mesh,
        context: Context,
        *,
        sync_buffers: bool = True,
        overlapped: bool = True,
    ) -> None:
        self._context = context
        self._readers = mesh.readers()
        self.number = next(_numbers)
        """Its place among those of this process."""

        self._syncing = True
        self._running = False
        self._next = 0
        self.steps = 0
        self.collectives_issued = 0
        """All-reduces issued since the start."""

        self._unused = UnusedParameters()
        self.is_resting = False
        """Whether ranks train apart: nothing is reduced until this is False again."""

        self.after_exchange: Callable[[], None] | None = None
        """Called after every reduction, on every rank equally often."""

        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]

        self._model = type(model).__name__
        self._round: ReplicaRound | None = None
        if context.replicas is not None:
            within = _groups_within(buckets, mesh)
            group = mesh.gradient_group(mesh.batch_axes)  # made now, in the order of the models
            is_elastic = context.replicas.is_elastic  # the group of the ranks that are left is another one
            current_group = partial(gradient_group, context) if is_elastic else lambda: group
            self._round = ReplicaRound(
                model, context.replicas, current_group, within=within, has_micro_batches=not overlapped
            )
            if context.recovery is not None:
                self._round.recovery = context.recovery
                context.recovery.add(self)
        routed = [(bucket.names, reduction_for(bucket.update, bucket.axes, mesh, context)) for bucket in buckets]
        self._buckets = allocate(
            model, routed, FlatAllReduce(mesh.gradient_group(mesh.batch_axes)), sync_buffers, self.number
        )
        sums = {name for bucket in buckets if bucket.update.reduce == "sum" for name in bucket.names}
        weighted = {name for bucket in buckets if bucket.is_weighted for name in bucket.names}
        self._unscaled = frozenset() if overlapped else frozenset(sums)
        self._handles: list[RemovableHandle] = []
        for index, bucket in enumerate(self._buckets if overlapped else ()):
            for gradient in bucket.gradients:
                is_sum, param = gradient.name in sums, gradient.param
                gain = float(self._readers.shares) if is_sum else 1.0  # of a sum the mean is taken too
                weigh = (
                    partial(times, factor=gain)
                    if gradient.name in weighted
                    else sample_weight_hook(context, self._readers, is_sum=is_sum, gain=gain)
                )
                on_gradient = partial(self._on_gradient, index, gradient)
                self._handles += [
                    param.register_hook(weigh if self._round is None else partial(self._before_gradient, weigh)),
                    param.register_post_accumulate_grad_hook(on_gradient),
                ]

    def close(self) -> None:
        """Leave the gradients alone from now on: another takes over, between two steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def adopt(self, handle: RemovableHandle) -> None:
        """Remove a hook too when this reducer is closed."""
        self._handles.append(handle)

    @property
    def is_reducing(self) -> bool:
        """Whether a backward pass has begun and not ended: during it, or after one that raised."""
        return self._running

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters that no rank used in the first step."""
        return self._unused.names

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of parameters travel in its buckets, not only buffers."""
        return any(bucket.gradients for bucket in self._buckets)

    @property
    def has_put_aside(self) -> bool:
        """Whether gradients of earlier batches are not in the parameters while a backward pass runs."""
        return self._round is not None and self._round.has_total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on this rank; the first backward outside the block reduces all of them."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _is_syncing(self) -> bool:
        """Return whether the backward pass that runs is reduced."""
        return self._syncing and (self._round is None or not self._round.is_deferred)

    def _before_gradient(self, weigh: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        """Weigh a gradient of logical replicas; before the first one gradients of earlier batches are put aside."""
        if not self._running:
            self.begin()
        return weigh(gradient)

    def _on_gradient(self, index: int, gradient: Gradient, _: Tensor) -> None:
        is_syncing = self._syncing and (self._running or self._is_syncing())
        if not is_syncing and self._round is not None:
            self._round.accumulate()
        if not is_syncing or self.is_resting:
            return
        self.begin()
        if gradient.touched:
            raise ConfigError(
                f"parameter {gradient.name!r} got a second gradient before the first was reduced. Either the backward "
                "pass before raised an error: end the job. Or several re-entrant checkpoints use the parameter: pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        gradient.touched = True
        self._take(gradient)
        bucket = self._buckets[index]
        bucket.pending -= 1
        if _running.is_first(self):
            self._issue_complete()

    def begin(self) -> None:
        """Say that a backward pass runs now; what waits for its end is then reduced. Again is no matter."""
        if self._running or not self._is_syncing() or self.is_resting:
            return
        check_no_graph()
        self._open()
        _running.join(self)
        at_backward_end(self._on_end)

    def reduce(self) -> None:
        """Reduce what several backward passes have accumulated. Collective, as a backward pass is."""
        if not self._is_syncing() or self.is_resting:
            return
        self._open()
        for bucket in self._buckets:
            for gradient in bucket.gradients:
                if gradient.param.grad is not None:
                    gradient.touched = True
                    self._take(gradient)
                    bucket.pending -= 1
        self._finish()

    def _open(self) -> None:
        require_still_frozen(self._frozen)
        if self._round is not None:
            self._round.begin_backward(self._has_accumulated)
        self._running = True
        self._next = 0
        for bucket in self._buckets:
            if bucket.is_kept():
                bucket.renew()
            bucket.pending = len(bucket.gradients)
            for gradient in bucket.gradients:
                gradient.touched = False

    def _has_accumulated(self) -> bool:
        """Return whether parameters may have gradients of earlier backward passes; torch keeps those that it shards."""
        gradients = (gradient for bucket in self._buckets for gradient in bucket.gradients)
        return not self.has_gradients or any(gradient.param.grad is not None for gradient in gradients)

    def _on_end(self) -> None:
        # The first to end finishes all: none issues a bucket before those in front of it have issued theirs.
        # A re-entrant checkpoint ends a backward pass of its own; what came so far is then reduced already.
        if self._running:
            for reducer in _running.leave(self):
                reducer._finish()

    def _issue_complete(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._issue(self._buckets[self._next])

    def _take(self, gradient: Gradient) -> None:
        """Move a new gradient into its bucket while it is still in the cache."""
        put_gradient(gradient, 1.0 if gradient.name in self._unscaled else 1.0 / self._readers.shares)

    @torch.no_grad()
    def _issue(self, bucket: Bucket) -> None:
        for gradient in bucket.gradients if bucket.pending else ():
            if gradient.touched:
                continue
            if gradient.param.grad is not None:
                self._take(gradient)
            else:
                gradient.view.zero_()
        if bucket.pending:
            bucket.flags.copy_(torch.tensor([g.param.grad is not None for g in bucket.gradients]))
        else:
            bucket.flags.fill_(1)
        bucket.marks.copy_(bucket.own_marks)
        self._load_buffers(bucket.carried)
        if session.on_bucket is not None:
            session.on_bucket(self._next, [gradient.name for gradient in bucket.gradients], bucket.flat)
        try:
            with label_calls(self._label_of(bucket)):
                bucket.work = (
                    bucket.wire.send(bucket.flat) if self._round is None else self._round.send(self._next, bucket)
                )
        except RuntimeError as error:
            self._raise_unless_elastic(error)
        self.collectives_issued += 1
        self._next += 1

    def _load_buffers(self, carried: Sequence[SyncedBuffer]) -> None:
        share = self._context.batch
        weight = share.weight if share is not None else 1.0 / self._readers.shares
        is_first = self._readers.index == 0 if self._round is None else self._round.is_first_replica
        put_buffers(carried, weight, is_first=is_first)

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._issue(bucket)
        if self._round is not None and not self._round.is_last:
            self._round.end_backward(self._buckets)
            self._running = False
            return
        unused: list[str] = []
        for bucket in self._buckets:
            if self._wait(bucket):
                unused += self._hand_back(bucket)
        if self._round is not None:
            self._round.end_backward(self._buckets)
        self._running = False
        self.steps += 1
        if self._unused.is_looking:
            self._unused.look(unused, {g.name for bucket in self._buckets for g in bucket.gradients if g.touched})
        if self.after_exchange is not None:
            self.after_exchange()

    def _wait(self, bucket: Bucket) -> bool:
        """Wait for the sums of a bucket; False where a rank was lost and an elastic job adds them up again."""
        work, bucket.work = bucket.work, None
        if work is None:
            return False
        try:
            with waits.waiting():
                work.wait()
        except WireOverflow as overflow:
            check_overflow(bucket, overflow, self._label_of(bucket), self._context)
        except RuntimeError as error:
            self._raise_unless_elastic(error)
            return False
        return True

    def _raise_unless_elastic(self, error: RuntimeError) -> None:
        if self._round is None or not self._round.lose(error):
            raise peer_lost(error, self._context, self.steps + 1) from error

    # -- elastic jobs, see `elastic.recovery.ReplicaSums` --------------------------------------------------------

    def roll_back(self, finished: Sequence[int]) -> None:
        """Be as after a replica that is not the last."""
        assert self._round is not None
        self._round.roll_back(finished)

    def finish(self) -> None:
        """Forget the partial sums."""
        assert self._round is not None
        self._round.finish()

    def _hand_back(self, bucket: Bucket) -> list[str]:
        """Give every parameter its reduced gradient; return the names of those that nobody used."""
        # Where no parameter is missing, looking would only make the host wait for a card.
        if (bucket.flat.is_cpu or bucket.pending) and not are_of_one_bucket(bucket):
            raise ConfigError(
                f"Ranks added up {self._label_of(bucket)} with gradients of another model: one backward pass went "
                "through both, and a rank did not use a part that others used. Models that one backward pass trains "
                "belong in one module: distribute that."
            )
        return take_back(bucket)

    def _label_of(self, bucket: Bucket) -> str:
        return f"{label_of(bucket)} of model {self.number}, {self._model}"

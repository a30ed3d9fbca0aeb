"""`ReplicaRound`: accumulate the gradients of logical replicas over one global batch, reduced in a fixed tree.

Each replica's backward pass fills the buckets as a rank's does. All but the last of a rank are put aside as partial
sums, and the parameters' gradients and the model's buffers are again what they were when the round began. The last one
sends the partial sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.batch.backward_end import at_backward_end
from phalanx.comm.batch.replicas import Replicas, ReplicaTurn
from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import wait_for
from phalanx.comm.groups import Group, group_of
from phalanx.errors import ConfigError
from phalanx.parallel.data.bucket_buffers import Bucket
from phalanx.parallel.data.grad_reduction import PendingReduction
from phalanx.parallel.data.replicas.accumulated_gradients import ReplicaGradients, RoundTotal
from phalanx.parallel.data.replicas.replica_mean import MeanScale, multiply_gradients
from phalanx.parallel.data.replicas.replica_reduction import ReplicaReduction
from phalanx.parallel.data.replicas.round_buffers import RoundBuffers, copy_buffers
from phalanx.parallel.data.replicas.round_place import check_same_place

if TYPE_CHECKING:
    from phalanx.parallel.elastic.recovery import ElasticRecovery

logger = logging.getLogger("phalanx.parallel")


class ReplicaRound:
    """The replicas of this rank whose gradients of one model are in the partial sums.

    Args:
        model: The model, whose buffers every replica of a round finds alike.
        replicas: Those of the job.
        group: Returns the ranks that hold them now.
        within: By bucket, the ranks that have a term each of one replica's gradients.
        has_micro_batches: Whether gradients add up over the micro-batches of a replica, before they come here.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: Replicas,
        group: Callable[[], Group],
        *,
        within: Mapping[int, Group] | None = None,
        has_micro_batches: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._replicas, self._group, self._within = replicas, group, within or {}
        self._has_micro_batches = has_micro_batches
        self._reductions: dict[int, ReplicaReduction] = {}
        """By bucket."""

        self._buffers = RoundBuffers(has_micro_batches=has_micro_batches)
        self._has_begun = False
        """Whether a backward pass has run in this turn."""

        self.is_complete = False
        """Whether the backward pass of this rank's last replica has run, in an elastic job."""

        self._finished: list[int] = []
        self._accumulated: dict[int, ReplicaGradients] = {}
        """By replica, what waits for its next batch under gradient accumulation."""

        self._is_accumulating = False
        self._kept_turn: ReplicaTurn | None = None
        """The turn whose gradients were put there last."""

        self._scale = MeanScale(replicas, group)
        self._total = RoundTotal()
        self._has_unreduced = False
        """Whether gradients of the parameters are of this rank only, of a rank that holds one replica."""

        self._update_group = replicas.group
        self.recovery: ElasticRecovery | None = None
        """What continues with the round when a rank is lost, in an elastic job."""

        if replicas.are_shared:
            replicas.on_turn(self._begin_turn)
            for param in model.parameters():
                if param.requires_grad and not has_micro_batches:
                    param.register_hook(_GradientCheck(param, self))

    @property
    def is_shared(self) -> bool:
        """Whether this rank holds several replicas now."""
        return len(self._replicas.local) > 1

    @property
    def may_be_shared(self) -> bool:
        """Whether this rank holds several replicas, or comes to where another is lost."""
        return self.is_shared or self._replicas.is_elastic

    @property
    def is_in_group(self) -> bool:
        """Whether batches of this rank's replicas wait for further ones, under gradient accumulation."""
        return bool(self._accumulated)

    @property
    def has_total(self) -> bool:
        """Whether gradients of earlier global batches of the update that comes are put aside."""
        return not self._total.is_empty

    @property
    def is_deferred(self) -> bool:
        """Whether the gradients of the backward pass that runs wait for further batches of their replica.

        Raises:
            ConfigError: If the loop calls `px.no_sync` after it has begun to accumulate.
        """
        if not self.is_shared:
            return False
        group = self._replicas.group
        if self._replicas.is_in_no_sync and not group.defers:
            if group.turns > self._replicas.progress.has_gradients:
                raise ConfigError(
                    "px.no_sync was entered after other batches of the same update, while this rank holds several "
                    "logical replicas. Enter it for all batches of an update but the last, or leave it out."
                )
            group.defers = True
        return self._replicas.is_deferred

    @property
    def is_last(self) -> bool:
        """Whether the backward pass that runs is of this rank's last replica."""
        return not self.is_shared or self._replicas.is_last

    @property
    def is_first_replica(self) -> bool:
        """Whether it is of the first replica of the job."""
        if self._replicas.current is None:
            return self._replicas.local[0] == 0
        return self._replicas.current == 0

    @torch.no_grad()
    def _begin_turn(self, replica: int, is_continued: bool) -> None:
        self._check_buffers()
        if self._replicas.is_first:
            if self._finished and is_continued:
                raise ConfigError(
                    f"a loop computed gradients of {len(self._finished)} of this rank's {len(self._replicas.local)} "
                    "logical replicas and continues with the next global batch. Train on every batch, and call "
                    "optimizer.step() for every batch."
                )
            if self._finished:
                logger.warning(
                    "the loop left a global batch after %d of this rank's %d replicas; their gradients are dropped",
                    len(self._finished),
                    len(self._replicas.local),
                )
            self._clear()
            self._scale.clear()
        self._leave_group()
        model = self._model()
        if model is None or not self.may_be_shared:
            return
        if replica in self._accumulated:
            self._accumulated[replica].restore(model)
        elif self._replicas.is_first:
            if self.is_shared and self._replicas.group.spans_epochs:
                # The loop made no update at the end of the epoch: its next step is an error.
                self._total.take(model.parameters())
            self._buffers.begin(model)
        else:
            for param in model.parameters():
                param.grad = None  # zeros, where torch shards: what counts is in the partial sums
            self._buffers.restore()

    def _leave_group(self) -> None:
        """Drop the gradients of an update that the loop left before it was made."""
        left, self._update_group = self._update_group, self._replicas.group
        if left is self._update_group or not left.is_open:
            return
        if left.rounds and self.is_shared:
            logger.warning(
                "the loop left %d global batches without an update; their gradients are dropped", left.rounds
            )
        if self.is_shared:
            self._total.clear()
        if left.defers:
            self._accumulated.clear()

    def _check_buffers(self) -> None:
        """Raise if the turn that ends left buffers that depend on which rank computed it.

        Raises:
            ConfigError: Names the buffer.
        """
        if not self.is_shared or not self._buffers.has_begun:
            return
        if not self._has_begun:
            self._buffers.check_unchanged()
            return
        self._has_begun = False
        self._buffers.check_alike(self._model())

    def accumulate(self) -> None:
        """Let what the backward pass that runs computes wait for the replica's next batch, not for the next replica."""
        replicas = self._replicas
        if replicas.progress.label_mean is not None:
            raise ConfigError(
                "a mean over labels was asked for in a batch whose gradients are not added up over the logical "
                "replicas, under gradient_merge or px.no_sync: each global batch is divided by a weight of its own. "
                "Accumulate in the loop, without px.no_sync."
            )
        self._has_begun = True
        replicas.begin_backward()
        if not self.is_shared:
            self._has_unreduced = True
        elif not self._is_accumulating:
            if replicas.turn is self._kept_turn:
                raise ConfigError(
                    f"a second backward pass is of replica {replicas.current}, and this rank holds several logical "
                    "replicas in turn. Call backward once for each batch (add losses first), or start as many ranks "
                    "as there are replicas."
                )
            self._is_accumulating, self._kept_turn = True, replicas.turn
            at_backward_end(self._keep)

    def _keep(self) -> None:
        self._is_accumulating = False
        model, current = self._model(), self._replicas.current
        if model is None or current is None:
            return
        self._accumulated[current] = ReplicaGradients([param.grad for param in model.parameters()], copy_buffers(model))
        for param in model.parameters():
            param.grad = None

    def begin_backward(self, has_accumulated: Callable[[], bool]) -> None:
        """Check that the replicas come one after the other, and put gradients of earlier batches aside.

        Args:
            has_accumulated: Returns whether there may be such gradients: to look at a whole model takes its time.

        Raises:
            ConfigError: If the loop has no batch, or makes two backward passes of a model for one, or one of more than
                a mean over labels.
        """
        replicas = self._replicas
        self._scale.check()
        if replicas.progress.has_stepped and self.may_be_shared:
            raise ConfigError(
                "a backward pass ran after an optimizer's step in the pass of one logical replica, and this rank holds "
                "several, or may come to (-n a:b): the step waits for the last of them, so what was computed then had "
                "old parameters. Call all backward passes before the steps, or start as many ranks as there are "
                "replicas."
            )
        if self.is_complete:
            raise ConfigError(
                "two backward passes of a model ran for one batch, where ranks may leave and join (-n a:b). Call "
                "backward once for each batch (add losses first)."
            )
        if not replicas.progress.has_gradients and self.is_last and replicas.are_uneven and not replicas.is_elastic:
            check_same_place(replicas, self._group(), self._device())
        replicas.begin_backward()
        self._has_begun = True
        if not self.is_shared:
            self._put_aside(has_accumulated)
            return
        local, current = self._replicas.local, self._replicas.current
        following = local[len(self._finished)] if len(self._finished) < len(local) else None
        model = self._model()
        if model is not None and replicas.is_first:
            for param in model.parameters():
                if hasattr(param.grad, "placements"):  # torch adds to what it shards without a hook
                    _refuse_gradient(param.grad.to_local())  # type: ignore[union-attr]
        if current == following:
            return
        if current is None:
            raise ConfigError(
                "a backward pass ran before a loader gave out a batch, and each logical replica has a batch of its "
                "own. Give the data to px.distribute, or make the loader with px.data.ShardedLoader."
            )
        raise ConfigError(
            f"a backward pass is of replica {current}, and that of replica {following} comes next: this rank holds "
            f"replicas {', '.join(map(str, local))} in turn. Call backward once for each batch (add losses "
            "first), or start as many ranks as there are replicas."
        )

    def _device(self) -> torch.device:
        model = self._model()
        params = () if model is None else model.parameters()
        param = next((param for param in params if not param.is_meta), None)  # other stages have theirs on meta
        return torch.device("cpu") if param is None else param.device

    def _put_aside(self, has_accumulated: Callable[[], bool]) -> None:
        """Put reduced gradients of earlier batches aside, which the pass that runs would be added to."""
        model = self._model()
        if model is None or self._has_unreduced or self._has_micro_batches or self._replicas.is_elastic:
            return
        if has_accumulated():
            self._total.take(model.parameters())
        else:
            self._total.clear()  # of a pass that raised

    def send(self, index: int, bucket: Bucket) -> PendingReduction | None:
        """Begin to add up a bucket over all replicas; None if it is put aside. Collective for the last replica."""
        flat = bucket.flat
        if index in self._within:
            wait_for(dist.all_reduce(flat, group=self._within[index], async_op=True))
        if (reduction := self._reductions.get(index)) is None:
            reduction = self._reductions[index] = ReplicaReduction(self._replicas)
        return reduction.send(flat, self._group, is_last=self.is_last and not self._has_lost_rank)

    # -- elastic jobs ------------------------------------------------------------------------------------------

    @property
    def _has_lost_rank(self) -> bool:
        return self.recovery is not None and self.recovery.failure is not None

    def lose(self, error: RuntimeError) -> bool:
        """Note that a reduction failed; return whether the job continues without the rank that was lost."""
        return self.recovery is not None and self.recovery.lose(error)

    @torch.no_grad()
    def roll_back(self, finished: Sequence[int]) -> None:
        """Be as after the backward pass of a replica that is not the last: further ones come."""
        if self._has_begun:  # it held one replica, and had nothing to compare
            self._check_buffers()
        self._finished, self.is_complete = list(finished), False
        model = self._model()
        if model is not None:
            for param in model.parameters():
                param.grad = None
            self._buffers.restore()

    def finish(self) -> None:
        """Forget the partial sums: the parameters change now."""
        self._clear()
        self._accumulated.clear()

    def end_backward(self, buckets: list[Bucket]) -> None:
        """Put a replica's gradients aside, or finish the round."""
        if self.is_last:
            self._check_buffers()
            self.is_complete = self._replicas.is_elastic
            if self._replicas.is_elastic:
                self._weigh()
            else:
                self._end_round()
            return
        assert self._replicas.current is not None
        self._scale.end_turn(is_last=False)
        self._accumulated.pop(self._replicas.current, None)
        self._finished.append(self._replicas.current)
        for bucket in buckets:
            bucket.work = None
            for gradient in bucket.gradients:
                gradient.param.grad = None

    def _weigh(self) -> None:
        """Divide gradients by the weight of a mean over labels, in an elastic job; not where a rank is lost."""
        try:
            factor = self._scale.end_turn(is_last=not self._has_lost_rank)
        except RuntimeError as error:
            if not self.lose(error):
                raise
            return
        if factor is not None and (model := self._model()) is not None:
            multiply_gradients(model, factor)

    def _end_round(self) -> None:
        """Add what earlier global batches of the same update left; put the sum aside where further ones follow.

        A rank with one replica calls `optimizer.step()` where the others do, and keeps the sum in its parameters. One
        with several calls it more often, and `zero_grad` with it.
        """
        self.finish()
        self._has_unreduced = False
        model, group = self._model(), self._replicas.group
        factor = self._scale.end_turn(is_last=True)
        if model is None:
            return
        if factor is not None:
            multiply_gradients(model, factor)
        self._total.add_to(model.parameters())
        if self.is_shared and not group.is_complete:
            self._total.take(model.parameters())

    def _clear(self) -> None:
        self._finished.clear()
        for reduction in self._reductions.values():
            reduction.clear()
        self._buffers.clear()
        self._has_begun = self.is_complete = False


def gradient_group(context: Context) -> Group:
    """Return the group of all ranks for gradients, as `Mesh.gradient_group` made it."""
    return group_of([tuple(range(context.world_size))], "gradients")


class _GradientCheck:
    """Raises for a gradient that is added to another: replicas are added up in their own tree."""

    def __init__(self, param: nn.Parameter, replica_round: ReplicaRound) -> None:
        self._param = weakref.ref(param)
        self._round = replica_round

    def __call__(self, _gradient: Tensor) -> None:
        param = self._param()
        is_alone = self._round.may_be_shared and not (self._round.is_in_group or self._round.is_complete)
        if param is not None and param.grad is not None and is_alone:
            _refuse_gradient(param.grad)


def _refuse_gradient(gradient: Tensor) -> None:
    if bool(gradient.any()):
        raise ConfigError(
            "a backward pass added to gradients that were there before, while this rank holds several logical "
            "replicas, or may come to (-n a:b). Call optimizer.zero_grad() for every batch; to accumulate, use "
            "strategy.gradient_merge."
        )

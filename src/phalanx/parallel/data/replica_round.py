"""`ReplicaRound`: accumulate the gradients of logical replicas over one global batch, reduced in a fixed tree.

Each replica's backward pass fills the buckets as a rank's does. All but the last of a rank are put aside as partial
sums, and the parameters' gradients and the model's buffers are again what they were when the round began. The last one
sends the partial sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm.batch.backward_end import at_backward_end
from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.context import Context
from phalanx.comm.elastic.membership import wait_for
from phalanx.comm.groups import Group, group_of
from phalanx.errors import ConfigError
from phalanx.parallel.data.bucket_buffers import Bucket
from phalanx.parallel.data.grad_reduction import PendingReduction
from phalanx.parallel.data.replica_sums import PartialSums, adds_up_in_tree, exchange_sums, is_one_branch_each, wide

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
        self._sums: dict[int, PartialSums] = {}
        """By bucket."""

        self._buffers: _Buffers = []
        """The model's buffers, and their values when the round began."""

        self._of_first: _Buffers = []
        """Buffers that are not averaged, as the first replica of the round left them."""

        self._has_begun = False
        """Whether a backward pass has run in this turn."""

        self.is_complete = False
        """Whether the backward pass of this rank's last replica has run, in an elastic job."""

        self._finished: list[int] = []
        self._accumulated: dict[int, _Accumulated] = {}
        """By replica, what waits for its next batch under gradient accumulation."""

        self._is_accumulating = False
        self._in_place: tuple[tuple[Sequence[int], ...], torch.device, bool] | None = None
        """Whether an all-reduce adds up the tree, of the replicas of each rank and a device."""

        self.recovery: ElasticRecovery | None = None
        """What goes on with the round when a rank is lost, in an elastic job."""

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
                    "logical replicas and goes on to the next global batch. Train on every batch, and call "
                    "optimizer.step() for every batch."
                )
            if self._finished:
                logger.warning(
                    "the loop left a global batch after %d of this rank's %d replicas; their gradients are dropped",
                    len(self._finished),
                    len(self._replicas.local),
                )
            self._clear()
        model = self._model()
        if model is None or not self.may_be_shared:
            return
        if replica in self._accumulated:
            self._accumulated[replica].restore(model)
        elif self._replicas.is_first:
            self._buffers = _copy_buffers(model)
        else:
            for param in model.parameters():
                param.grad = None  # zeros, where torch shards: what counts is in the partial sums
            _write(self._buffers)

    def _check_buffers(self) -> None:
        """Raise if the turn that ends left buffers that depend on which rank computed it.

        Raises:
            ConfigError: Names the buffer.
        """
        if not self.is_shared or not self._buffers:
            return
        if not self._has_begun:
            name = _differing(self._buffers, of_floats=True)
            if name is not None:
                raise ConfigError(
                    f"a forward pass without a backward pass changed buffer {name}, while this rank holds several "
                    "logical replicas, each of which begins with the same buffers. Call model.eval() before it."
                )
            return
        self._has_begun = False
        model = self._model()
        if model is not None and not self._of_first:
            self._of_first = [entry for entry in _copy_buffers(model) if not entry[2].is_floating_point()]
        elif self._has_micro_batches:
            _write(self._of_first)  # replicas with other numbers of rows are cut into other numbers of micro-batches
        elif (name := _differing(self._of_first, of_floats=False)) is not None:
            raise ConfigError(
                f"buffer {name} differs between the logical replicas of this rank, and only floating-point buffers are "
                "averaged. Make it one, or start as many ranks as there are replicas."
            )

    def accumulate(self) -> None:
        """Let what the backward pass that runs computes wait for the replica's next batch, not for the next replica."""
        self._has_begun = True
        self._replicas.begin_backward()
        if self.is_shared and not self._is_accumulating:
            self._is_accumulating = True
            at_backward_end(self._keep)

    def _keep(self) -> None:
        self._is_accumulating = False
        model, current = self._model(), self._replicas.current
        if model is None or current is None:
            return
        self._accumulated[current] = _Accumulated([param.grad for param in model.parameters()], _copy_buffers(model))
        for param in model.parameters():
            param.grad = None

    def begin_backward(self) -> None:
        """Check that the replicas come one after the other.

        Raises:
            ConfigError: If the loop has no batch, or makes two backward passes of a model for one.
        """
        replicas = self._replicas
        if replicas.has_stepped and self.may_be_shared:
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
        replicas.begin_backward()
        self._has_begun = True
        if not self.is_shared:
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

    def send(self, index: int, bucket: Bucket) -> PendingReduction | None:
        """Begin to add up a bucket over all replicas; None if it is put aside. Collective for the last replica."""
        replicas, flat = self._replicas, bucket.flat
        current = replicas.local[0] if replicas.current is None else replicas.current
        if index in self._within:
            wait_for(dist.all_reduce(flat, group=self._within[index], async_op=True))
        if not replicas.is_elastic and len(replicas.local) == 1 and self._adds_up_in_place(flat):
            return _all_reduce(flat, self._group())
        sums = self._sums.setdefault(index, PartialSums(replicas.count))
        if not sums.has(current):  # else computed again, where a rank was lost
            sums.add(range(current, current + 1), wide(flat))
        if not self.is_last or self._has_lost_rank:
            return None
        return self._reduce(index, flat)

    def _adds_up_in_place(self, flat: Tensor) -> bool:
        """Return whether an all-reduce of the ranks' own sums adds up the tree: each rank has one branch of it."""
        by_rank, before = self._replicas.by_rank, self._in_place
        if before is not None and before[0] is by_rank and before[1] == flat.device and not self._replicas.is_elastic:
            return before[2]
        is_tree = len(by_rank) > 1 and is_one_branch_each(by_rank) and adds_up_in_tree(self._group(), flat)
        self._in_place = by_rank, flat.device, is_tree
        return is_tree

    def _reduce(self, index: int, flat: Tensor) -> PendingReduction:
        """Add up this rank's partial sums over all ranks, into a bucket. Those of elastic jobs stay as they are."""
        sums, is_elastic = self._sums[index], self._replicas.is_elastic
        if not is_elastic:
            del self._sums[index]
        if not self._adds_up_in_place(flat):
            return _Taken(flat, exchange_sums(sums, self._replicas.by_rank, self._group()), None)
        total = sums.sums[0][1]
        if total.dtype is flat.dtype:
            flat.copy_(total)
            return _all_reduce(flat, self._group())
        total = total.clone() if is_elastic else total
        return _Taken(flat, total, _all_reduce(total, self._group()))

    # -- elastic jobs ------------------------------------------------------------------------------------------

    @property
    def _has_lost_rank(self) -> bool:
        return self.recovery is not None and self.recovery.failure is not None

    def lose(self, error: RuntimeError) -> bool:
        """Note that a reduction failed; return whether the job goes on without the rank that was lost."""
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
            _write(self._buffers)

    def finish(self) -> None:
        """Forget the partial sums: the parameters change now."""
        self._clear()
        self._accumulated.clear()

    def end_backward(self, buckets: list[Bucket]) -> None:
        """Put a replica's gradients aside, or finish the round."""
        if self.is_last:
            self._check_buffers()
            self.is_complete = self._replicas.is_elastic
            if not self._replicas.is_elastic:
                self.finish()
            return
        assert self._replicas.current is not None
        self._accumulated.pop(self._replicas.current, None)
        self._finished.append(self._replicas.current)
        for bucket in buckets:
            bucket.work = None
            for gradient in bucket.gradients:
                gradient.param.grad = None

    def _clear(self) -> None:
        self._finished.clear()
        self._sums.clear()
        self._buffers.clear()
        self._of_first.clear()
        self._has_begun = self.is_complete = False


def gradient_group(context: Context) -> Group:
    """Return the group of all ranks for gradients, as `Mesh.gradient_group` made it."""
    return group_of([tuple(range(context.world_size))], "gradients")


_Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers by module and name, which may get another tensor in each forward pass, and what they are to hold."""


def _copy_buffers(model: nn.Module) -> _Buffers:
    return [
        (module, name, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]


def _write(buffers: _Buffers) -> None:
    for module, name, value in buffers:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.data.copy_(value)  # .data leaves the version counter alone: a graph may have saved the buffer
        else:
            module._buffers[name] = value.clone()


def _differing(buffers: _Buffers, *, of_floats: bool) -> str | None:
    """Return the name of a buffer that does not hold its value."""
    for module, name, value in buffers:
        buffer = module._buffers.get(name)
        if (of_floats or not value.is_floating_point()) and (buffer is None or not torch.equal(buffer, value)):
            return f"{name!r} of {type(module).__name__}"
    return None


@dataclass(slots=True)
class _Accumulated:
    """The gradients and buffers of one replica."""

    gradients: list[Tensor | None]
    buffers: _Buffers

    def restore(self, model: nn.Module) -> None:
        for param, gradient in zip(model.parameters(), self.gradients, strict=True):
            param.grad = gradient
        _write(self.buffers)


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


def _all_reduce(flat: Tensor, group: Group) -> PendingReduction:
    return _Pending(dist.all_reduce(flat, group=group, async_op=True))


@dataclass(slots=True)
class _Pending:
    """A collective under way, in place."""

    work: Any

    def wait(self) -> None:
        """Wait for it, at most until a member of an elastic job is lost."""
        wait_for(self.work)


@dataclass(slots=True)
class _Taken:
    """A sum in memory of its own, on its way into a bucket."""

    flat: Tensor
    total: Tensor
    work: PendingReduction | None

    def wait(self) -> None:
        """Take over the sum."""
        if self.work is not None:
            self.work.wait()
        self.flat.copy_(self.total)

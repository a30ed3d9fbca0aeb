"""`ReplicaReduceScatter`: ZeRO with logical replicas: reduce-scatter of their gradients in a fixed tree."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.comm.batch.replicas import Replicas
from phalanx.comm.groups import Group
from phalanx.parallel.data.replicas.replica_reduction import ReplicaReduction
from phalanx.parallel.data.replicas.replica_sums import PartialSums, scatter_sums


def add_up_replicas(model: nn.Module, replicas: Replicas, *, moves: bool) -> None:
    """Let the units of a sharded model reduce the gradients of all replicas at the last of each rank.

    Where ranks hold different numbers of replicas, parameters are gathered once for a round: ranks would gather
    differently often.

    Args:
        model: The sharded model.
        replicas: Those of the job.
        moves: Whether replicas may move between ranks.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_custom_reduce_scatter(ReplicaReduceScatter(replicas))  # type: ignore[arg-type]  # torch's base is private
    if moves or len({len(local) for local in replicas.assignment}) > 1:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        gathering = _GatherOnce(model)
        model._gathers_once = gathering  # type: ignore[assignment]  # lives as long as the model
        replicas.on_turn(gathering.begin_turn)
        gathering.replicas = replicas


class ReplicaReduceScatter:
    """Torch's reduce-scatter of one unit: puts aside what comes of all replicas of this rank but the last."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._reduction = ReplicaReduction(replicas)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for torch to copy gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's slice of the sum over all replicas, or zeros before the last. Collective for the last."""
        replicas = self._replicas
        if replicas.is_first:
            self._reduction.clear()  # of a round that the loop left
        is_last = len(replicas.local) == 1 or replicas.is_last
        own = self._reduction.add(input_tensor, lambda: group, is_last=is_last)
        if own is None:
            output_tensor.zero_()
        elif isinstance(own, PartialSums):
            output_tensor.copy_(scatter_sums(own, replicas.by_rank, group))
        elif own.dtype is output_tensor.dtype:
            _scatter(output_tensor, own, group)
        else:
            mine = own.new_empty(output_tensor.numel())
            _scatter(mine, own, group)
            output_tensor.copy_(mine)
        return None


def _scatter(output: Tensor, source: Tensor, group: Group) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, source, op=dist.ReduceOp.SUM, group=group)


class _GatherOnce:
    """Keeps gathered parameters until the last replica's backward pass."""

    replicas: Replicas

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def begin_turn(self, _replica: int, _is_continued: bool) -> None:
        model = self._model()
        for module in () if model is None else model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(self.replicas.is_last, recurse=False)

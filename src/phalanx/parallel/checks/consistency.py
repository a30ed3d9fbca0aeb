"""`make_consistent`: before evaluation or a save: synchronise buffers, check that all ranks have equal parameters.

Where ranks train apart (LocalSGD), the one model is the average of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.comm import transfers
from phalanx.comm.context import Context
from phalanx.errors import ConfigError
from phalanx.parallel.checks.checksum import checksums, combined
from phalanx.parallel.checks.compare import ReplicatedTensors, difference
from phalanx.parallel.checks.replica_check import VARIABLE, comparable, compare_every, explain_desync
from phalanx.parallel.data.bucket_buffers import stored, synced_buffers
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.session import Applied, applied_to, distributed_models, list_applied
from phalanx.parallel.step.norms import is_dtensor
from phalanx.plan.value import Average, Push


def make_consistent(model: nn.Module, call: str, optimizer: Optimizer | None = None) -> None:
    """Synchronise the buffers of a model, and see that its parameters are the same on all ranks that hold them.

    Collective over all ranks of the job; nothing with one. The model may be distributed, hold distributed ones, be a
    part of one, or be none of it.

    Args:
        model: The model.
        call: What needs it, for messages.
        optimizer: Its state is compared too, if it trains a distributed model.

    Raises:
        ConfigError: If parameters differ; on all ranks.
    """
    if not _is_multi_rank():
        return
    context, parts = context_of.current(), _distributed(model)
    for distributed, result in parts.items():
        if result.plan.step.sync_buffers and not _averages_weights(result):
            synchronise_buffers(distributed, context)
    is_plain = context.readers.count == context.world_size and not any(map(_has_rank_local_weights, list_applied()))
    rest = model if is_plain and not parts else None
    if rest is not None:
        synchronise_buffers(rest, context, only_averaged=True)
    if not compare_every():
        return
    for result in parts.values():
        if result.drift is not None:
            result.drift.compare(f"at {call}", optimizer)
    if rest is not None:
        _compare_plain(rest, call, context)


@contextmanager
def as_saved(model: nn.Module) -> Iterator[None]:
    """Let a model have the weights inside the block that a save of it holds, and its own again afterwards.

    They are others where ranks train apart: the average. Collective over the ranks that do.
    """
    with ExitStack() as stack:
        for result in _distributed(model).values() if _is_multi_rank() else ():
            for updater in result.updaters:
                stack.enter_context(updater.averaged_weights())
        yield


@torch.no_grad()
def synchronise_buffers(model: nn.Module, context: Context, *, only_averaged: bool = False) -> None:
    """Make floating-point buffers equal on the ranks that read rows of their own, as the exchange of gradients does.

    A backward pass that exchanges nothing (merged gradients, `no_sync`) and a forward pass without one (`update_bn`)
    leave every rank its own. Where none differs, nothing is written. Collective over those ranks.

    Args:
        model: The model.
        context: Tells who reads, and what this rank's last batch weighs.
        only_averaged: Whether to leave alone what is not averaged: statistics of batch normalisation are, by rows;
            the others are those of the first rank.
    """
    readers = context.readers
    buffers = [(module, name) for module, name in synced_buffers(model) if not is_module_held(getattr(module, name))]
    by_dtype: dict[torch.dtype, list[tuple[Tensor, bool]]] = {}
    for module, name in buffers:
        if isinstance(module, _NormBase) or not only_averaged:
            buffer = stored(getattr(module, name))
            by_dtype.setdefault(buffer.dtype, []).append((buffer, isinstance(module, _NormBase)))
    if readers.count == 1 or not by_dtype:
        return
    mine = {str(n): buffer for n, (buffer, _) in enumerate(pair for pairs in by_dtype.values() for pair in pairs)}
    low, high = torch.tensor([combined(checksums(mine))] * 2, device=context.device)
    if transfers.all_reduce(low, "min", readers.group) == transfers.all_reduce(high, "max", readers.group):
        return
    weight = 1.0 / readers.count if context.batch is None else context.batch.weight
    for dtype, pairs in by_dtype.items():
        factors = [weight if is_averaged else float(readers.index == 0) for _, is_averaged in pairs]
        parts = [
            buffer.reshape(-1) * factor if factor else torch.zeros_like(buffer).reshape(-1)
            for (buffer, _), factor in zip(pairs, factors, strict=True)
        ]
        flat = transfers.all_reduce(torch.cat([*parts, parts[0].new_tensor([weight])]), "sum", readers.group)
        *whole, total = flat.split([*(len(part) for part in parts), 1])
        for (buffer, is_averaged), part in zip(pairs, whole, strict=True):
            buffer.data.copy_((part / total if is_averaged else part).view(buffer.shape).to(dtype))


def _compare_plain(model: nn.Module, call: str, context: Context) -> None:
    whole = ((name, param) for name, param in model.named_parameters() if not is_dtensor(param))
    params = {name: param.detach() for name, param in whole if comparable(param)}
    gap = difference([ReplicatedTensors([tuple(range(context.world_size))], params)], context.device)
    if gap is not None and not gap.is_rounding:
        raise ConfigError(
            f"{call} needs one model, and each rank has its own: the model is not distributed, and these differ: "
            f"{gap}. Give it to px.distribute, or load the same weights on every rank. {explain_desync()} Where it is "
            f"meant, {VARIABLE}=0 compares none."
        )


def _is_multi_rank() -> bool:
    return context_of.is_initialized() and dist.is_initialized() and dist.get_world_size() > 1


def _distributed(model: nn.Module) -> dict[nn.Module, Applied]:
    """Return the distributed models that this one is, holds or is a part of, in the order of their making."""
    inside = {id(module) for module in model.modules()}
    parts = {}
    for distributed in distributed_models():
        result = applied_to(distributed)
        is_related = id(distributed) in inside or any(module is model for module in distributed.modules())
        if result is not None and is_related:
            parts[distributed] = result
    return parts


def _averages_weights(result: Applied) -> bool:
    """Return whether ranks train apart."""
    return any(isinstance(rule.update, Average) for rule in result.plan.params)


def _has_rank_local_weights(result: Applied) -> bool:
    """Return whether what a rank computes from the parameters it holds, such as a running mean, is its own."""
    return any(isinstance(rule.update, Average | Push) for rule in result.plan.params)

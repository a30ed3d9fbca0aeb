"""`shard_state`: keep the state of an optimizer in shards of ranks that may leave; `whole_state`: gather it to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.errors import ConfigError
from phalanx.parallel.elastic.recovery import ElasticRecovery
from phalanx.parallel.elastic.sharded_state import ShardedState
from phalanx.parallel.optim.elementwise import is_elementwise
from phalanx.parallel.session import StepPhase, optimizer_record, session
from phalanx.parallel.step.hooks import add_action


def shard_state(optimizer: Optimizer, mirror: int) -> None:
    """Let each rank of an elastic job keep its shard of an optimizer's state.

    Args:
        optimizer: One of the job's, before its first step.
        mirror: Whose shards a rank keeps beside its own: those of so many ranks after it.

    Raises:
        ConfigError: If it looks at more than one element at a time.
    """
    context, record = context_of.current(), optimizer_record(optimizer)
    recovery: ElasticRecovery = context.recovery
    if record.shards is not None:
        return  # it trains a second model
    if record.is_own_rule or not is_elementwise(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} computes an update from whole parameters, and ranks of this job, which may "
            "leave and join (-n a:b), shard its state. Use an optimizer that treats every element by itself (SGD, "
            "Adam, AdamW), or turn sharding off."
        )
    record.shards = ShardedState(optimizer, context.rank, context.world_size, mirror)
    recovery.shards.add(record.shards)
    add_action(optimizer, StepPhase.PUT_SLICES, record.shards.put_slices, needs_gradients=True)
    add_action(optimizer, StepPhase.SHARE_PARAMETERS, _end_update)


def _end_update(optimizer: Optimizer) -> None:
    shards = optimizer_record(optimizer).shards
    assert shards is not None
    shards.put_back(optimizer)
    recovery: ElasticRecovery = context_of.current().recovery
    recovery.share_update(recovery.shards.of(shards))


@contextmanager
def whole_state(optimizer: Optimizer | None) -> Iterator[bool]:
    """Let an optimizer whose state is sharded over ranks that may leave have all of it inside the block, on rank 0.

    Collective where it is; nothing else anywhere. Yields whether this rank has all of it.
    """
    record = None if optimizer is None else session.optimizers.get(optimizer)
    if record is None or record.shards is None:
        yield True
        return
    recovery: ElasticRecovery = context_of.current().recovery
    received = recovery.repeat(recovery.shards.of(record.shards).collect)
    if received is None or context_of.current().rank != 0:
        yield False
        return
    with record.shards.whole(received):
        yield True

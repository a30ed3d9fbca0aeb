"""`push_from_strategy`: rules for parameter servers: push mode, dense parameters on servers, tables."""

from __future__ import annotations

from functools import partial
from typing import Literal

from phalanx.errors import PlanError
from phalanx.plan.shape import ModelShape
from phalanx.plan.value import Push, Reason, Table
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.configs import ASyncConfigs

DENSE = "dense"
"""Stands in a Plan for the tables of dense parameters; there is one for each group of an optimizer."""

DENSE_WIDTH = 1024
"""Values per row of such a table."""


def push_from_strategy(strategy: DistributedStrategy, servers: int) -> Push:
    """Return how gradients reach tables: as the strategy says, else asynchronously. Without servers modes agree."""
    configs = strategy.config(ASyncConfigs)
    push = partial(Push, reduce=reduce_of(strategy), wire_dtype=configs.wire_dtype)
    if configs.k_steps > 0:
        return push(mode="geo", steps=configs.k_steps, local_optimizer=configs.local_optimizer)
    if configs.half_async:
        return push(mode="half_async", steps=configs.max_merge_var_num)
    if configs.staleness is not None:
        return push(mode="bounded", steps=configs.staleness)
    asynchronous = servers > 0 if strategy.a_sync is None else strategy.a_sync
    return push(mode="async" if asynchronous else "sync")


def dense_on_servers(strategy: DistributedStrategy, servers: int) -> bool:
    """Return whether dense parameters live on the servers, as the rows do."""
    return servers > 0 and strategy.config(ASyncConfigs).dense == "server"


def reduce_of(strategy: DistributedStrategy) -> Literal["mean", "sum"]:
    """Return how the gradients of different rows combine."""
    return "mean" if strategy.gradient_scale == "avg" else "sum"


def check_servers(strategy: DistributedStrategy, shape: ModelShape, world_size: int, servers: int) -> None:
    """Raise if a model's tables have no home.

    Raises:
        PlanError: If several workers share tables and there is no server.
    """
    sparse = sparse_tables(shape)
    if sparse and world_size > 1 and not servers:
        raise PlanError(
            f"{world_size} workers share table {sparse[0].name!r}, but the job has no parameter server to hold it. "
            f"Launch with `phalanx run --server-num 1 --worker-num {world_size} train.py`."
        )


def sparse_tables(shape: ModelShape) -> tuple[Table, ...]:
    """Return the tables of a model's own parameters, each once."""
    return tuple(dict.fromkeys(param.table for param in shape.params if param.table))


def server_reasons(strategy: DistributedStrategy, shape: ModelShape, servers: int) -> tuple[Reason, ...]:
    """Return what a reader of the Plan should know about tables and servers."""
    sparse = any(param.table for param in shape.params)
    if not servers:
        note = "its table is in this process: the job has one worker and no server"
        return (Reason(setting="SparseEmbedding", effect=note),) if sparse else ()
    push = push_from_strategy(strategy, servers)
    steps = f" ({push.steps} steps)" if push.steps else ""
    setting = "no a_sync" if strategy.a_sync is None and push.mode == "async" else "a_sync"
    reasons = [Reason(setting=setting, effect=f"workers push to the servers in mode {push.mode}{steps}")]
    if dense_on_servers(strategy, servers):
        effect = "dense parameters live on the servers; buffers are each worker's own"
    else:
        effect = "dense parameters live on every worker, equal by all-reduce"
    return (*reasons, Reason(setting=f"{servers} server{'s' * (servers > 1)}", effect=effect))

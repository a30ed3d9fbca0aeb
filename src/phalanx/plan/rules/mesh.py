"""`mesh_from_strategy`: mesh axes and sizes that a strategy asks for."""

from __future__ import annotations

import math

from phalanx.errors import PlanError
from phalanx.plan.value import Axis
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.configs import (
    ContextParallelConfigs,
    ExpertParallelConfigs,
    HybridConfigs,
    ShardingConfigs,
    TensorParallelConfigs,
)

DATA_AXIS = "data"
"""Replicas of the model that read their own samples."""

SHARD_AXIS = "shard"
"""Ranks that read their own samples and share one replica of optimizer state, gradients and parameters (ZeRO)."""

STAGE_AXIS = "stage"
"""Stages of a pipeline."""

MODEL_AXIS = "model"
"""Ranks that hold one replica of the sharded layers together."""

CONTEXT_AXIS = "context"
"""Ranks that compute parts of the same sequences."""

EXPERT_AXIS = "expert"
"""Ranks that read their own samples and hold one copy of the experts together."""

_NAMES = {
    "dp": DATA_AXIS,
    "pp": STAGE_AXIS,
    "sharding": SHARD_AXIS,
    "ep": EXPERT_AXIS,
    "sep": CONTEXT_AXIS,
    "mp": MODEL_AXIS,
}


def mesh_from_strategy(strategy: DistributedStrategy, world_size: int) -> tuple[Axis, ...]:
    """Return the mesh of a strategy over this many ranks, axes of size 1 left out but for a job of one.

    Degrees that are not said: a pipeline, or else sharding, takes the ranks that others leave; else copies do (`dp`).
    One process holds everything, whatever the degrees, so that a script runs without a launcher too.

    Raises:
        PlanError: If the degrees do not make up the ranks; says which were asked for.
    """
    degrees = _degrees(strategy)
    if world_size == 1:
        return (Axis(name=DATA_AXIS, size=1),)
    taken = math.prod(degrees.values())
    filling = _filling(strategy, degrees)
    if filling not in degrees and world_size % taken == 0:
        degrees[filling] = world_size // taken
    if math.prod(degrees.values()) != world_size:
        product = " x ".join(f"{name}={size}" for name, size in degrees.items()) or "dp"
        raise PlanError(
            f"the strategy asks for {product} ranks, which do not make up the {world_size} that were launched. Correct "
            f"hybrid_configs, or launch with -n {taken}."
        )
    order = dict.fromkeys((*strategy.config(HybridConfigs).order, *_NAMES))
    axes = [Axis(name=_NAMES[name], size=degrees[name]) for name in order if degrees.get(name, 1) > 1]
    return tuple(axes) or (Axis(name=DATA_AXIS, size=1),)


def batch_axes(mesh: tuple[Axis, ...]) -> tuple[str, ...]:
    """Return the axes of such a mesh along which samples are split."""
    return tuple(axis.name for axis in mesh if axis.name in (DATA_AXIS, SHARD_AXIS, EXPERT_AXIS))


def _degrees(strategy: DistributedStrategy) -> dict[str, int]:
    """Return the degrees a strategy says, by Fleet's short names; -1 and left out are not said."""
    hybrid = strategy.config(HybridConfigs)
    shards = strategy.config(ShardingConfigs).sharding_degree if strategy.sharding else None
    context = strategy.config(ContextParallelConfigs).degree if strategy.context_parallel else None
    tensor = strategy.config(TensorParallelConfigs).tensor_parallel_degree if strategy.tensor_parallel else None
    experts = strategy.config(ExpertParallelConfigs).degree if strategy.expert_parallel else None
    degrees = {
        "dp": hybrid.dp_degree,
        "pp": hybrid.pp_degree,
        "sharding": _one_degree(hybrid_configs=hybrid.sharding_degree, sharding_configs=shards),
        "ep": _one_degree(hybrid_configs=hybrid.ep_degree, expert_parallel_configs=experts),
        "sep": _one_degree(hybrid_configs=hybrid.sep_degree, context_parallel_configs=context),
        "mp": _one_degree(hybrid_configs=hybrid.mp_degree, tensor_parallel_configs=tensor),
    }
    positive = {name: size for name, size in degrees.items() if size is not None and size > 0}
    if strategy.tensor_parallel and "mp" not in positive:
        raise PlanError(
            "strategy.tensor_parallel needs to know over how many ranks. Set tensor_parallel_configs = "
            '{"tensor_parallel_degree": 2}, or hybrid_configs = {"mp_degree": 2}.'
        )
    if strategy.context_parallel and "sep" not in positive:
        raise PlanError(
            "strategy.context_parallel needs to know over how many ranks. Set context_parallel_configs = "
            '{"degree": 2}, or hybrid_configs = {"sep_degree": 2}.'
        )
    if strategy.expert_parallel and "ep" not in positive:
        raise PlanError(
            "strategy.expert_parallel needs to know over how many ranks. Set expert_parallel_configs = "
            '{"degree": 2}, or hybrid_configs = {"ep_degree": 2}.'
        )
    return positive


def _one_degree(**settings: int | None) -> int | None:
    degrees = {size for size in settings.values() if size is not None and size > 0}
    if len(degrees) > 1:
        words = " and ".join(f"{name} says {size}" for name, size in settings.items())
        raise PlanError(f"{words}: one degree is meant. Make them equal, or remove one.")
    return degrees.pop() if degrees else None


def _filling(strategy: DistributedStrategy, degrees: dict[str, int]) -> str:
    """Return which kind takes the ranks that nobody asked for."""
    if strategy.pipeline and "pp" not in degrees:
        return "pp"
    if strategy.sharding and "sharding" not in degrees:
        return "sharding"
    return "dp"

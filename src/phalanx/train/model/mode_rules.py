"""Derive the strategy of a `Model` from its `ParallelMode` and `set_auto_parallel_context`.

The mode decides what of the strategy and of `px.shard` acts:

    STAND_ALONE       one process
    DATA_PARALLEL     every rank holds the full model; degrees of model parallel and `px.shard` are ignored
    HYBRID_PARALLEL   they act; SEMI_AUTO_PARALLEL is the same
    AUTO_PARALLEL     a planner decides; `px.shard` is ignored
"""

from __future__ import annotations

import logging

from torch import nn

from phalanx.cluster.role.role import Role
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.tensor.shard_api import discard_shards, has_shard_requests
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.configs import HybridConfigs
from phalanx.train.model.auto_context import auto_context
from phalanx.train.model.modes import ParallelMode, as_mode

_CUTS = ("pipeline", "tensor_parallel", "context_parallel", "expert_parallel", "sharding")
"""Techniques by which a rank holds less than the whole model."""

logger = logging.getLogger("phalanx.train")


def read_mode(mode: str | None) -> ParallelMode | None:
    """Return the mode passed to a Model or to `set_auto_parallel_context`; None if neither has one.

    Raises:
        ConfigError: If it is none, or the two differ.
    """
    modes = [as_mode(word) for word in (mode, auto_context.parallel_mode) if word is not None]
    if len(set(modes)) > 1:
        raise ConfigError(
            f"Model was asked for {modes[0].name}, set_auto_parallel_context for {modes[1].name}. Say the mode once."
        )
    return modes[0] if modes else None


def check_ranks(mode: ParallelMode | None, role: Role) -> None:
    """Raise unless the mode, `device_num` and `global_rank` fit the ranks that were launched.

    Raises:
        ConfigError: If they do not; names both numbers.
    """
    actual = {"device_num": role.world_size, "global_rank": role.rank}
    for word, real in actual.items():
        declared = getattr(auto_context, word)
        if declared not in (None, real):
            raise ConfigError(
                f"set_auto_parallel_context says {word}={declared}, and this is rank {role.rank} of {role.world_size} "
                f"(launcher: {role.launcher}). Leave {word} out: the launcher's number is taken."
            )
    if mode is ParallelMode.STAND_ALONE and role.world_size > 1:
        raise ConfigError(
            f"parallel_mode STAND_ALONE is for one process, and {role.world_size} ranks were launched, which would "
            "train the same model each by itself. Write DATA_PARALLEL, or launch one process."
        )


def strategy_in(
    mode: ParallelMode | None, strategy: DistributedStrategy | None, model: nn.Module
) -> DistributedStrategy:
    """Return the strategy that trains a model in a mode, with what `set_auto_parallel_context` said.

    In DATA_PARALLEL and AUTO_PARALLEL it drops the model's `px.shard` marks.

    Args:
        mode: The mode; what the ranks and the strategy say when None.
        strategy: The user's; the defaults when None. Not modified.
        model: A model that is not distributed yet.

    Raises:
        ConfigError: If strategy and context contradict each other.
    """
    chosen = auto_context.applied_to(strategy or DistributedStrategy())
    if mode not in (ParallelMode.DATA_PARALLEL, ParallelMode.AUTO_PARALLEL):
        return chosen
    aside = [f"px.shard of {name!r}" for name in discard_shards(model)]
    if mode is ParallelMode.AUTO_PARALLEL:
        if aside:
            logger.info("parallel_mode AUTO_PARALLEL chooses what to shard: %s ignored", ", ".join(aside))
        return chosen
    hybrid_configs = chosen.config(HybridConfigs)
    degrees = {
        name
        for name in ("pp_degree", "ep_degree", "sep_degree", "mp_degree")
        if getattr(hybrid_configs, name) not in (None, 1)
    }
    switches = {
        name for name in ("pipeline", "tensor_parallel", "context_parallel", "expert_parallel") if getattr(chosen, name)
    }
    if aside or degrees or switches:
        names = [*sorted(switches), *sorted(degrees), *aside]
        logger.info("parallel_mode DATA_PARALLEL holds the full model on every rank: %s ignored", ", ".join(names))
    hybrid = {key: value for key, value in chosen.hybrid_configs.items() if key not in degrees}
    return chosen.model_copy(update={"hybrid_configs": hybrid, **dict.fromkeys(switches, False)})


def require_cuts(mode: ParallelMode | None, strategy: DistributedStrategy, model: nn.Module, world_size: int) -> None:
    """Raise if a mode of cut models has nothing to cut.

    Raises:
        ConfigError: If neither the strategy nor the model shards anything; on all ranks.
    """
    if mode not in (ParallelMode.HYBRID_PARALLEL, ParallelMode.SEMI_AUTO_PARALLEL) or world_size == 1:
        return
    is_cut = has_shard_requests(model) or any(is_module_held(param) for param in model.parameters())
    if not is_cut and strategy.techniques.isdisjoint(_CUTS):
        raise ConfigError(
            f"parallel_mode {mode.name} has nothing to shard: no layer is marked and the strategy asks for no stages. "
            'Say which layers, px.shard(net, {"classifier": "column"}), or write DATA_PARALLEL.'
        )

"""`check_together`: validate combinations of strategy settings, and find those without effect beside the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.errors import StrategyError
from phalanx.strategy.configs import AmpConfigs, ASyncConfigs, GradientMergeConfigs
from phalanx.strategy.techniques import first_conflict

if TYPE_CHECKING:
    from phalanx.strategy.settings import DistributedStrategy

_SCALING = (
    "init_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio",
    "use_dynamic_loss_scaling",
)  # fmt: skip
_FUSION = ("fuse_all_reduce_ops", "fuse_grad_size_in_MB")
_WITHOUT_SWITCH = {"a_sync_configs", "hybrid_configs", "gradient_scale_configs"}


def check_together(strategy: DistributedStrategy) -> None:
    """Raise if settings contradict each other. Called after each one, so only what no later setting can mend.

    Raises:
        StrategyError: Names the two, and says why.
    """
    _check_servers(strategy)
    _check_precision(strategy)
    conflict = first_conflict(strategy.techniques)
    if conflict is not None:
        first, second, pair = conflict
        raise StrategyError(
            f"strategy.{first} and strategy.{second} cannot be on together: {pair.why}. Turn one of them off."
        )


def _check_servers(strategy: DistributedStrategy) -> None:
    """Raise if the settings of parameter servers ask for two modes at once."""
    configs = strategy.config(ASyncConfigs)
    modes = {"k_steps": configs.k_steps, "half_async": configs.half_async, "staleness": configs.staleness or 0}
    modes_set = [f"{name}={value}" for name, value in modes.items() if value > 0]
    if len(modes_set) > 1:
        raise StrategyError(f"strategy.a_sync_configs asks for several modes: {', '.join(modes_set)}. Keep one.")
    if modes_set and strategy.a_sync is False:
        raise StrategyError(
            f"strategy.a_sync=False asks for synchronous training, and a_sync_configs for {modes_set[0]}. Set "
            "a_sync=True, or leave it out of a_sync_configs."
        )


def _check_precision(strategy: DistributedStrategy) -> None:
    """Raise if parameters are to have two dtypes, or to be cast and sharded."""
    configs = strategy.config(AmpConfigs)
    pure = [name for name in ("use_pure_fp16", "use_pure_bf16") if getattr(configs, name)]
    if len(pure) > 1:
        raise StrategyError("strategy.amp_configs asks for use_pure_fp16 and use_pure_bf16. Keep one.")
    meant = {"use_pure_fp16": "float16", "use_pure_bf16": "bfloat16"}
    if pure and configs.dtype not in (None, meant[pure[0]]):
        raise StrategyError(
            f'strategy.amp_configs asks for {pure[0]} and dtype="{configs.dtype}". Leave dtype out, or make them agree.'
        )
    if pure and strategy.amp and "sharding" in strategy.techniques:
        raise StrategyError(
            f"strategy.amp with {pure[0]} and strategy.sharding cannot be on together: float32 copies of cast "
            "parameters are not sharded. Leave parameters float32 (amp alone), or turn sharding off."
        )


def idle_settings(strategy: DistributedStrategy) -> list[str]:
    """Return a sentence for every setting that says something and would not act. Pure.

    Keys that never act are reported when they are set; this is about settings that need others.
    """
    return [*_dictionaries(strategy), *_single(strategy), *_scaling(strategy), *_fusion(strategy)]


def _dictionaries(strategy: DistributedStrategy) -> Iterator[str]:
    for name in type(strategy).model_fields:
        switch = name.removesuffix("_configs")
        if switch == name or name in _WITHOUT_SWITCH or not getattr(strategy, name):
            continue
        if switch not in strategy.techniques:
            yield f"strategy.{name} has no effect: {switch} is off. Set strategy.{switch} = True, or leave it out."


def _single(strategy: DistributedStrategy) -> Iterator[str]:
    if strategy.hierarchical_allreduce_inter_nranks > 1 and not strategy.use_hierarchical_allreduce:
        yield (
            "strategy.hierarchical_allreduce_inter_nranks has no effect: use_hierarchical_allreduce is off. Set "
            "strategy.use_hierarchical_allreduce = True, or leave it out."
        )
    if strategy.gradient_merge and strategy.config(GradientMergeConfigs).k_steps == 1:
        yield (
            "strategy.gradient_merge has no effect: it merges 1 batch. Say how many make one update: "
            'gradient_merge_configs = {"k_steps": 4}.'
        )
    if strategy.base_batch is not None and strategy.scale_lr == "none":
        yield 'strategy.base_batch has no effect: the learning rate is not scaled. Set strategy.scale_lr = "linear".'


def _scaling(strategy: DistributedStrategy) -> Iterator[str]:
    keys = [key for key in _SCALING if key in strategy.amp_configs]
    if strategy.amp and strategy.amp_dtype != "float16" and keys:
        yield f"amp_configs[{keys[0]!r}] has no effect: bfloat16 has the range of float32, so losses are not scaled."


def _fusion(strategy: DistributedStrategy) -> Iterator[str]:
    alone = [name for name in ("sharding", "localsgd", "adaptive_localsgd", "dgc") if name in strategy.techniques]
    for name in _FUSION:
        if alone and name in strategy.model_fields_set:
            yield f"strategy.{name} has no effect: with {alone[0]}, gradients are not all-reduced in buckets."

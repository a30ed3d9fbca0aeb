"""What a strategy must not ask for at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import StrategyError
from phalanx.strategy.configs import AmpConfigs, ASyncConfigs
from phalanx.strategy.conflicts import first_conflict

if TYPE_CHECKING:
    from phalanx.strategy.settings import DistributedStrategy


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

"""`set_auto_parallel_context`: MindSpore's settings of parallel training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, did_you_mean
from phalanx.strategy import DistributedStrategy
from phalanx.train.model.modes import ParallelMode, as_mode

SEARCH_MODES = ("recursive_programming", "sharding_propagation", "dynamic_programming")

INSTEAD = {
    "full_batch": "leave it out: each rank reads its part of the global batch, and ranks that hold one copy together "
    "read the same rows",
    "dataset_strategy": "leave it out: each rank reads its part of the global batch, and ranks that hold one copy "
    "together read the same rows",
    "pipeline_stages": 'strategy.hybrid_configs = {"pp_degree": 2}',
    "pipeline_config": "strategy.pipeline_configs",
    "pipeline_segments": "strategy.pipeline_configs",
    "pipeline_result_broadcast": "leave it out: px.evaluate gives every rank the result",
    "auto_pipeline": 'strategy.hybrid_configs = {"pp_degree": 2}',
    "parallel_optimizer_config": 'strategy.sharding_configs = {"stage": 1}',
    "optimizer_weight_shard_size": 'strategy.sharding_configs = {"sharding_degree": 2}',
    "optimizer_weight_shard_aggregated_save": "leave it out: checkpoints load at any number of ranks",
    "grad_accumulation_step": 'strategy.gradient_merge = True; strategy.gradient_merge_configs = {"k_steps": 2}',
    "all_reduce_fusion_config": "strategy.fuse_grad_size_in_MB",
    "comm_fusion": "strategy.fuse_grad_size_in_MB",
    "gradient_fp32_sync": "leave it out: gradients travel in their own dtype; strategy.fp16_allreduce sends float16",
    "force_fp32_communication": "leave it out: gradients travel in their own dtype",
    "loss_repeated_mean": "leave it out: ranks that compute the same are counted once",
    "enable_alltoall": "leave it out",
    "communi_parallel_mode": "leave it out",
    "strategy_ckpt_config": "strategy_ckpt_load_file and strategy_ckpt_save_file",
    "group_ckpt_save_file": "strategy_ckpt_save_file: a Plan says its groups",
    "dump_local_norm": "px.clip_grad_norm_ returns the norm",
    "dump_local_norm_path": "px.clip_grad_norm_ returns the norm",
    "dump_device_local_norm": "px.clip_grad_norm_ returns the norm",
}
"""Settings of such contexts that are not taken, and what to write for them."""

ALIASES = {"mirror_mean": "gradients_mean", "auto_parallel_search_mode": "search_mode"}
"""Two words for one setting."""


@dataclass(slots=True)
class AutoContext:
    """The settings; None if unset."""

    parallel_mode: ParallelMode | None = None
    device_num: int | None = None
    global_rank: int | None = None
    gradients_mean: bool | None = None
    parameter_broadcast: bool | None = None
    enable_parallel_optimizer: bool | None = None
    search_mode: str | None = None
    strategy_ckpt_load_file: str | None = None
    strategy_ckpt_save_file: str | None = None

    def applied_to(self, strategy: DistributedStrategy) -> DistributedStrategy:
        """Return a strategy with the settings here.

        Raises:
            ConfigError: If the strategy sets another value.
        """
        overrides: dict[str, Any] = {}
        if self.gradients_mean is not None:
            overrides["gradient_scale_configs"] = {"scale_strategy": "avg" if self.gradients_mean else "sum"}
        if self.parameter_broadcast is not None:
            overrides["parameter_broadcast"] = self.parameter_broadcast
        if self.enable_parallel_optimizer:
            overrides["sharding"] = True
        for name, value in overrides.items():
            if name in strategy.model_fields_set and getattr(strategy, name) != value:
                raise ConfigError(
                    f"set_auto_parallel_context asks for strategy.{name} = {value}, and the strategy says "
                    f"{getattr(strategy, name)}. Say it once."
                )
        changed = strategy.model_copy(deep=True)
        for name, value in overrides.items():
            setattr(changed, name, value)
        return changed


auto_context = AutoContext()
"""The settings of this process."""

_first_model: list[str] = []
"""The class of the first Model, once there is one."""


def set_auto_parallel_context(**settings: Any) -> None:
    """Set how Models of this process train in parallel. Before the first Model; the same on each rank.

    Args:
        **settings: `parallel_mode`: a `ParallelMode`, or its name.
            `gradients_mean` (or `mirror_mean`): True averages gradients over the ranks, False sums them; True when
            left out.
            `parameter_broadcast`: whether every rank starts from rank 0's parameters; True when left out.
            `device_num`, `global_rank`: checked against the launcher's numbers; best left out.
            `enable_parallel_optimizer`: True lets each rank hold a part of the optimizer's state (`strategy.sharding`).
            `strategy_ckpt_save_file`: rank 0 writes the Plan of the model there once it is distributed.
            `strategy_ckpt_load_file`: such a Plan, used instead of the one the strategy makes.
            `search_mode` (or `auto_parallel_search_mode`): of AUTO_PARALLEL.

    Raises:
        ConfigError: If a setting is unknown, has a value it cannot have, or a Model was made already.
    """
    if _first_model:
        raise ConfigError(
            f"set_auto_parallel_context was called after a {_first_model[0]} was made, which would not follow it. Call "
            "it before, or reset_auto_parallel_context() for a new Model."
        )
    values: dict[str, Any] = {}
    for word, value in settings.items():
        name = _setting_name(word)
        if name in values and values[name] != value:
            raise ConfigError(f"{name} was set twice, to {values[name]!r} and {value!r}. Set it once.")
        values[name] = _check_value(word, name, value)
    for name, value in values.items():
        setattr(auto_context, name, value)


def get_auto_parallel_context(name: str) -> Any:
    """Return a setting of `set_auto_parallel_context`; None if unset.

    Raises:
        ConfigError: If there is no such setting.
    """
    return getattr(auto_context, _setting_name(name))


def reset_auto_parallel_context() -> None:
    """Forget the settings of `set_auto_parallel_context`; it may be called again for new Models."""
    _first_model.clear()
    for field in fields(AutoContext):
        setattr(auto_context, field.name, None)


def close_context(model: object) -> None:
    """Refuse `set_auto_parallel_context` from now on: a Model was made."""
    if not _first_model:
        _first_model.append(type(model).__name__)


def _setting_name(word: str) -> str:
    """Return the name of a setting, of an alias too."""
    names = [field.name for field in fields(AutoContext)]
    name = ALIASES.get(word, word)
    if name in names:
        return name
    if word in INSTEAD:
        raise ConfigError(f"set_auto_parallel_context({word}=...) is not taken. Write instead: {INSTEAD[word]}.")
    every = [*names, *ALIASES, *INSTEAD]
    raise ConfigError(
        f"set_auto_parallel_context has no setting {word!r}.{did_you_mean(word, every)} It takes {', '.join(names)}."
    )


_KINDS: dict[str, type | tuple[type, ...]] = {
    "parallel_mode": str,
    "device_num": int,
    "global_rank": int,
    "gradients_mean": bool,
    "parameter_broadcast": bool,
    "enable_parallel_optimizer": bool,
    "search_mode": str,
    "strategy_ckpt_load_file": (str, Path),
    "strategy_ckpt_save_file": (str, Path),
}


def _check_value(word: str, name: str, value: Any) -> Any:
    kind: Any = _KINDS[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = "path" if isinstance(kind, tuple) else kind.__name__
        raise ConfigError(f"set_auto_parallel_context({word}=...) takes a {expected}, found {value!r}.")
    if name == "search_mode" and value not in SEARCH_MODES:
        raise ConfigError(
            f"{word} is one of {', '.join(SEARCH_MODES)}, found {value!r}.{did_you_mean(value, SEARCH_MODES)}"
        )
    if name in ("device_num", "global_rank") and value < (name == "device_num"):
        raise ConfigError(f"{word} counts {'ranks' if name == 'device_num' else 'from 0'}, found {value}.")
    return as_mode(value) if name == "parallel_mode" else value

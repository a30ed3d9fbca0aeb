"""What the techniques of a strategy say of parameters, modules, schedule and step."""

from __future__ import annotations

from typing import Any, Literal

from phalanx.errors import PlanError
from phalanx.plan.rules.mesh import SHARD_AXIS, STAGE_AXIS
from phalanx.plan.rules.servers import reduce_of
from phalanx.plan.shape import ModelShape
from phalanx.plan.stages import cut_stages, units
from phalanx.plan.value import (
    AllReduce,
    Average,
    Axis,
    ModuleRule,
    ReduceScatter,
    Scaler,
    Schedule,
    TopK,
    Update,
)
from phalanx.strategy import DistributedStrategy

_SCHEDULES: dict[str, Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]] = {
    "GPipe": "gpipe",
    "F-then-B": "gpipe",
    "1F1B": "1f1b",
    "Interleaved": "interleaved",
    "ZeroBubble": "zero_bubble",
}


def update_from_strategy(strategy: DistributedStrategy, mesh: tuple[Axis, ...]) -> Update:
    """Return how the gradients of a replicated parameter are combined."""
    reduce = reduce_of(strategy)
    if _has(mesh, SHARD_AXIS) or strategy.sharding:
        configs = strategy.sharding_configs
        return ReduceScatter(
            zero=configs.get("stage", 1),
            offload="cpu" if configs.get("optimize_offload", False) else "none",
            along=(SHARD_AXIS,) if _has(mesh, SHARD_AXIS) else (),
            wire_dtype="float16" if strategy.fp16_allreduce else None,
            reduce=reduce,
        )
    if strategy.localsgd:
        local = strategy.localsgd_configs
        return Average(every=local.get("k_steps", 1), begin_step=local.get("begin_step", 1), reduce=reduce)
    if strategy.adaptive_localsgd:
        adaptive = strategy.adaptive_localsgd_configs
        every, begin = adaptive.get("init_k_steps", 1), adaptive.get("begin_step", 1)
        return Average(every=every, begin_step=begin, adaptive=True, reduce=reduce)
    if strategy.dgc:
        dgc = strategy.dgc_configs
        return TopK(
            sparsity=tuple(dgc.get("sparsity", [0.999])),
            rampup_begin_step=dgc.get("rampup_begin_step", 0),
            rampup_steps=dgc.get("rampup_step", 1),
            reduce=reduce,
        )
    return AllReduce(
        # Unfused means one all-reduce per gradient: every parameter closes its own bucket.
        bucket_bytes=int(strategy.fuse_grad_size_in_MB * 2**20) if strategy.fuse_all_reduce_ops else 1,
        wire_dtype="float16" if strategy.fp16_allreduce else None,
        route="hierarchical" if strategy.use_hierarchical_allreduce else "flat",
        host_ranks=strategy.hierarchical_allreduce_inter_nranks if _says_host_ranks(strategy) else None,
        reduce=reduce,
    )


def modules_from_strategy(
    strategy: DistributedStrategy, shape: ModelShape, mesh: tuple[Axis, ...]
) -> tuple[ModuleRule, ...]:
    """Return how modules are computed: precision, recomputation, gathering, stages. One rule says all of a module."""
    settings_by_module: dict[str, dict[str, Any]] = {}
    if strategy.recompute:
        recompute = strategy.recompute_configs
        for name in recompute.get("checkpoints") or units(shape):
            kind = "selective" if recompute.get("selective", False) else "full"
            settings_by_module.setdefault(name, {}).update(
                recompute=kind, offload=recompute.get("enable_offload", False)
            )
    if strategy.sharding:
        for name in strategy.sharding_configs.get("units") or units(shape):
            settings_by_module.setdefault(name, {}).update(unit=True)
    stages = _axis_size(mesh, STAGE_AXIS)
    if stages > 1 or strategy.pipeline:
        configs = strategy.pipeline_configs
        total = stages * configs.get("virtual", 1)
        for name, stage in cut_stages(shape, total, tuple(configs.get("cuts", ()))).items():
            settings_by_module.setdefault(name, {}).update(stage=stage)
    rules = tuple(ModuleRule(match=name, **settings) for name, settings in settings_by_module.items())
    return (*_precision(strategy), *rules)


def schedule_from_strategy(strategy: DistributedStrategy, mesh: tuple[Axis, ...]) -> Schedule:
    """Return the order of micro-batches through the stages."""
    if not (strategy.pipeline or _axis_size(mesh, STAGE_AXIS) > 1):
        return Schedule()
    configs = strategy.pipeline_configs
    kind, virtual = _SCHEDULES[configs.get("schedule_mode", "1F1B")], configs.get("virtual", 1)
    if (kind == "interleaved") != (virtual > 1) and kind != "zero_bubble":
        raise PlanError(
            f'pipeline_configs asks for schedule_mode "{configs.get("schedule_mode", "1F1B")}" with virtual={virtual}: '
            'several stages per rank need "Interleaved" or "ZeroBubble", and "Interleaved" needs virtual of 2 or more.'
        )
    return Schedule(
        kind=kind,
        microbatches=configs.get("accumulate_steps", 1),
        microbatch_rows=configs.get("micro_batch_size"),
        virtual=virtual,
    )


def scaler_from_strategy(strategy: DistributedStrategy) -> Scaler | None:
    """Return the loss scaling of a strategy; None without float16."""
    if not strategy.amp or strategy.amp_dtype != "float16":
        return None
    configs = strategy.amp_configs
    return Scaler(
        initial=configs.get("init_loss_scaling", 32768.0),
        growth_every=configs.get("incr_every_n_steps", 1000),
        growth=configs.get("incr_ratio", 2.0),
        backoff=configs.get("decr_ratio", 0.8),
        backoff_after=configs.get("decr_every_n_nan_or_inf", 2),
        dynamic=configs.get("use_dynamic_loss_scaling", True),
    )


def _says_host_ranks(strategy: DistributedStrategy) -> bool:
    return strategy.use_hierarchical_allreduce and strategy.hierarchical_allreduce_inter_nranks > 1


def _precision(strategy: DistributedStrategy) -> tuple[ModuleRule, ...]:
    if not strategy.amp:
        return ()
    configs = strategy.amp_configs
    pure = configs.get("use_pure_fp16", False) or configs.get("use_pure_bf16", False)
    return (ModuleRule(match="", dtype=strategy.amp_dtype, pure=pure),)


def _axis_size(mesh: tuple[Axis, ...], name: str) -> int:
    return next((axis.size for axis in mesh if axis.name == name), 1)


def _has(mesh: tuple[Axis, ...], name: str) -> bool:
    return _axis_size(mesh, name) > 1

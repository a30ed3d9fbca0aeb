"""`update_from_strategy` and others: a strategy's update, precision, recomputation, pipeline schedule, loss scaling."""

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
from phalanx.strategy.configs import (
    AdaptiveLocalSgdConfigs,
    AmpConfigs,
    DgcConfigs,
    LocalSgdConfigs,
    PipelineConfigs,
    RecomputeConfigs,
    ShardingConfigs,
)

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
        sharding = strategy.config(ShardingConfigs)
        return ReduceScatter(
            zero=sharding.stage,
            offload="cpu" if sharding.optimize_offload else "none",
            along=(SHARD_AXIS,) if _has(mesh, SHARD_AXIS) else (),
            wire_dtype="float16" if strategy.fp16_allreduce else None,
            mirror=sharding.mirror,
            reduce=reduce,
        )
    if strategy.localsgd:
        local = strategy.config(LocalSgdConfigs)
        return Average(every=local.k_steps, begin_step=local.begin_step, reduce=reduce)
    if strategy.adaptive_localsgd:
        adaptive = strategy.config(AdaptiveLocalSgdConfigs)
        return Average(every=adaptive.init_k_steps, begin_step=adaptive.begin_step, adaptive=True, reduce=reduce)
    if strategy.dgc:
        dgc = strategy.config(DgcConfigs)
        return TopK(
            sparsity=tuple(dgc.sparsity),
            rampup_begin_step=dgc.rampup_begin_step,
            rampup_steps=dgc.rampup_step,
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
        recompute = strategy.config(RecomputeConfigs)
        for name in recompute.checkpoints or units(shape):
            kind = "selective" if recompute.selective else "full"
            settings_by_module.setdefault(name, {}).update(recompute=kind, offload=recompute.enable_offload)
    if strategy.sharding:
        for name in strategy.config(ShardingConfigs).units or units(shape):
            settings_by_module.setdefault(name, {}).update(unit=True)
    stages = _axis_size(mesh, STAGE_AXIS)
    if stages > 1 or strategy.pipeline:
        pipeline = strategy.config(PipelineConfigs)
        for name, stage in cut_stages(shape, stages * pipeline.virtual, tuple(pipeline.cuts)).items():
            settings_by_module.setdefault(name, {}).update(stage=stage)
    rules = tuple(ModuleRule(match=name, **settings) for name, settings in settings_by_module.items())
    return (*_precision(strategy), *rules)


def schedule_from_strategy(strategy: DistributedStrategy, mesh: tuple[Axis, ...]) -> Schedule:
    """Return the order of micro-batches through the stages."""
    if not (strategy.pipeline or _axis_size(mesh, STAGE_AXIS) > 1):
        return Schedule()
    pipeline = strategy.config(PipelineConfigs)
    kind, virtual = _SCHEDULES[pipeline.schedule_mode], pipeline.virtual
    if (kind == "interleaved") != (virtual > 1) and kind != "zero_bubble":
        raise PlanError(
            f'pipeline_configs asks for schedule_mode "{pipeline.schedule_mode}" with virtual={virtual}: '
            'several stages per rank need "Interleaved" or "ZeroBubble", and "Interleaved" needs virtual of 2 or more.'
        )
    return Schedule(
        kind=kind,
        microbatches=pipeline.accumulate_steps,
        microbatch_rows=pipeline.micro_batch_size,
        virtual=virtual,
    )


def scaler_from_strategy(strategy: DistributedStrategy) -> Scaler | None:
    """Return the loss scaling of a strategy; None without float16."""
    if not strategy.amp or strategy.amp_dtype != "float16":
        return None
    amp = strategy.config(AmpConfigs)
    return Scaler(
        initial=amp.init_loss_scaling,
        growth_every=amp.incr_every_n_steps,
        growth=amp.incr_ratio,
        backoff=amp.decr_ratio,
        backoff_after=amp.decr_every_n_nan_or_inf,
        dynamic=amp.use_dynamic_loss_scaling,
    )


def _says_host_ranks(strategy: DistributedStrategy) -> bool:
    return strategy.use_hierarchical_allreduce and strategy.hierarchical_allreduce_inter_nranks > 1


def _precision(strategy: DistributedStrategy) -> tuple[ModuleRule, ...]:
    if not strategy.amp:
        return ()
    amp = strategy.config(AmpConfigs)
    pure = amp.use_pure_fp16 or amp.use_pure_bf16
    return (ModuleRule(match="", dtype=strategy.amp_dtype, pure=pure),)


def _axis_size(mesh: tuple[Axis, ...], name: str) -> int:
    return next((axis.size for axis in mesh if axis.name == name), 1)


def _has(mesh: tuple[Axis, ...], name: str) -> bool:
    return _axis_size(mesh, name) > 1

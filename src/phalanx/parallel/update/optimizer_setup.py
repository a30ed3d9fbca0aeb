"""`set_up_optimizer`: add to an optimizer what Plan and strategy ask of its steps: clipping, scaling, EMA and others.

Each part adds its action to the optimizer's steps; `session.StepPhase` states their order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

import phalanx.comm.context as context_of
from phalanx.errors import ConfigError
from phalanx.parallel.model_shape import is_module_held
from phalanx.parallel.optim.elementwise import check_elementwise
from phalanx.parallel.session import Applied, optimizer_record
from phalanx.parallel.stateful import Elsewhere, keep_state
from phalanx.parallel.step.gate import refuse_torch_scaler
from phalanx.parallel.step.param_remap import rebind
from phalanx.plan.mesh import is_sum_of_ranks
from phalanx.strategy import DistributedStrategy
from phalanx.strategy.configs import ClipConfigs, EmaConfigs, LambConfigs, LarsConfigs

logger = logging.getLogger("phalanx.parallel")


def set_up_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    applied: Applied,
    strategy: DistributedStrategy,
    quiet: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Prepare an optimizer for a distributed model whose parameters it trains; others it leaves alone.

    Args:
        optimizer: Any torch optimizer; stays the same object.
        model: The model.
        applied: What was made of it.
        strategy: Says the recipe.
        quiet: Makes a block in which the model's backward passes do not reduce.

    Raises:
        ConfigError: If a setting asks for one model to each optimizer, and this is the optimizer's second; or the
            optimizer looks at whole parameters, of which ranks hold slices.
    """
    rebind(optimizer)
    trained = optimizer_record(optimizer).models
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if model in trained or not any(id(param) in params for param in model.parameters()):
        return
    is_first = not trained
    if not is_first and (applied.plan.step.accumulate > 1 or applied.plan.step.scaler is not None):
        raise ConfigError(
            "one optimizer trains two distributed models, which gradient_merge and float16 do not take. Distribute one "
            "module that holds both, torch.nn.ModuleList([first, second]), or give each an optimizer."
        )
    check_elementwise(optimizer, model)
    if applied.mirror is not None and (strategy.lars or strategy.lamb):
        raise ConfigError(
            f"strategy.{'lars' if strategy.lars else 'lamb'} needs norms of whole parameters, and ranks of this job, "
            "which may leave and join (-n a:b), shard optimizer state. Turn one of the two off."
        )
    trained.add(model)
    why = _why_no_torch_scaler(optimizer, applied)
    if why is not None:
        refuse_torch_scaler(optimizer, why)
    _follow_plan(optimizer, model, applied, quiet)
    if is_first:
        _follow_recipe(optimizer, strategy)
    if strategy.ema:
        from phalanx.parallel.optim.ema import keep_average

        ema = strategy.config(EmaConfigs)
        keep_average(model, optimizer, ema.decay, warmup=ema.warmup)


def _why_no_torch_scaler(optimizer: Optimizer, applied: Applied) -> str | None:
    """Return why torch's GradScaler cannot take the steps of an optimizer, as a sentence without its end; or None."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if applied.plan.step.accumulate > 1:
        return "gradient_merge adds up gradients over several steps, each of which would divide the sum by the scale"
    if applied.plan.step.scaler is not None:
        return "strategy.amp scales its losses already"
    if applied.updaters:
        return "ranks would leave out different steps, as each sees its own gradients (localsgd, dgc)"
    if applied.pipeline is not None or any(map(is_module_held, params)):
        return "ranks that hold slices or stages of the model would leave out different steps, as each sees its own"
    return None


def _follow_plan(
    optimizer: Optimizer, model: nn.Module, applied: Applied, quiet: Callable[[], AbstractContextManager[Any]]
) -> None:
    step = applied.plan.step
    if step.accumulate > 1:
        from phalanx.parallel.optim.gradient_accumulation import AccumulatedGradients, accumulate_gradients

        is_elastic = context_of.current().recovery is not None
        merge = accumulate_gradients(
            optimizer,
            model,
            step.accumulate,
            avg=step.accumulate_mean,
            quiet=nullcontext if is_elastic else quiet,
            reduces_batches=is_elastic,
        )
        is_sum = is_sum_of_ranks(applied.plan)
        gradients = AccumulatedGradients(optimizer, merge, is_sharded=applied.is_sharded, is_sum=is_sum)
        own: Elsewhere = "share" if is_sum else "mean"
        keep_state(optimizer, "gradient_merge", gradients, elsewhere="first" if is_elastic else own)
    if any(rule.pure for rule in applied.plan.modules):
        from phalanx.parallel.precision.master_weights import keep_master_weights

        keep_master_weights(optimizer)
    if step.scaler is not None:
        from phalanx.parallel.precision.loss_scale import LossScale

        scale = LossScale(step.scaler)
        scale.bind(optimizer)
        keep_state(optimizer, "loss_scale", scale, elsewhere="first")
    for updater in applied.updaters:
        updater.bind(optimizer)
    if applied.mirror is not None:
        from phalanx.parallel.update.sharded_optimizer import shard_state

        shard_state(optimizer, applied.mirror)
    if applied.drift is not None:
        applied.drift.bind(optimizer, counts=applied.is_sharded or (applied.reducer is None and bool(applied.updaters)))


def _follow_recipe(optimizer: Optimizer, strategy: DistributedStrategy) -> None:
    if strategy.amp:
        from phalanx.parallel.precision.autocast import accept_amp_init

        accept_amp_init(optimizer)
    if strategy.clip:
        from phalanx.parallel.optim.clip import clip_steps

        limits = strategy.config(ClipConfigs)
        clip_steps(optimizer, max_norm=limits.norm, max_value=limits.value)
    if strategy.lars:
        from phalanx.parallel.optim.lars import use_lars

        lars = strategy.config(LarsConfigs)
        use_lars(
            optimizer,
            coeff=lars.lars_coeff,
            weight_decay=lars.lars_weight_decay,
            epsilon=lars.epsilon,
            exclude=lars.exclude_from_weight_decay,
        )
    if strategy.lamb:
        from phalanx.parallel.optim.lamb import use_lamb

        lamb = strategy.config(LambConfigs)
        use_lamb(
            optimizer,
            weight_decay=lamb.lamb_weight_decay,
            exclude=lamb.exclude_from_weight_decay,
        )

"""`px.auto_parallel`: capture a model and search its fastest Plan on a cluster, with an optimality bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.layers import Layers
from phalanx.auto.capture.module_calls import list_module_calls
from phalanx.auto.capture.step import capture
from phalanx.auto.captured_model import batch_size_of, build_machine, read_layers, step_precision
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.layer_limits import read_limits
from phalanx.auto.model_search import ModelSearch
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.search_restrictions import (
    explain_unsearched_shares,
    find_sharding_obstacles,
    find_zero_bubble_obstacle,
    list_unsearched_experts,
    list_unsearched_pipelines,
    list_unsearched_sequences,
)
from phalanx.auto.planner.strategies import StrategyCatalog
from phalanx.auto.planner.to_plan import check_base
from phalanx.auto.planner.unequal import UnequalRanks
from phalanx.auto.predict.prediction import USABLE
from phalanx.auto.search.request import (
    check_arguments,
    read_size,
)
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import tr
from phalanx.plan.rules.balance import check_balance
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape
from phalanx.strategy import DistributedStrategy


def auto_parallel(
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None = None,
    *,
    cluster: str | Cluster | None = None,
    optimizer: Optimizer | str = "adam",
    limits: Iterable[str] = (),
    memory: float | str | None = None,
    return_outputs: bool = True,
    strategy: DistributedStrategy | None = None,
    top_k: int = 5,
    time_limit: float | None = None,
    alternatives: Iterable[str] = (),
) -> PlanResult:
    """Return the fastest Plan to train a model on a cluster, with a proof of how good it is.

    Not collective, and needs no device of the cluster: the model is captured under fake tensors, where it is.

    Args:
        model: A plain module.
        sample: One global batch, as `phalanx.auto.capture.step` takes it: with a loss, its last column is the target.
            Only shapes and dtypes count.
        loss_fn: Takes the model's output and the target.
        cluster: Words such as `h100x8,nodes=16`, `herex2` or `cpux2`, a file, or a cluster; when None, in a job the
            ranks of it (`px.auto_parallel`), else this host, as measured by `phalanx calibrate`.
        optimizer: The optimizer that trains the model, or one of `sgd`, `momentum` and `adam`.
        limits: What is fixed: of the parallel config, `tp<=2`, `dp=4`, `zero=0`, `recompute=none`; of layers,
            `classifier.*=whole`, or `column`, `row`, `vocab`, `expert`. Repeated blocks are cut alike: a limit on one
            is on all.
        memory: Bytes that a rank may use, or words such as `8GiB`; what the cluster's devices have when None.
        return_outputs: Whether the loop keeps what the model returns, as after `out = model(x)`. False if it lets go of
            that as soon as it has the loss, `loss_fn(model(x), y).backward()`, as `px.train_step` does.
        strategy: Settings of everything that the planner does not decide, such as `amp`.
        top_k: Parallel configs of which the fastest Plan is proved.
        time_limit: Seconds after which the best so far is returned with its gap.
        alternatives: Limits that the answer's `why_not` will be asked for, so that a wrong word is an error before the
            search and not after it.

    Raises:
        ConfigError: If the model cannot be captured, or something asked for is not known.
        PlanError: If no Plan fits; says how many bytes every one needs. If the model makes sparse gradients.
    """
    base = strategy or DistributedStrategy()
    check_base(base)
    _check_numbers(top_k, time_limit)
    memory_bytes = None if memory is None else _bytes_of(memory)
    check_arguments(model, limits, memory_bytes, top_k)
    named_cluster = read_cluster("here" if cluster is None else cluster)
    target = named_cluster.weakest()
    room = USABLE * target.nodes[0].device.memory if memory_bytes is None else memory_bytes
    _check_sparse(model)
    captured = capture(model, sample, loss_fn)
    calls, limit_words = list_module_calls(captured), tuple(limits)
    read_limits((*limit_words, *alternatives), calls)
    unsharded = find_sharding_obstacles(captured)
    layers, unstaged = read_layers(model, captured, calls, optimizer, return_outputs=return_outputs)
    precision = step_precision(captured, base)
    work = LayerWork(layers, build_machine(target, precision))
    unsplit = find_zero_bubble_obstacle(layers, base)
    search = ModelSearch(model, sample, loss_fn, target, work, room, top_k, time_limit, unstaged, unsharded, unsplit)
    search.unequal, unbalanced = _find_unequal(named_cluster, layers, precision, memory_bytes, base)
    searched = search(limit_words)
    whole_loss = (
        None
        if loss_fn is None or target.devices == 1
        else tr("a loss over logits sharded by class (`vocab` of a head), as the loss function takes full logits")
    )
    in_stages = list_unsearched_pipelines(searched.configs, unsplit)
    experts = list_unsearched_experts(calls, target.devices)
    sequences = list_unsearched_sequences(searched.configs, search.explain_unshared())
    in_layers = (*_explain_whole_tokens(search), *in_stages, *experts, *(sequences if target.devices > 1 else ()))
    offload = tr("offload of parameters, optimizer state or activations to the host's memory")
    shares = explain_unsearched_shares(named_cluster)
    not_tried = (unstaged, *unsharded.values(), *in_layers, whole_loss, unbalanced, offload, shares)
    return PlanResult(
        search=searched,
        catalog=StrategyCatalog(layers, search.allowed),
        work=work,
        room=room,
        where=str(named_cluster),
        base=base,
        left_out=tuple(dict.fromkeys(why for why in not_tried if why is not None)),
        search_again=lambda more: search((*limit_words, *more)),
        alone=lambda: search.alone_s(memory_bytes),
        usd_per_hour=target.usd_per_hour,
    )


def _find_unequal(
    cluster: Cluster, layers: Layers, precision: str, memory: float | None, base: DistributedStrategy
) -> tuple[UnequalRanks | None, str | None]:
    """Return the ranks of a cluster whose devices differ, and why they cannot share batches by their speeds, if so."""
    batch = batch_size_of(layers.calls)
    if cluster.is_uniform or not batch:
        return None, None
    replicas = base.logical_replicas or None
    balanced = base.model_copy(update={"balance": "samples" if replicas is None else "replicas"})
    try:
        check_balance(plan_from_strategy(balanced, ModelShape(layers.captured.parameters), cluster.devices))
    except PlanError as error:
        return None, tr("parts of a batch by the speed of unequal devices, as {why}", why=error)
    unequal = UnequalRanks(cluster, layers, precision, batch, memory=memory, replicas=replicas)
    return (unequal, None) if unequal.is_worth_it else (None, None)


def _check_numbers(top_k: object, time_limit: object) -> None:
    if not isinstance(top_k, int):
        raise ConfigError(
            tr("auto_parallel was asked for {name}={value}. Give a number above 0.", name="top_k", value=top_k)
        )
    if time_limit is not None and not (isinstance(time_limit, int | float) and time_limit >= 0):
        raise ConfigError(
            tr(
                "auto_parallel was asked for {name}={value!r}. Give seconds, 0 or more, or None for a complete search.",
                name="time_limit",
                value=time_limit,
            )
        )


def _bytes_of(memory: float | str) -> float:
    size = read_size(memory)
    if size is None:
        raise ConfigError(
            tr(
                "auto_parallel was asked for {name}={value!r}. Give bytes, or an amount such as '8GiB', '500MiB' or "
                "'8GB'.",
                name="memory",
                value=memory,
            )
        )
    return size


def _explain_whole_tokens(search: ModelSearch) -> tuple[str, ...]:
    return (
        ()
        if search.allowed.shards_tokens
        else (tr("activations sharded over tokens, as the model's code fails on them"),)
    )


def _check_sparse(model: nn.Module) -> None:
    sparse = (name for name, module in model.named_modules() if getattr(module, "sparse", None) is True)
    name = next(sparse, None)
    if name is not None:
        raise PlanError(
            tr(
                "auto_parallel was asked for a Plan of a model whose module {name!r} makes sparse gradients, which "
                "ranks cannot add up. Build it with sparse=False.",
                name=name,
            )
        )

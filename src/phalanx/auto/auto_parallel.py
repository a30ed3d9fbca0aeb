"""`px.auto_parallel`: capture a model, find its fastest Plan on a cluster, and say how good that is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.layers import ALL_STRATEGIES, Layers, LayerStrategy, ShardedRegion
from phalanx.auto.capture.module_calls import ModuleCall, list_module_calls
from phalanx.auto.capture.partition_points import PartitionPoints
from phalanx.auto.capture.shape_check import check_runs_sharded, find_shardable_layers
from phalanx.auto.capture.step import capture
from phalanx.auto.cost.machine_model import (
    OPTIMIZER_STATES,
    MachineModel,
    build_datasheet_machine,
    build_measured_machine,
)
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.from_plan import read_plan
from phalanx.auto.planner.planner import Candidate, DoesNotFitError, PlanSearch, list_configs, search_plans
from phalanx.auto.planner.result import PlanResult
from phalanx.auto.planner.simulation import simulate_assignment
from phalanx.auto.planner.to_plan import check_base
from phalanx.auto.planner.unsupported import (
    explain_empty_space,
    explain_unsearched_limits,
    find_pieces_or_reason,
    find_sharding_obstacles,
    find_zero_bubble_obstacle,
    list_unsearched_pipelines,
)
from phalanx.auto.predict.prediction import USABLE
from phalanx.auto.search.request import (
    PLAN_KNOBS,
    Limit,
    check_arguments,
    is_config_limit,
    read_layer_limit,
    read_limit,
)
from phalanx.auto.simulate.values import SimulatedStep
from phalanx.auto.units import format_names, read_size
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import suggest, tr
from phalanx.plan.value import Plan, matches
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
            `classifier.*=whole`, or `column`, `row`, `vocab`. Repeated blocks are cut alike: a limit on one is on all.
        memory: Bytes that a rank may use, or words such as `8GiB`; what the cluster's devices have when None.
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
    target = read_cluster("here" if cluster is None else cluster).weakest()
    room = USABLE * target.nodes[0].device.memory if memory_bytes is None else memory_bytes
    _check_sparse(model)
    captured = capture(model, sample, loss_fn)
    calls, limit_words = list_module_calls(captured), tuple(limits)
    _read_limits((*limit_words, *alternatives), calls)
    pieces, unstaged = find_pieces_or_reason(model, captured, calls)
    unsharded = find_sharding_obstacles(captured)
    layers = _build_layers(model, captured, calls, pieces, optimizer)
    machine = build_machine(target, _precision(captured, base))
    work = LayerWork(captured, calls, layers.blocks, machine.operators)
    unsplit = find_zero_bubble_obstacle(layers, base)
    search = _Search(
        model, sample, loss_fn, target, machine, room, top_k, time_limit, layers, work, unstaged, unsharded, unsplit
    )
    searched = search(limit_words)
    whole_loss = (
        None
        if loss_fn is None or target.devices == 1
        else tr("a loss over logits sharded by class (`vocab` of a head), as the loss function takes full logits")
    )
    in_stages = list_unsearched_pipelines(searched.configs, unsplit)
    not_tried = (unstaged, *unsharded.values(), *_explain_whole_tokens(search), *in_stages, whole_loss)
    return PlanResult(
        search=searched,
        layers=search.layers,
        work=work,
        machine=machine,
        room=room,
        where=str(target),
        base=base,
        left_out=tuple(dict.fromkeys(why for why in not_tried if why is not None)),
        search_again=lambda more: search((*limit_words, *more)),
        alone=lambda: search.alone_s(memory_bytes),
        usd_per_hour=target.usd_per_hour,
    )


def simulate_plan(
    plan: Plan,
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None = None,
    *,
    cluster: str | Cluster | None = None,
    optimizer: Optimizer | str = "adam",
) -> SimulatedStep:
    """Return a step of a Plan, also of one edited by hand, event by event.

    Not collective, and needs no device of the cluster, as `auto_parallel`, whose other arguments these are.

    Args:
        plan: The Plan.
        model: A plain module.
        sample: One global batch.
        loss_fn: Takes the model's output and the target.
        cluster: What runs the Plan; this host when None.
        optimizer: The optimizer that trains the model, or its kind.

    Raises:
        ConfigError: If the model cannot be captured.
        PlanError: If the Plan is for another number of ranks, or says something that has no price.
    """
    target = read_cluster("here" if cluster is None else cluster).weakest()
    if target.devices != plan.world_size:
        raise PlanError(
            tr(
                "The Plan is for {ranks} ranks, and the cluster {cluster} has {devices} devices. Name another cluster.",
                ranks=plan.world_size,
                cluster=target,
                devices=target.devices,
            )
        )
    captured = capture(model, sample, loss_fn)
    calls = list_module_calls(captured)
    pieces, _ = find_pieces_or_reason(model, captured, calls)
    layers = _build_layers(model, captured, calls, pieces, optimizer)
    dtype = next((rule.dtype for rule in plan.modules if not rule.match and rule.dtype), None)
    machine = build_machine(target, _precision_of(dtype or _parameter_dtype(captured)))
    work = LayerWork(captured, calls, layers.blocks, machine.operators)
    per_node = target.nodes[0].devices
    assignment = read_plan(plan, layers, batch_size=_batch_size(calls), per_node=per_node)
    simulated = simulate_assignment(assignment, layers, work, machine)
    hour = target.usd_per_hour
    price = None if hour is None else hour / 3600 * simulated.simulation.step_time_s
    return replace(simulated, usd_per_step=price)


def _build_layers(
    model: nn.Module,
    captured: CapturedStep,
    calls: tuple[ModuleCall, ...],
    pieces: PartitionPoints | None,
    optimizer: Optimizer | str,
) -> Layers:
    return Layers(
        captured=captured,
        calls=calls,
        shardable=find_shardable_layers(model),
        pieces=pieces,
        optimizer=_optimizer_kind(optimizer),
        blocks=_outermost(captured.blocks),
    )


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


def _explain_whole_tokens(search: _Search) -> tuple[str, ...]:
    return (
        ()
        if search.layers.shards_tokens
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


def build_machine(cluster: Cluster, precision: str) -> MachineModel:
    """Return the speed of a cluster: as measured where it was, else by its devices' data sheets."""
    if cluster.measured is not None:
        return build_measured_machine(cluster.measured.at(cluster.devices))
    return build_datasheet_machine(cluster, precision)


def _precision(captured: CapturedStep, strategy: DistributedStrategy) -> str:
    """Return what products are computed in."""
    return _precision_of(strategy.amp_dtype if strategy.amp else _parameter_dtype(captured))


def _precision_of(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")


def _parameter_dtype(captured: CapturedStep) -> str:
    return next((param.dtype for param in captured.parameters), "float32")


_STYLED_KIND = {"column": "Linear", "row": "Linear", "vocab": "Embedding"}
"""The kind of layer that a style applies to."""


@dataclass
class _Search:
    """A search of one model, which learns over several what of it does not run on cut activations."""

    model: nn.Module
    sample: Any
    loss_fn: LossFunction | None
    cluster: Cluster
    machine: MachineModel
    room: float
    top_k: int
    time_limit: float | None
    layers: Layers
    work: LayerWork
    unstaged: str | None
    """Why it is not in stages, where it cannot be."""

    unsharded: Mapping[bool, str]
    """Why it is not sharded, with stages and without, where it cannot be."""

    unsplit: str | None
    """Why gradients of its weights cannot be computed after those of inputs; None if they can be."""

    runs: dict[ShardedRegion, bool] = field(default_factory=dict)

    def __call__(self, limits: tuple[str, ...]) -> PlanSearch:
        """Search, and repeat without strategies that fail, until every candidate runs."""
        shape, unwanted = _read_limits(limits, self.layers.calls)
        stop = None if self.time_limit is None else time.monotonic() + self.time_limit
        configs = [
            config
            for config in self._arrangements()
            if all(candidate.allows(_get_knobs(config)) for candidate in shape)
        ]
        if not configs:
            raise PlanError(
                explain_empty_space(
                    limits, explain_unsearched_limits(shape, self.unstaged, self.unsharded, self.unsplit)
                )
            )
        while True:
            layers = replace(self.layers, excluded=unwanted)
            result: PlanSearch | DoesNotFitError
            try:
                result = search_plans(
                    layers,
                    self.work,
                    configs,
                    self.machine,
                    room=self.room,
                    top_k=self.top_k,
                    time_limit=None if stop is None else stop - time.monotonic(),
                    limits=limits,
                )
            except DoesNotFitError as error:
                result = error
            candidates = result.top_k if isinstance(result, PlanSearch) else (result.least,)
            failing = {region for candidate in candidates for region in self._failing(candidate)}
            if not failing:
                if isinstance(result, PlanSearch):
                    return result
                raise PlanError(str(result))
            # Other strategies that shard tokens would most likely meet the same code.
            apart = {
                region
                for region in failing
                if any("tokens" in (strategy.input_state, strategy.output_state) for _, strategy in region.strategies)
            }
            self.layers = replace(
                self.layers,
                failing_regions=self.layers.failing_regions | (failing - apart),
                shards_tokens=self.layers.shards_tokens and not apart,
            )

    def alone_s(self, memory: float | None) -> float | None:
        """Return the seconds of a step of one process alone, where that was measured; None too if it does not fit.

        Args:
            memory: Bytes that it may use; those of the machine when None.
        """
        measured, blocks = self.cluster.measured, self.layers.blocks
        if measured is None or 1 not in measured.rates or self.cluster.devices == 1:
            return None
        layers, machine = replace(self.layers, excluded=frozenset()), build_measured_machine(measured.at(1))
        work = LayerWork(layers.captured, layers.calls, blocks, machine.operators)
        configs = list_configs(1, has_blocks=bool(blocks), rows=_batch_size(layers.calls))
        room = USABLE * measured.memory if memory is None else memory
        try:
            return search_plans(
                layers, work, configs, machine, room=room, top_k=1, time_limit=self.time_limit
            ).best.step_time_s
        except PlanError:
            return None

    def _arrangements(self) -> Iterator[ParallelConfig]:
        pieces = self.layers.pieces
        configs = list_configs(
            self.cluster.devices,
            has_blocks=bool(self.layers.blocks),
            per_node=self.cluster.nodes[0].devices,
            pieces=1 if pieces is None else len(pieces.starts),
            rows=_batch_size(self.layers.calls),
            may_split=self.unsplit is None,
        )
        return (config for config in configs if not config.zero or (config.stages > 1) not in self.unsharded)

    def _failing(self, candidate: Candidate) -> Iterator[ShardedRegion]:
        """Yield regions of a candidate in which the model's code fails on sharded activations."""
        for places in _find_regions(self.layers.calls, candidate.call_strategies):
            strategies = {call.path: strategy for call, strategy in places if strategy.style is not None}
            parts = candidate.config.model
            region = ShardedRegion(parts, frozenset((call.template, strategy) for call, strategy in places))
            if region not in self.runs:
                self.runs[region] = check_runs_sharded(self.model, self.sample, self.loss_fn, strategies, parts) is None
            if not self.runs[region]:
                yield region


def _find_regions(
    calls: tuple[ModuleCall, ...], strategies: tuple[LayerStrategy, ...]
) -> list[list[tuple[ModuleCall, LayerStrategy]]]:
    """Return runs of calls that hand activations to each other cut."""
    region: dict[int, int] = {}
    for position, (call, strategy) in enumerate(zip(calls, strategies, strict=True)):
        if strategy.input_state == strategy.output_state == "whole":
            continue
        region[position] = position
        for source in call.inputs:
            if strategy.input_state_of(source) != "whole":
                assert isinstance(source.source, int)
                source_region = region[source.source]
                region = {
                    member: region[position] if root == source_region else root for member, root in region.items()
                }
    roots = dict.fromkeys(region.values())
    return [
        [(calls[member], strategies[member]) for member, root in region.items() if root == chosen] for chosen in roots
    ]


def _get_knobs(config: ParallelConfig) -> dict[str, int | str]:
    return {
        "dp": config.data,
        "tp": config.model,
        "pp": config.stages,
        "vpp": config.virtual,
        "zero": config.zero,
        "micro": config.micro_batches,
        "schedule": config.schedule,
        "recompute": config.recompute,
    }


def _read_limits(
    limits: tuple[str, ...], calls: tuple[ModuleCall, ...]
) -> tuple[list[Limit], frozenset[tuple[int, LayerStrategy]]]:
    """Return limits of the config, and the strategies that limits of layers exclude."""
    shape: list[Limit] = []
    unwanted: set[tuple[int, LayerStrategy]] = set()
    paths = {call.path: call.template for call in calls if not call.is_glue}
    for word in limits:
        if is_config_limit(word):
            shape.append(read_limit(word, PLAN_KNOBS))
            continue
        name, style = read_layer_limit(word)
        matching = {like for path, like in paths.items() if matches(name, path)}
        if not matching:
            raise ConfigError(
                tr(
                    "Invalid limit {said!r}: the model calls no layer {layer!r}.{nearest} It calls {known}.",
                    said=word,
                    layer=name,
                    nearest=suggest(name, paths),
                    known=format_names(paths),
                )
            )
        _check_kinds(word, style, [call for call in calls if call.template in matching])
        unwanted |= {
            (like, strategy) for like in matching for strategy in ALL_STRATEGIES if (strategy.style or "whole") != style
        }
    return shape, frozenset(unwanted)


def _check_kinds(limit: str, style: str, calls: Iterable[ModuleCall]) -> None:
    """Raise unless layers are of the kind that this style applies to."""
    able = _STYLED_KIND.get(style)
    wrong = None if able is None else next((call for call in calls if call.kind != able), None)
    if wrong is not None:
        why = (
            tr(
                " The loss is planned on whole logits. To cut head and loss, px.shard(model, {{{layer!r}: 'vocab'}}) "
                "with px.vocab_cross_entropy or px.SoftmaxCrossEntropyExpand.",
                layer=wrong.path,
            )
            if (style, wrong.kind) == ("vocab", "Linear")
            else ""
        )
        raise PlanError(
            tr(
                "Invalid limit {said!r}: {layer!r} is a {kind}, and {style!r} is a style of {able}. Use another.{why}",
                said=limit,
                layer=wrong.path,
                kind=wrong.kind,
                style=style,
                able=able,
                why=why,
            )
        )


def _batch_size(calls: tuple[ModuleCall, ...]) -> int:
    """Return the rows of the sample; 0 if no tensor of it is read."""
    shapes = (
        s.value.shape for call in calls for s in call.inputs if isinstance(s.source, str) and "sample" in s.source
    )
    return next((shape[0] for shape in shapes if shape), 0)


def _optimizer_kind(optimizer: Optimizer | str) -> str:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZER_STATES:
            raise ConfigError(
                tr(
                    "Asked for the optimizer {said!r}. Give {known}, or a torch optimizer.",
                    said=optimizer,
                    known=", ".join(OPTIMIZER_STATES),
                )
            )
        return optimizer
    group: Mapping[str, Any] = optimizer.param_groups[0]
    if "betas" in group:
        return "adam"
    return "momentum" if group.get("momentum") else "sgd"


def _outermost(blocks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    paths = sorted({path for group in blocks for path in group}, key=len)
    outermost: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost.append(path)
    return tuple(outermost)

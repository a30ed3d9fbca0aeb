"""`ModelSearch`: run the planner for a model, again without strategies under which its code fails."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from phalanx.auto.capture.layers import LayerStrategy, ShardedRegion
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.captured_model import batch_size_of
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import build_measured_machine
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.layer_limits import read_limits
from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.planner import DoesNotFitError, PlanSearch, list_configs, search_plans
from phalanx.auto.planner.search_restrictions import (
    explain_empty_space,
    explain_unsearched_limits,
    find_expert_obstacle,
)
from phalanx.auto.planner.strategies import StrategyCatalog, StrategyFilter
from phalanx.auto.planner.unequal import UnequalRanks
from phalanx.auto.predict.prediction import USABLE
from phalanx.auto.search.request import Limit
from phalanx.auto.sequence_check import check_runs_in_parts
from phalanx.auto.shape_check import check_runs_sharded
from phalanx.cluster.spec.cluster import Cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import PlanError
from phalanx.i18n import tr
from phalanx.plan.styles import ContextAttention


@dataclass
class ModelSearch:
    """A search of one model, which learns over several what of it does not run on cut activations."""

    model: nn.Module
    sample: Any
    loss_fn: LossFunction | None
    cluster: Cluster
    work: LayerWork
    room: float
    top_k: int
    time_limit: float | None
    unstaged: str | None
    """Why it is not in stages, where it cannot be."""

    unsharded: Mapping[bool, str]
    """Why it is not sharded, with stages and without, where it cannot be."""

    unsplit: str | None
    """Why gradients of its weights cannot be computed after those of inputs; None if they can be."""

    allowed: StrategyFilter = field(default_factory=StrategyFilter)
    """Learned over searches."""

    unshared: dict[ContextAttention, str] = field(default_factory=dict)
    """Why no ranks share a sequence this way: its code failed on a part. Learned over searches."""

    runs: dict[ShardedRegion, bool] = field(default_factory=dict)
    _shared_runs: dict[tuple[int, ContextAttention, frozenset[int]], str | None] = field(default_factory=dict)
    unequal: UnequalRanks | None = None
    """Ranks that differ and can share a batch by their speeds, in place of counting as the weakest."""

    def __call__(self, limits: tuple[str, ...]) -> PlanSearch:
        """Search, and repeat without strategies that fail, until every candidate runs."""
        config_limits, excluded = read_limits(limits, self.work.layers.calls)
        stop = None if self.time_limit is None else time.monotonic() + self.time_limit
        configs = [
            config
            for config in self._list_allowed_configs()
            if all(limit.allows(_get_knobs(config)) for limit in config_limits)
        ]
        if not configs and not self._list_unequal(config_limits, StrategyCatalog(self.work.layers, self.allowed)):
            undealt = find_expert_obstacle(self.work.layers.calls)
            reasons = self.unstaged, self.unsharded, self.unsplit, undealt, self.explain_unshared()
            raise PlanError(explain_empty_space(limits, explain_unsearched_limits(config_limits, *reasons)))
        while True:
            catalog = StrategyCatalog(self.work.layers, replace(self.allowed, excluded=excluded))
            result: PlanSearch | DoesNotFitError | None
            try:
                result = (
                    search_plans(
                        catalog,
                        self.work,
                        configs,
                        room=self.room,
                        top_k=self.top_k,
                        time_limit=None if stop is None else stop - time.monotonic(),
                        limits=limits,
                    )
                    if configs
                    else None
                )
            except DoesNotFitError as error:
                result = error
            if shared := self._list_unequal(config_limits, catalog):
                result = _merge(result, shared, self.top_k)
            assert result is not None
            candidates = result.top_k if isinstance(result, PlanSearch) else (result.least,)
            failure = next(filter(None, map(self._find_sharing_failure, candidates)), None)
            if failure is not None:
                configs = [config for config in configs if self._may_share(config)]
                if not configs:
                    raise PlanError(explain_empty_space(limits, tr(" (not searched: {why})", why=failure)))
                continue
            failing = {region for candidate in candidates for region in self._failing(candidate)}
            if not failing:
                if isinstance(result, PlanSearch):
                    return result
                raise PlanError(str(result))
            # Other strategies that shard tokens would most likely meet the same code.
            token_regions = {
                region
                for region in failing
                if any("tokens" in (strategy.input_state, strategy.output_state) for _, strategy in region.strategies)
            }
            self.allowed = StrategyFilter(
                failing_regions=self.allowed.failing_regions | (failing - token_regions),
                shards_tokens=self.allowed.shards_tokens and not token_regions,
            )

    def _list_unequal(self, limits: Sequence[Limit], catalog: StrategyCatalog) -> list[Candidate]:
        """Return what ranks that differ take where they share a batch by their speeds."""
        if self.unequal is None:
            return []
        has_blocks = bool(self.work.layers.blocks)
        configs = (
            config
            for config in self.unequal.configs(has_blocks=has_blocks)
            if all(limit.allows(_get_knobs(config)) for limit in limits)
            and not (config.zero and False in self.unsharded)
        )
        candidates = (self.unequal.candidate(config, catalog) for config in configs)
        return [candidate for candidate in candidates if candidate is not None]

    def alone_s(self, memory: float | None) -> float | None:
        """Return the seconds of a step of one process alone, where that was measured; None too if it does not fit.

        Args:
            memory: Bytes that it may use; those of the machine when None.
        """
        measured, layers = self.cluster.measured, self.work.layers
        if measured is None or 1 not in measured.rates or self.cluster.devices == 1:
            return None
        work, catalog = LayerWork(layers, build_measured_machine(measured.at(1))), StrategyCatalog(layers, self.allowed)
        configs = list_configs(1, has_blocks=bool(layers.blocks), batch_size=batch_size_of(layers.calls))
        room = USABLE * measured.memory if memory is None else memory
        try:
            return search_plans(catalog, work, configs, room=room, top_k=1, time_limit=self.time_limit).best.step_time_s
        except PlanError:
            return None

    def _list_allowed_configs(self) -> Iterator[ParallelConfig]:
        layers, points = self.work.layers, self.work.layers.partition_points
        configs = list_configs(
            self.cluster.devices,
            has_blocks=bool(layers.blocks),
            per_node=self.cluster.nodes[0].devices,
            max_stages=1 if points is None else len(points.starts),
            batch_size=batch_size_of(layers.calls),
            may_split=self.unsplit is None,
            expert_degrees=layers.expert_degrees,
            context_degrees=() if layers.sequence is None else layers.sequence.degrees(self.cluster.devices),
        )
        return (
            config
            for config in configs
            if (not config.zero or (config.stages > 1) not in self.unsharded) and self._may_share(config)
        )

    def _may_share(self, config: ParallelConfig) -> bool:
        return config.context == 1 or config.attention not in self.unshared

    def explain_unshared(self) -> str | None:
        """Return why no ranks share a sequence, or none in one of the ways; None if all were searched."""
        return self.work.layers.sequence_obstacle or next(iter(self.unshared.values()), None)

    def _find_sharing_failure(self, candidate: Candidate) -> str | None:
        """Return why the model's code fails where ranks share a sequence as a candidate has it; None if it runs.

        If it fails whichever way keys and values travel, it would fail with other numbers of ranks too.
        """
        config = candidate.config
        if config.context == 1:
            return None
        failure = self._try_sharing(config, config.attention)
        if failure is not None:
            self.unshared[config.attention] = failure
            other: ContextAttention = "ring" if config.attention == "all_gather" else "all_gather"
            if (fails_too := self._try_sharing(config, other)) is not None:
                self.unshared[other] = fails_too
        return failure

    def _try_sharing(self, config: ParallelConfig, way: ContextAttention) -> str | None:
        blocks = self.work.layers.sequence
        assert blocks is not None  # or there are no such configs
        rows = frozenset((config.batch_size // config.data, -(-config.batch_size // config.data)))
        run = config.context, way, rows
        if run not in self._shared_runs:
            why = check_runs_in_parts(self.model, self.sample, self.loss_fn, blocks, config.context, rows=rows, way=way)
            self._shared_runs[run] = why and tr("context parallel, as {why}", why=why)
        return self._shared_runs[run]

    def _failing(self, candidate: Candidate) -> Iterator[ShardedRegion]:
        """Yield regions of a candidate in which the model's code fails on sharded activations."""
        for places in _find_regions(self.work.layers.calls, candidate.call_strategies):
            strategies = {call.path: strategy for call, strategy in places if strategy.style is not None}
            parts = candidate.config.model
            region = ShardedRegion(parts, frozenset((call.template, strategy) for call, strategy in places))
            if region not in self.runs:
                self.runs[region] = check_runs_sharded(self.model, self.sample, self.loss_fn, strategies, parts) is None
            if not self.runs[region]:
                yield region


def _merge(result: PlanSearch | DoesNotFitError | None, shared: list[Candidate], top_k: int) -> PlanSearch:
    """Return a search with candidates beside it whose seconds are their own bounds."""
    before = result.top_k if isinstance(result, PlanSearch) else ()
    bound = result.bound if isinstance(result, PlanSearch) else math.inf
    configs = result.configs if isinstance(result, PlanSearch) else ()
    ordered = sorted((*before, *shared), key=lambda candidate: candidate.step_time_s)
    return PlanSearch(
        top_k=tuple(ordered[:top_k]),
        bound=min(bound, *(candidate.bound for candidate in shared)),
        configs=(*configs, *(candidate.config for candidate in shared)),
        listed=(result.listed if isinstance(result, PlanSearch) else 0) + len(shared),
    )


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
        "ep": config.experts,
        "cp": config.context,
        "attention": config.attention if config.context > 1 else "none",
        "pp": config.stages,
        "vpp": config.virtual,
        "zero": config.zero,
        "micro": config.micro_batches,
        "schedule": config.schedule,
        "recompute": config.recompute,
    }

"""`build_problem`: the strategies of each layer under a parallel config, as the problem that a solver takes (pure).

A strategy is a style of `px.shard`, or none. Between layers whose ranks read the same samples, activations are
replicated or sharded along their last dim; a strategy says in which state it takes and returns them, and neighbours
must agree. Layers that are cut over ranks that read other samples take and give a rank's own rows whole, so these
strategies do not depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.auto.capture.layers import EXPERTS, PARTS, WHOLE, Layers, LayerStrategy, ShardedRegion
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.cost.layer_strategy import LayerCostModel
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.solver.problem import LayerNode, StepProblem, TransitionCost


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """The problem of a parallel config, and the strategies that its options stand for."""

    problem: StepProblem
    strategies: Mapping[str, tuple[LayerStrategy, ...]]
    """By decision, in the order of the options."""


class CatalogKey(NamedTuple):
    """What of a parallel config decides which strategies exist."""

    model: int
    by_rows: int
    """Ranks that read other samples, over which layers may be cut; 1 if they may not."""

    experts: int
    """Ranks that hold one copy of experts together."""

    in_stages: bool
    leaves_parts: bool
    """Whether rows divide among all ranks, and no backward pass is taken apart or recomputed by operators."""


@dataclass(frozen=True, slots=True)
class StrategySets:
    """The strategies of the calls, and which of them go together."""

    strategies: Mapping[str, tuple[LayerStrategy, ...]]
    """By decision, the unsharded one first."""

    transitions: tuple[TransitionCost, ...]
    forbidden: tuple[frozenset[tuple[str, int]], ...]
    needed: frozenset[tuple[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFilter:
    """Strategies that a search does without."""

    excluded: frozenset[tuple[int, LayerStrategy]] = frozenset()
    """Those that the user does not want, by `ModuleCall.template`."""

    failing_regions: frozenset[ShardedRegion] = frozenset()
    """Those with which the model's code does not run together."""

    shards_tokens: bool = True
    """Whether activations may be sharded over their tokens between layers."""


class StrategyCatalog:
    """The strategies of a model, listed once for all configs that share them."""

    def __init__(self, layers: Layers, allowed: StrategyFilter = StrategyFilter()) -> None:
        self.layers, self._allowed = layers, allowed
        self._cache: dict[CatalogKey, StrategySets] = {}

    def of(self, config: ParallelConfig) -> StrategySets:
        """Return the strategies under a parallel config."""
        divides = config.batch_size % (config.data * config.model * config.micro_batches) == 0
        leaves_parts = config.model > 1 and divides and config.recompute != "selective" and not config.zero_bubble
        by_rows = config.data if config.shards_over_data else 1
        kind = CatalogKey(config.model, by_rows, config.experts, config.stages > 1, leaves_parts)
        if kind not in self._cache:
            self._cache[kind] = self._list_strategies(kind)
        return self._cache[kind]

    def _list_strategies(self, kind: CatalogKey) -> StrategySets:
        enumeration = _Enumeration(self.layers, self._allowed, kind)
        strategies = {str(like): enumeration.strategies(alike[0]) for like, alike in self.layers.index.alike.items()}
        # Ranks that read the same samples and cut no layer would all do the same.
        needed = frozenset(_list_sharded(strategies)) if kind.model > 1 else frozenset[tuple[str, int]]()
        return StrategySets(
            strategies, tuple(enumeration.transitions(strategies)), tuple(enumeration.forbidden(strategies)), needed
        )


def build_problem(work: LayerWork, config: ParallelConfig, sets: StrategySets, room: float = math.inf) -> ConfigProblem:
    """Return the problem of choosing strategies under one parallel config.

    Args:
        work: Of the model on a machine.
        config: Of the ranks.
        sets: Its strategies.
        room: Bytes that each rank has.
    """
    cost = LayerCostModel(work, config)
    nodes: list[LayerNode] = []
    for position, work_of_call in enumerate(work.calls_under(config)):
        call, decision = work_of_call.call, str(work_of_call.call.template)
        name = f"{position}:{call.path or call.kind}"
        nodes.append(
            LayerNode(
                name=name,
                decision=decision,
                options=cost.options(work_of_call, sets.strategies[decision]),
                block="" if config.recompute == "none" else work_of_call.block,
            )
        )
    points, machine = work.layers.partition_points if config.stages > 1 else None, work.machine
    crossing = () if points is None else tuple(size / config.batch_parts for size in points.crossing)
    problem = StepProblem(
        nodes=tuple(nodes),
        pieces=() if points is None else points.of,
        sends=tuple(2 * machine.collective_s("send", size, config.over_stages) for size in crossing),
        border_bytes=tuple(config.micro_batches * size for size in crossing),
        ranks=config.stages,
        virtual=config.virtual,
        micro_batches=config.micro_batches,
        zero_bubble=config.zero_bubble,
        contention=machine.contention,
        transitions=sets.transitions,
        forbidden=sets.forbidden,
        needed=sets.needed,
        room=room,
    )
    return ConfigProblem(problem, sets.strategies)


def _list_sharded(strategies_by_decision: Mapping[str, tuple[LayerStrategy, ...]]) -> Iterable[tuple[str, int]]:
    for decision, strategies in strategies_by_decision.items():
        # Experts are dealt to ranks that read other samples.
        cut = (index for index, strategy in enumerate(strategies) if strategy.style not in (None, EXPERTS.style))
        yield from ((decision, index) for index in cut)


class _Enumeration:
    """The strategies of the calls, and which of them do not go together."""

    def __init__(self, layers: Layers, allowed: StrategyFilter, kind: CatalogKey) -> None:
        self._layers, self._allowed, self._kind, self._calls = layers, allowed, kind, layers.index

    def strategies(self, call: ModuleCall) -> tuple[LayerStrategy, ...]:
        """Return the strategies of a call and of its repetitions, the unsharded one first."""
        alike = self._calls.alike[call.template]
        result = [WHOLE]
        if self._kind.model > 1:
            if self._propagates_shards(alike):
                result.append(LayerStrategy(None, "features", "features"))
            if self._allowed.shards_tokens:
                result += self._token_strategies(alike)
            result += self._layer_strategies(alike, self._kind.model, same_rows=True)
            if self._is_placeable(alike):
                result.append(PARTS)
        elif self._kind.by_rows > 1:
            result += self._layer_strategies(alike, self._kind.by_rows, same_rows=False)
        if all(map(self._can_be_dealt, alike)):
            result.append(EXPERTS)
        if call.template in self._calls.ends:
            result = [strategy for strategy in result if strategy.output_state == "whole"]
        return tuple(strategy for strategy in result if (call.template, strategy) not in self._allowed.excluded)

    def forbidden(self, strategies: Mapping[str, tuple[LayerStrategy, ...]]) -> Iterable[frozenset[tuple[str, int]]]:
        """Yield options that do not run together, or with which no rank holds some of the experts only."""
        dealt = [name for name, options in strategies.items() if EXPERTS in options]
        if dealt and all(WHOLE in strategies[name] for name in dealt):
            yield frozenset((name, strategies[name].index(WHOLE)) for name in dealt)
        for region in self._allowed.failing_regions:
            is_available = all(strategy in strategies[str(like)] for like, strategy in region.strategies)
            if region.parts == self._kind.model and is_available:
                yield frozenset(
                    (str(like), strategies[str(like)].index(strategy)) for like, strategy in region.strategies
                )

    def _layer_strategies(self, alike: list[ModuleCall], ranks: int, *, same_rows: bool) -> Iterable[LayerStrategy]:
        first = alike[0]
        weight = next((param for param in first.parameters if len(param.shape) == 2), None)
        if weight is None or not all(self._can_be_sharded(call) for call in alike):
            return
        if first.kind == "Embedding" and same_rows and weight.shape[0] >= ranks:
            yield LayerStrategy("vocab")
        if first.kind != "Linear":
            return
        if weight.shape[0] >= ranks:
            yield LayerStrategy("column")
            if same_rows:
                yield LayerStrategy("column", output_state="features")
        if weight.shape[1] >= ranks:
            yield LayerStrategy("row")
            if same_rows and _reads_calls_only(alike):
                yield LayerStrategy("row", "features")

    def _token_strategies(self, alike: list[ModuleCall]) -> Iterable[LayerStrategy]:
        """Yield the strategies that take or return activations sharded over tokens."""
        first, ranks = alike[0], self._kind.model
        if any(len(shape.shape) < 3 or shape.shape[-2] % ranks for call in alike for shape in call.outputs):
            return
        if first.token_parts and all(call.token_parts % ranks == 0 and not self._draws_dropout(call) for call in alike):
            if not any(call.parameters for call in alike):
                yield LayerStrategy(None, "tokens", "tokens")
            elif not first.is_glue and all(map(self._is_alone, alike)):
                yield LayerStrategy("sequence", "tokens", "tokens")
        for strategy in tuple(self._layer_strategies(alike, ranks, same_rows=True)):
            if strategy.style in ("row", "vocab") and (strategy.style == "vocab" or strategy.has_sharded_input):
                yield strategy._replace(output_state="tokens")
            if strategy.style == "column" and _reads_calls_only(alike):
                yield strategy._replace(input_state="tokens")

    def _is_placeable(self, alike: list[ModuleCall]) -> bool:
        """Return whether ranks can compute parts of the operators of these modules, each with as many rows."""
        kind, first = self._kind, alike[0]
        # With stages they double the decisions of a program that is large already (a ResNet-50 on small images: 4 s to
        # 33 s), so there they are tried where the user wants them.
        if kind.in_stages and (first.template, WHOLE) not in self._allowed.excluded:
            return False
        if not kind.leaves_parts:
            return False
        if not all(call.path in self._calls.once and not call.is_glue and call.outputs for call in alike):
            return False
        if first.kind in ("Linear", "Embedding"):  # they have styles of their own
            return False
        return self._layers.has_parts(first, kind.model)

    def _can_be_dealt(self, call: ModuleCall) -> bool:
        """Return whether each rank of a group can hold as many experts, and a row comes back for each token."""
        if self._kind.experts == 1 or call.experts is None or call.experts.experts % self._kind.experts:
            return False
        returns_rows = len(call.outputs) == 1 and any(read.value == call.outputs[0] for read in call.inputs)
        return returns_rows and self._is_alone(call)

    def _propagates_shards(self, alike: list[ModuleCall]) -> bool:
        """Return whether a cut goes through calls, none of whose cut inputs comes from outside all calls."""
        return all(
            call.last_dim_parts
            and call.last_dim_parts % self._kind.model == 0
            and not any(source.follows and isinstance(source.source, str) for source in call.inputs)
            and not self._draws_dropout(call)
            for call in alike
        )

    def _draws_dropout(self, call: ModuleCall) -> bool:
        """Return whether parts of a call would draw the same random numbers: a module for it knows better."""
        return call.kind != "Dropout" and any(map(self._draws, call.operators))

    def _draws(self, position: int) -> bool:
        """Return whether an operator draws random numbers."""
        operator = self._layers.captured.operators[position]
        if "attention" in operator.name:
            return any(isinstance(value, float) and value > 0 for value in operator.arguments)  # its dropout
        return "dropout" in operator.name or "bernoulli" in operator.name

    def _can_be_sharded(self, call: ModuleCall) -> bool:
        """Return whether a layer can have a style, is called once, and holds its parameters alone."""
        return self._is_alone(call) and call.path in self._layers.shardable

    def _is_alone(self, call: ModuleCall) -> bool:
        """Return whether a module is called once, and nobody else has its parameters."""
        return call.path in self._calls.once and not any(param.name in self._calls.shared for param in call.parameters)

    def transitions(self, strategies: Mapping[str, tuple[LayerStrategy, ...]]) -> Iterable[TransitionCost]:
        """Yield pairs of strategies whose activation states do not match."""
        if self._kind.model == 1:
            return
        calls = self._layers.calls
        met: set[tuple[str, str, bool]] = set()
        for call in calls:
            for source in call.inputs:
                if isinstance(source.source, str):
                    continue  # what no call made is replicated; only strategies that take it so read it
                pair = str(calls[source.source].template), str(call.template)
                if (*pair, source.follows) in met:
                    continue
                met.add((*pair, source.follows))
                apart = {
                    (i, j): math.inf
                    for i, first in enumerate(strategies[pair[0]])
                    for j, second in enumerate(strategies[pair[1]])
                    if first.output_state != second.input_state_of(source)
                }
                if apart:
                    yield TransitionCost(first=pair[0], second=pair[1], seconds=apart)


def _reads_calls_only(alike: list[ModuleCall]) -> bool:
    """Return whether all inputs are what other calls made: others are replicated."""
    return all(isinstance(source.source, int) for call in alike for source in call.inputs)

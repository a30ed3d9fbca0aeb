"""`LowerBound`: a lower bound of the step time of a parallel config, to prune the search (pure).

Every option is priced as a program has it, collectives and the gradient synchronisation among them, once for all calls
that cost the same; what goes together is not asked. A sum over the options of a pick is no less than the sum of the
least that each decision adds to it, and a step takes at least each of these sums:

- without stages: all passes, updates and `contention` of the exchanges; and all forward passes, updates, exchanges and
  `contention` of the backward passes, as exchanges follow each other;
- with stages (`auto/solver/problem`), p ranks along them, v stages each, m micro-batches and w the
  seconds of a rank on one:
  sum w / v + (m - 1 / v) x max w + max after. The largest w is no less than an even share of the sum and, of n pieces
  that cost the same, no less than ceil(n / p) of them, as some rank has so many; so is the most that comes after. Each
  border between stages keeps two ranks waiting: there are v x p - 1, after different pieces, and each rank has at least
  2 v - 1 of them. What gradients of weights fill with zero bubble is taken off as it is for a pick, and leaves no
  less than m x max w + max after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.auto.capture.layers import EXPERTS, LayerStrategy
from phalanx.auto.cost.layer_strategy import LayerCostModel
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.planner.strategies import StrategyCatalog

_ROUNDING = 1e-12
"""What sums in another order may differ by, as a part of them."""

Floats = NDArray[np.float64]


class LowerBound:
    """Bounds of parallel configs, which share the prices that they have in common."""

    def __init__(self, catalog: StrategyCatalog, work: LayerWork) -> None:
        self._catalog, self._work, self._machine = catalog, work, work.machine
        points = work.layers.partition_points
        self._crossing = [] if points is None else sorted(points.crossing)
        self._distinct = _DistinctCalls(work, (0,) * len(work.all) if points is None else points.of)
        self._costs: dict[tuple[object, ...], _StrategyTimes] = {}

    def least_s(self, config: ParallelConfig) -> float:
        """Return seconds that no pick of a parallel config takes less than; infinity if there is no pick.

        That is so where a layer has no strategy, where ranks that read the same samples can cut none, and where there
        are no experts for ranks that hold some together.
        """
        listed = self._catalog.of(config)
        if not all(listed.strategies.values()) or (config.model > 1 and not listed.needed):
            return math.inf
        if config.experts > 1 and not any(EXPERTS in strategies for strategies in listed.strategies.values()):
            return math.inf
        # Prices know of stages only whether there are some, unless ranks wait for the slowest, and of schedules whether
        # these take backward passes apart.
        pricing = (
            config.batch_parts,
            config.stages if self._machine.host.waiting_s else config.stages > 1,
            config.zero_bubble,
        )
        ranks = config.data, config.model, config.experts, config.context, config.attention
        key = *ranks, config.zero, config.recompute, *pricing, config.over_data, config.over_tokens
        if key not in self._costs:
            self._costs[key] = self._priced(config, listed.strategies)
        seconds = self._in_stages(config, self._costs[key]) if config.stages > 1 else self._together(self._costs[key])
        return seconds * (1 - _ROUNDING)

    def _priced(self, config: ParallelConfig, strategies: Mapping[str, tuple[LayerStrategy, ...]]) -> _StrategyTimes:
        cost, most = LayerCostModel(self._work, config), max(map(len, strategies.values()))
        prices = np.zeros((7, self._distinct.all.shape[1], most))
        for kind, work in self._distinct.priced:
            for position, price in enumerate(cost.options(work, strategies[str(work.call.template)])):
                prices[:, kind, position] = (
                    price.forward_s,
                    price.backward_s,
                    price.grad_sync_s,
                    price.update_s,
                    *price.fills_s,
                )
        numbers = np.array([len(strategies[name]) for name in self._distinct.decisions])
        return _StrategyTimes(
            np.arange(most) < numbers[:, None], prices[0], prices[1], prices[2], prices[3], prices[4:]
        )

    def _together(self, costs: _StrategyTimes) -> float:
        share, after = self._machine.contention, costs.forward + costs.update
        sums = (costs.backward + share * costs.exchange, costs.exchange + share * costs.backward)
        return float(max(costs.least(self._distinct.all @ (after + times)) for times in sums))

    def _in_stages(self, config: ParallelConfig, costs: _StrategyTimes) -> float:
        p, v, m = config.stages, config.virtual, config.micro_batches
        work, after = costs.forward + costs.backward, costs.exchange + costs.update
        # What some rank has at least: an even share of all, and of the pieces of each kind.
        some = np.concatenate([self._distinct.all[None] / p, self._distinct.of_some_rank(p)])
        sends = self._sends(config)
        sent = np.full(len(some), (2 * v - 1) * sends[0])
        sent[0] = 2 * sum(sends) / p
        busiest, latest = some @ work, some @ after
        # The smallest of three sums is taken off, so each of them gives a bound.
        fills = costs.fills[:, None, None] if config.zero_bubble else 0.0
        own = work / v - (1 - 1 / p) * fills
        each = self._distinct.all @ own + (m - 1 / v) * busiest[:, None] + latest[None]
        seconds = costs.least(each) + ((m - 1 / v) * sent + 2 * sum(sends) / v)[:, None]
        working = costs.least(m * busiest[:, None] + latest[None]) + m * sent[:, None]
        return float(max(seconds.max(), working.max()))

    def _sends(self, config: ParallelConfig) -> list[float]:
        """Return the seconds that the cheapest borders between all stages cost each of two ranks."""
        sizes = self._crossing[: config.stages * config.virtual - 1]
        return [2 * self._machine.collective_s("send", size / config.batch_parts, config.over_stages) for size in sizes]


class _StrategyTimes(NamedTuple):
    """Seconds of distinct calls by strategy."""

    exists: NDArray[np.bool_]
    """Whether a decision has a strategy: by decision and strategy."""

    forward: Floats
    """By distinct call and strategy."""

    backward: Floats
    exchange: Floats
    update: Floats
    fills: Floats
    """Of idle time: by sum, distinct call and strategy."""

    def least(self, seconds: Floats) -> Floats:
        """Return the sum over decisions of their fastest strategy, of seconds by anything, decision and strategy."""
        return np.asarray(np.where(self.exists, seconds, math.inf).min(axis=-1).sum(axis=-1))


class _DistinctCalls:
    """The calls of a model, those that cost the same seconds under every parallel config counted as one kind."""

    def __init__(self, works: LayerWork, piece_of: tuple[int, ...]) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        kind_of, first_with, priced, decision_of = list[int](), dict[str, int](), set[int](), list[str]()
        for position, work in enumerate(works.all):
            names = {param.name for param in work.call.parameters}
            met = frozenset(names & first_with.keys())
            key = works.alike(work), met
            if key not in kinds:
                priced.add(position)
                decision_of.append(str(work.call.template))
            # Prices of what was met before have to know those who met it first.
            priced |= {first_with[name] for name in met}
            first_with |= {name: position for name in names - met}
            kind_of.append(kinds.setdefault(key, len(kinds)))
        self.priced = [(kind_of[position], works.all[position]) for position in sorted(priced)]
        """One call or more of every kind, in the order of the model."""

        self.decisions = list(dict.fromkeys(decision_of))
        inside = np.zeros((piece_of[-1] + 1, len(kinds)))
        np.add.at(inside, (np.array(piece_of), np.array(kind_of)), 1.0)
        self._of_decision = np.array([[decision == name for decision in decision_of] for name in self.decisions])
        self._pieces, self._count = np.unique(inside, axis=0, return_counts=True)
        self.all: Floats = self._of_decision * inside.sum(axis=0)
        """How often each kind counts for a decision: by decision and kind."""

    def of_some_rank(self, ranks: int) -> Floats:
        """Return the same of so many equal pieces as some rank has at least, by kind of pieces."""
        counts = self._pieces * -(-self._count // ranks)[:, None]
        return np.asarray(self._of_decision * counts[:, None])

"""`UnequalRanks`: split a global batch over devices of unequal speed, and price data parallel training so (pure).

Ranks start with this split, measure each other and share a batch by their speeds (`parallel/balance`). It is the one
whose slowest rank is done soonest by the planner's prices, with two samples a rank at least, as there. Prices rise with
the samples of a rank, so a split from which no single unit can move to advantage is the fastest of all: what it takes
is a bound too. (The prices of measured processors fall at one place: `Rates.matmul_s` says where.)

Ranks that hold a model together wait for the slowest of them, whatever they read. Their parallel configs count as if
all devices were the weakest.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.auto.capture.layers import Layers
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import build_datasheet_machine
from phalanx.auto.cost.parallel_config import RECOMPUTE, ZERO, ParallelConfig
from phalanx.auto.planner.candidate import Candidate, build_candidate
from phalanx.auto.planner.strategies import ConfigProblem, StrategyCatalog, build_problem
from phalanx.auto.predict.prediction import USABLE
from phalanx.auto.solver.problem import Solution
from phalanx.cluster.shares import least_rows, split_rows
from phalanx.cluster.spec.cluster import Cluster, Node
from phalanx.plan.apportion import RankSpeed, apportion


@dataclass(frozen=True, slots=True)
class _Kind:
    """Ranks with equal devices."""

    name: str
    work: LayerWork
    """Of the model on such a device; between ranks, at the speed of the slowest link."""

    room: float


@dataclass(frozen=True, slots=True)
class _Price:
    problem: ConfigProblem
    config: ParallelConfig
    seconds: float
    memory_bytes: float


class UnequalRanks:
    """The ranks of a cluster whose nodes differ.

    Args:
        cluster: Its data sheets.
        layers: The model.
        precision: What products are computed in.
        batch_size: Samples of a global batch.
        memory: Bytes that a rank may use; what its device has when None.
        replicas: Logical replicas of which ranks hold whole ones; None where samples are split.
    """

    def __init__(
        self,
        cluster: Cluster,
        layers: Layers,
        precision: str,
        batch_size: int,
        *,
        memory: float | None = None,
        replicas: int | None = None,
    ) -> None:
        self._batch, self._units, self._is_replicas = batch_size, replicas or batch_size, replicas is not None
        self._per_node = min(node.devices for node in cluster.nodes)
        distinct: list[Node] = []
        self._kind_of: list[int] = []
        """Of each rank, in the order of the nodes."""

        for node in cluster.nodes:
            position = next((i for i, other in enumerate(distinct) if other.device == node.device), len(distinct))
            distinct += [node] if position == len(distinct) else []
            self._kind_of += [position] * node.devices
        self._least = 1 if self._is_replicas else max(1, least_rows(self._units, len(self._kind_of)))
        self._is_unequal = len(distinct) > 1 or len({node.devices for node in cluster.nodes}) > 1
        link = min(node.device.link for node in cluster.nodes)
        network = {name: min(getattr(node, name) for node in cluster.nodes) for name in ("gbps", "strided")}
        self._kinds: list[_Kind] = []
        for node in distinct:
            alike = Node(device=replace(node.device, link=link), devices=self._per_node, **network)
            machine = build_datasheet_machine(replace(cluster, nodes=(alike,)), precision)
            room = USABLE * node.device.memory if memory is None else memory
            self._kinds.append(_Kind(node.device.name, LayerWork(layers, machine), room))
        self._prices: dict[tuple[int, int, ParallelConfig], _Price] = {}

    @property
    def is_worth_it(self) -> bool:
        """Whether devices or their numbers differ, and every rank can have a unit."""
        return self._is_unequal and self._units >= len(self._kind_of)

    def configs(self, *, has_blocks: bool) -> Iterator[ParallelConfig]:
        """Yield the parallel configs of all ranks that can share batches unequally."""
        ranks = len(self._kind_of)
        for zero, recompute in itertools.product(ZERO, RECOMPUTE if has_blocks else RECOMPUTE[:1]):
            yield ParallelConfig(
                data=ranks,
                zero=zero,
                recompute=recompute,
                per_node=self._per_node,
                batch_size=self._batch,
                rows=self._rows(self._units // ranks),
            )

    def candidate(
        self, config: ParallelConfig, catalog: StrategyCatalog, shares: Sequence[int] | None = None
    ) -> Candidate | None:
        """Return what a parallel config takes with the fastest split; None where a rank's memory holds no part of it.

        Args:
            config: One of `configs`.
            catalog: Lists the strategies of layers, of which these have first.
            shares: Units of each rank, of any sum, in place of the fastest split.
        """
        if not all(catalog.of(config).strategies.values()):
            return None
        sizes = self._split(config, catalog) if shares is None else self.units_of(shares)
        if sizes is None:
            return None
        prices = [self._price(kind, size, config, catalog) for kind, size in zip(self._kind_of, sizes, strict=True)]
        slowest = max(range(len(prices)), key=lambda rank: prices[rank].seconds)
        price, work = prices[slowest], self._kinds[self._kind_of[slowest]].work
        pick = dict.fromkeys(price.problem.strategies, 0)
        solution = Solution(pick=pick, seconds=price.seconds, bound=price.seconds)
        return replace(
            build_candidate(work, price.config, price.problem, solution),
            memory_bytes=max(price.memory_bytes for price in prices),
            shares=tuple(sizes),
            share_unit="replicas" if self._is_replicas else "samples",
            share_names=tuple(self._kinds[kind].name for kind in self._kind_of),
            work=work,
        )

    def units_of(self, shares: Sequence[int]) -> list[int]:
        """Return the units of each rank in training with these `step.shares`: replicas, or samples in proportion."""
        return list(shares) if self._is_replicas else split_rows(self._units, shares)

    def _split(self, config: ParallelConfig, catalog: StrategyCatalog) -> list[int] | None:
        speeds = [self._speed(kind, config, catalog) for kind in range(len(self._kinds))]
        if any(speed.most < self._least for speed in speeds):
            return None
        sizes = apportion([speeds[kind] for kind in self._kind_of], self._units, least=self._least)
        if sizes is None:
            return None

        def seconds(rank: int, more: int = 0) -> float:
            return self._price(self._kind_of[rank], sizes[rank] + more, config, catalog).seconds

        ranks = range(len(sizes))
        for _ in range(self._units):  # prices are not quite linear: move single units while that helps
            slowest = max((rank for rank in ranks if sizes[rank] > self._least), key=seconds, default=None)
            free = [rank for rank in ranks if rank != slowest and sizes[rank] < speeds[self._kind_of[rank]].most]
            if slowest is None or not free or seconds(slowest) < max(map(seconds, ranks)):
                break
            taker = min(free, key=lambda rank: seconds(rank, 1))
            if seconds(taker, 1) >= seconds(slowest):
                break
            sizes[slowest] -= 1
            sizes[taker] += 1
        return sizes

    def _speed(self, kind: int, config: ParallelConfig, catalog: StrategyCatalog) -> RankSpeed:
        """Return the seconds of a unit as a straight line says, and how many a device of a kind holds."""
        first, last = (self._price(kind, size, config, catalog) for size in (1, self._units))
        apart = max(1, self._units - 1)
        unit_s = max((last.seconds - first.seconds) / apart, 1e-12)
        room, most = self._kinds[kind].room, self._units
        if last.memory_bytes > room:
            sizes = range(1, self._units)
            most = bisect_right(sizes, room, key=lambda size: self._price(kind, size, config, catalog).memory_bytes)
        return RankSpeed(unit_s, max(0.0, first.seconds - unit_s), most=most)

    def _price(self, kind: int, size: int, config: ParallelConfig, catalog: StrategyCatalog) -> _Price:
        """Return what a part of a batch takes a device of a kind."""
        config = replace(config, rows=self._rows(min(size, self._units)))
        key = kind, size, config
        if key not in self._prices:
            config_problem = build_problem(self._kinds[kind].work, config, catalog.of(config))
            pick = dict.fromkeys(config_problem.strategies, 0)
            self._prices[key] = _Price(
                config_problem, config, config_problem.problem.seconds(pick), config_problem.problem.peak(pick)
            )
        return self._prices[key]

    def _rows(self, size: int) -> int:
        """Return the samples of so many units, the largest replicas first."""
        return max(1, min(self._batch, size * -(-self._batch // self._units)))

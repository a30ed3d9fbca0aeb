"""Seconds that a step takes at least under an arrangement, found without listing the model segment by segment (pure).

Every option is priced as a program has it, collectives and the exchange of gradients among them, once for all segments
that cost the same; what goes together is not asked. A sum over the options of a pick is no less than the sum of the
least that each decision adds to it, and a step takes at least each of these sums:

- without stages: all passes, updates and `contention` of the exchanges; and all forward passes, updates, exchanges and
  `contention` of the backward passes, as exchanges follow each other;
- with stages (`auto/solver/pipeline_problem`), p ranks along them, v stages each, m micro-batches and w the
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

from phalanx.auto.capture.layers import Way
from phalanx.auto.cost.layer_strategy import WayCost
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.strategies import Listing

_ROUNDING = 1e-12
"""What sums in another order may differ by, as a part of them."""

Floats = NDArray[np.float64]


class FirstBound:
    """Bounds of arrangements, which share the prices that they have in common."""

    def __init__(self, listing: Listing, work: LayerWork, speed: Speed) -> None:
        self._listing, self._work, self._speed = listing, work, speed
        pieces = listing.layers.pieces
        self._crossing = [] if pieces is None else sorted(pieces.crossing)
        self._distinct = _Distinct(work, (0,) * len(work.all) if pieces is None else pieces.of)
        self._costs: dict[tuple[object, ...], _Costs] = {}

    def least_s(self, at: Arrangement) -> float:
        """Return seconds that no pick of an arrangement takes less than; infinity if there is no pick.

        That is so where some layer has no way, and where ranks that read the same rows can cut none.
        """
        listed = self._listing.of(at)
        if not all(listed.ways.values()) or (at.model > 1 and not listed.needed):
            return math.inf
        # Prices know of stages only whether there are some, unless ranks wait for the slowest, and of schedules whether
        # these take backward passes apart.
        pricing = at.row_parts, at.stages if self._speed.host.waiting_s else at.stages > 1, at.zero_bubble
        key = at.data, at.model, at.zero, at.recompute, *pricing, at.over_data, at.over_model
        if key not in self._costs:
            self._costs[key] = self._priced(at, listed.ways)
        seconds = self._in_stages(at, self._costs[key]) if at.stages > 1 else self._together(self._costs[key])
        return seconds * (1 - _ROUNDING)

    def _priced(self, at: Arrangement, ways: Mapping[str, tuple[Way, ...]]) -> _Costs:
        cost, most = WayCost(self._listing.layers, self._work, at, self._speed), max(map(len, ways.values()))
        found = np.zeros((7, self._distinct.all.shape[1], most))
        for kind, work in self._distinct.priced:
            for place, one in enumerate(cost.options(work, ways[str(work.segment.like)])):
                found[:, kind, place] = one.forward_s, one.backward_s, one.exchange_s, one.update_s, *one.fills_s
        numbers = np.array([len(ways[name]) for name in self._distinct.decisions])
        return _Costs(np.arange(most) < numbers[:, None], found[0], found[1], found[2], found[3], found[4:])

    def _together(self, costs: _Costs) -> float:
        share, after = self._speed.contention, costs.forward + costs.update
        sums = (costs.backward + share * costs.exchange, costs.exchange + share * costs.backward)
        return float(max(costs.least(self._distinct.all @ (after + one)) for one in sums))

    def _in_stages(self, at: Arrangement, costs: _Costs) -> float:
        p, v, m = at.stages, at.virtual, at.micro_batches
        work, after = costs.forward + costs.backward, costs.exchange + costs.update
        # What some rank has at least: an even share of all, and of the pieces of each kind.
        some = np.concatenate([self._distinct.all[None] / p, self._distinct.of_some_rank(p)])
        sends = self._sends(at)
        sent = np.full(len(some), (2 * v - 1) * sends[0])
        sent[0] = 2 * sum(sends) / p
        busiest, latest = some @ work, some @ after
        # The smallest of three sums is taken off, so each of them gives a bound.
        fills = costs.fills[:, None, None] if at.zero_bubble else 0.0
        own = work / v - (1 - 1 / p) * fills
        each = self._distinct.all @ own + (m - 1 / v) * busiest[:, None] + latest[None]
        seconds = costs.least(each) + ((m - 1 / v) * sent + 2 * sum(sends) / v)[:, None]
        working = costs.least(m * busiest[:, None] + latest[None]) + m * sent[:, None]
        return float(max(seconds.max(), working.max()))

    def _sends(self, at: Arrangement) -> list[float]:
        """Return the seconds that the cheapest borders between all stages cost each of two ranks."""
        sizes = self._crossing[: at.stages * at.virtual - 1]
        return [2 * self._speed.collective_s("send", size / at.row_parts, at.over_stages) for size in sizes]


class _Costs(NamedTuple):
    """Seconds of distinct segments in their ways."""

    is_way: NDArray[np.bool_]
    """Whether a decision has a way: by decision and way."""

    forward: Floats
    """By distinct segment and way."""

    backward: Floats
    exchange: Floats
    update: Floats
    fills: Floats
    """Of idle time: by sum, distinct segment and way."""

    def least(self, seconds: Floats) -> Floats:
        """Return the sum over decisions of their fastest way, of seconds by anything, decision and way."""
        return np.asarray(np.where(self.is_way, seconds, math.inf).min(axis=-1).sum(axis=-1))


class _Distinct:
    """The segments of a model, those that cost the same seconds under every arrangement counted as one kind."""

    def __init__(self, works: LayerWork, piece_of: tuple[int, ...]) -> None:
        kinds: dict[tuple[object, ...], int] = {}
        kind_of, first_with, told, decision_of = list[int](), dict[str, int](), set[int](), list[str]()
        for place, work in enumerate(works.all):
            names = {param.name for param in work.segment.parameters}
            met = frozenset(names & first_with.keys())
            key = works.alike(work), met
            if key not in kinds:
                told.add(place)
                decision_of.append(str(work.segment.like))
            # Prices of what was met before have to know those who met it first.
            told |= {first_with[name] for name in met}
            first_with |= {name: place for name in names - met}
            kind_of.append(kinds.setdefault(key, len(kinds)))
        self.priced = [(kind_of[place], works.all[place]) for place in sorted(told)]
        """One segment or more of every kind, in the order of the model."""

        self.decisions = list(dict.fromkeys(decision_of))
        inside = np.zeros((piece_of[-1] + 1, len(kinds)))
        np.add.at(inside, (np.array(piece_of), np.array(kind_of)), 1.0)
        self._of_decision = np.array([[one == name for one in decision_of] for name in self.decisions])
        self._pieces, self._count = np.unique(inside, axis=0, return_counts=True)
        self.all: Floats = self._of_decision * inside.sum(axis=0)
        """How often each kind counts for a decision: by decision and kind."""

    def of_some_rank(self, ranks: int) -> Floats:
        """Return the same of so many equal pieces as some rank has at least, by kind of pieces."""
        counts = self._pieces * -(-self._count // ranks)[:, None]
        return np.asarray(self._of_decision * counts[:, None])

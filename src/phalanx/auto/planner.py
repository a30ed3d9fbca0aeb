"""The fastest Plan for a model on given ranks, and a bound that proves how good it is (pure).

Outside, every arrangement of the ranks; inside each, a mixed-integer program over the ways to compute the layers. The
arrangements are taken in the order of a lower bound of their time: the fastest way of every layer by itself. When that
bound passes the fastest Plan found, none that is left can be better. So the bound covers the whole space.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.auto.arrangement import Arrangement
from phalanx.auto.choices import Choices
from phalanx.auto.layers import WHOLE, Layers, Way
from phalanx.auto.rates import Speed
from phalanx.auto.solve import Solved, solve
from phalanx.auto.ways import Ways, ways_of
from phalanx.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The fastest way to train under one arrangement."""

    arrangement: Arrangement
    picked: tuple[Way, ...]
    """How each segment is computed."""

    ways: Mapping[str, Way]
    """How layers are computed, by path; those that are not named stand as they are."""

    seconds: float
    """Of a step."""

    peak: float
    """Bytes of a rank."""

    parts: Mapping[str, float]
    """Seconds by what takes them; an exchange counts what of it is not beside computation."""

    bound: float
    """Seconds that nothing under this arrangement beats."""

    @property
    def cut(self) -> dict[str, Way]:
        """The layers with a style."""
        return {path: way for path, way in self.ways.items() if way.style is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What a search found."""

    candidates: tuple[Candidate, ...]
    """The fastest of each arrangement that was worth solving, best first."""

    bound: float
    """Seconds that no Plan of the space beats."""

    arrangements: tuple[Arrangement, ...]
    """The space outside."""

    plans: float
    """How many Plans the whole space has."""

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How much slower than the bound the best may be, in %."""
        return round((self.best.seconds / self.bound - 1) * 100, 6)


def search_plans(
    layers: Layers,
    arrangements: Iterable[Arrangement],
    speed: Speed,
    *,
    room: float = math.inf,
    top_k: int = 5,
    time_limit: float | None = None,
) -> Searched:
    """Return the fastest Plans of a model that fit the room of every rank.

    Args:
        layers: The model, the optimizer and what layers may not be.
        arrangements: How ranks may be arranged.
        speed: How fast they are.
        room: Bytes that each has.
        top_k: Arrangements of which the fastest Plan is to be proved.
        time_limit: Seconds after which the best so far and its gap are returned.

    Raises:
        PlanError: If nothing fits; says the least bytes that any Plan needs.
    """
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    listed = [(at, ways_of(layers, at, speed, room)) for at in arrangements]
    space = [(at, ways) for at, ways in listed if all(ways.ways.values()) and (ways.choices.needed or at.model == 1)]
    if not space:
        raise PlanError("No way to arrange the ranks keeps to the limits. Loosen one, or take another number of ranks.")
    ordered = sorted(((lower_bound(ways.choices), i) for i, (_, ways) in enumerate(space)))
    found: list[Candidate] = []
    bound = math.inf
    for low, i in ordered:
        marks = sorted(one.seconds for one in found)
        mark = marks[top_k - 1] if len(marks) >= top_k else math.inf
        left = stop - time.monotonic()
        if low >= mark or (found and left <= 0):
            bound = min(bound, low)
            break
        at, ways = space[i]
        # The first is solved whatever the time: there is to be a Plan.
        solved = solve(ways.choices, time_limit=None if stop == math.inf or not found else left, below=mark)
        if solved is not None:
            found.append(_candidate(layers, at, ways, solved))
            bound = min(bound, solved.bound)
    if not found:
        raise PlanError(_too_large(space, room))
    found.sort(key=lambda one: one.seconds)
    return Searched(
        candidates=tuple(found[:top_k]),
        bound=min(bound, found[0].seconds),
        arrangements=tuple(at for at, _ in space),
        plans=sum(math.prod(map(float, ways.choices.decisions.values())) for _, ways in space),
    )


def lower_bound(choices: Choices) -> float:
    """Return seconds that every pick takes: the fastest option of every decision, with no exchange of gradients."""
    least: dict[str, list[float]] = {}
    for node in choices.nodes:
        sums = least.setdefault(node.decision, [0.0] * len(node.options))
        for place, one in enumerate(node.options):
            sums[place] += one.forward_s + one.backward_s + choices.contention * one.exchange_s + one.update_s
    return choices.fixed_s + sum(map(min, least.values()))


def arrangements_of(ranks: int, *, has_blocks: bool, per_node: int | None = None) -> Iterator[Arrangement]:
    """Yield every way to arrange ranks.

    Args:
        ranks: All of them.
        has_blocks: Whether there is something to compute again.
        per_node: Ranks of one machine; all when None.
    """
    node = per_node or ranks
    for model in (m for m in range(1, ranks + 1) if ranks % m == 0):
        data = ranks // model
        orders = (True, False) if model > 1 and data > 1 and node < ranks else (True,)
        for zero in (0, 1, 2, 3) if data > 1 else (0,):
            for recompute in ("none", "selective", "full") if has_blocks else ("none",):
                for inside in orders:
                    yield Arrangement(
                        data=data, model=model, zero=zero, recompute=recompute, model_inside=inside, per_node=node
                    )


def _candidate(layers: Layers, at: Arrangement, ways: Ways, solved: Solved) -> Candidate:
    picked = tuple(ways.ways[str(one.like)][solved.pick[str(one.like)]] for one in layers.segments)
    by_path = {one.path: way for one, way in zip(layers.segments, picked, strict=True) if not one.is_glue}
    return Candidate(
        arrangement=at,
        picked=picked,
        ways={path: way for path, way in by_path.items() if way != WHOLE},
        seconds=solved.seconds,
        peak=ways.choices.peak(solved.pick),
        parts=_parts(ways.choices, solved.pick),
        bound=solved.bound,
    )


def _parts(choices: Choices, pick: Mapping[str, int]) -> dict[str, float]:
    options = choices.picked(pick)
    sent = sum(one.sent_s for one in options)
    update = sum(one.update_s for one in options)
    passes = sum(one.forward_s + one.backward_s for one in options)
    return {
        "compute": passes - sent,
        "collectives of layers": sent,
        "exchange of gradients": choices.seconds(pick) - choices.fixed_s - passes - update,
        "optimizer": update,
    }


def _too_large(space: list[tuple[Arrangement, Ways]], room: float) -> str:
    least, where, part = math.inf, space[0][0], ""
    for at, ways in space:
        found = _least_peak(ways.choices)
        if found[0] < least:
            (least, part), where = found, at
    return (
        f"No Plan fits: every one needs {least / 2**30:.3f} GiB a rank or more ({where}), most of it {part}, and there "
        f"are {room / 2**30:.3f} GiB. Take more ranks, ranks with more memory, or a smaller batch."
    )


def _least_peak(choices: Choices) -> tuple[float, str]:
    """Return bytes that every pick needs at least, and what most of them are."""
    held = sum(min(one.held for one in node.options) for node in choices.nodes)
    kept = sum(min(one.kept for one in node.options) for node in choices.nodes)
    working = max(min(one.working for one in node.options) for node in choices.nodes)
    parts = {"parameters, gradients and optimizer state": held, "activations": kept + working}
    return max(held + kept, held + working), max(parts, key=lambda name: parts[name])

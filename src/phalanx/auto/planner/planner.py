"""The fastest Plan for a model on given ranks, and a bound that proves how good it is (pure).

Outside, every arrangement of the ranks; inside each, a mixed-integer program over the ways to compute the layers. The
arrangements are taken in the order of a lower bound of their time (`auto/planner/lower_bound`). When that passes the
fastest Plan so far, none that is left can be better. So the bound covers the whole space.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.auto.capture.layers import WHOLE, Layers, Way
from phalanx.auto.cost.machine_model import Speed
from phalanx.auto.cost.parallel_config import RECOMPUTE, ZERO, Arrangement, divisors
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.breakdown import parts_of, sent_by_layers
from phalanx.auto.planner.lower_bound import FirstBound
from phalanx.auto.planner.strategies import Listing, Ways, ways_of
from phalanx.auto.planner.unsupported import none_left
from phalanx.auto.solver.min_memory import Least, least_of_space, low_peak, most_held
from phalanx.auto.solver.pipeline_problem import StagedChoices
from phalanx.auto.solver.problem import ROUNDING, Choices
from phalanx.auto.solver.solve import Solved, solve
from phalanx.auto.solver.solve_pipeline import solve_staged
from phalanx.cluster.messages.messages import text
from phalanx.errors import PlanError
from phalanx.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The fastest way to train under one arrangement."""

    arrangement: Arrangement
    picked: tuple[Way, ...]
    """How each segment is computed."""

    ways: Mapping[str, Way]
    """How layers are computed, by path; those that are not named stand as they are."""

    stages: tuple[str, ...]
    """The units that stages 1, 2, ... of a pipeline begin with."""

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

    solved: int
    """How many of these were listed layer by layer; the others cannot be better by their first bounds."""

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How much slower than the bound the best may be, in %."""
        return round((self.best.seconds / self.bound - 1) * 100, 6)


class NothingFitsError(PlanError):
    """No Plan fits. Its message says what the Plan needs that needs the least."""

    def __init__(self, message: str, least: Candidate) -> None:
        """Keep that Plan.

        Args:
            message: For the user.
            least: The Plan.
        """
        super().__init__(message)
        self.least = least


_LEAST_S = 20.0
"""Seconds of the search for what a Plan needs at least."""


def search_plans(
    layers: Layers,
    work: LayerWork,
    arrangements: Iterable[Arrangement],
    speed: Speed,
    *,
    room: float = math.inf,
    top_k: int = 5,
    time_limit: float | None = None,
    limits: Sequence[str] = (),
) -> Searched:
    """Return the fastest Plans of a model that fit the room of every rank.

    Args:
        layers: The model, the optimizer and what layers may not be.
        work: What its segments take, with this speed.
        arrangements: How ranks may be arranged.
        speed: How fast they are.
        room: Bytes that each has.
        top_k: Arrangements of which the fastest Plan is to be proved.
        time_limit: Seconds after which the best so far and its gap are returned.
        limits: What left arrangements and ways out, in the user's words, for the error.

    Raises:
        NothingFitsError: If nothing fits; says the least bytes that a Plan needs.
        PlanError: If nothing keeps to the limits.
    """
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    space = tuple(arrangements)
    listing = Listing(layers)
    first = FirstBound(listing, work, speed)
    # Bounds twice: of the arithmetic alone, and with all that ranks send once an arrangement is near enough.
    queue = [
        (in_stages(work.least_s(at), at.stages, at.virtual, at.micro_batches), i, False) for i, at in enumerate(space)
    ]
    heapq.heapify(queue)
    found: list[Candidate] = []
    bound, listed = math.inf, dict[int, Ways]()
    while queue:
        low, i, is_priced = heapq.heappop(queue)
        marks = sorted(one.seconds for one in found)
        mark = marks[top_k - 1] if len(marks) >= top_k else math.inf
        left = stop - time.monotonic()
        if low >= mark or (found and left <= 0):
            bound = min(bound, low)
            break
        if not is_priced:
            low = max(low, first.least_s(space[i]))
            if low < math.inf:
                heapq.heappush(queue, (low, i, True))
            continue
        listed[i] = ways = ways_of(layers, work, space[i], speed, room, listing.of(space[i]))
        if low_peak(ways.choices) > room * (1 + 2 * ROUNDING):
            continue
        # The first is solved whatever the time: there is to be a Plan.
        try:
            solved = _solved(ways.choices, time_limit=None if stop == math.inf or not found else left, below=mark)
        except TimeoutError:
            bound = min(bound, low)
            break
        if solved is not None:
            solved = replace(solved, bound=max(low, solved.bound))  # of one that time stopped it may be nothing
            found.append(_candidate(layers, work, space[i], ways, solved, speed))
            bound = min(bound, solved.bound)
    if not listed:
        raise PlanError(none_left(limits, text("layers left", count=len(space)) if space else ""))
    if not found:
        tried = [(space[i], ways) for i, ways in listed.items()]
        raise _too_large(layers, work, speed, tried, room, limits)
    found.sort(key=lambda one: one.seconds)
    return Searched(
        candidates=tuple(found[:top_k]),
        bound=min(bound, found[0].seconds),
        arrangements=space,
        solved=len(listed),
    )


def in_stages(seconds: float, stages: int, virtual: int, micro_batches: int) -> float:
    """Return seconds that a step takes at least whose micro-batches take so long over all stages of equal work."""
    return seconds * ((micro_batches - 1 / virtual) / stages + 1 / virtual)


def _solved(choices: Choices | StagedChoices, *, time_limit: float | None, below: float) -> Solved | None:
    if isinstance(choices, Choices):
        return solve(choices, time_limit=time_limit, below=below)
    return solve_staged(choices, time_limit=time_limit, below=below)


def arrangements_of(
    ranks: int, *, has_blocks: bool, per_node: int | None = None, pieces: int = 1, rows: int = 0, may_split: bool = True
) -> Iterator[Arrangement]:
    """Yield every way to arrange ranks.

    Args:
        ranks: All of them.
        has_blocks: Whether there is something to compute again.
        per_node: Ranks of one machine; all when None.
        pieces: Stages that the model may be cut into at most.
        rows: Rows of a global batch; 0 if they are not known.
        may_split: Whether gradients of weights may be computed apart from those of inputs.
    """
    node, again = per_node or ranks, RECOMPUTE if has_blocks else RECOMPUTE[:1]
    for stages, model in itertools.product(divisors(ranks), repeat=2):
        if ranks % (stages * model) or stages > pieces:
            continue
        data = ranks // stages // model
        orders = (True, False) if model > 1 and model < ranks and node < ranks else (True,)
        zeros = ZERO if data > 1 else ZERO[:1]
        for virtual, micro in _schedules(stages, pieces, _micro_batches(rows, data)):
            for zero, recompute, inside in itertools.product(zeros, again, orders):
                at = Arrangement(
                    data=data, model=model, zero=zero, recompute=recompute, stages=stages, virtual=virtual,
                    micro_batches=micro, model_inside=inside, per_node=node, rows=rows,
                )  # fmt: skip
                yield at
                if may_split and at.can_split:
                    yield replace(at, zero_bubble=True)


def _micro_batches(rows: int, data: int) -> list[int]:
    """Return numbers of equal micro-batches into which the rows of every rank can be cut."""
    if rows % data == 0:
        return divisors(max(1, rows // data))
    return [1] if rows > data else []  # some ranks have a row more, or others none


def _schedules(stages: int, pieces: int, micro_batches: list[int]) -> Iterator[tuple[int, int]]:
    """Yield stages of each rank and numbers of micro-batches, of those that the rows allow."""
    if stages == 1:
        yield 1, 1
        return
    for virtual in (1, 2, 4):
        # Interleaved stages take micro-batches in groups of the number of ranks.
        fitting = (micro for micro in micro_batches if virtual == 1 or micro % stages == 0)
        if stages * virtual <= pieces:
            yield from ((virtual, micro) for micro in fitting)


def _candidate(layers: Layers, work: LayerWork, at: Arrangement, ways: Ways, solved: Solved, speed: Speed) -> Candidate:
    picked = tuple(ways.ways[str(one.like)][solved.pick[str(one.like)]] for one in layers.segments)
    by_path = {one.path: way for one, way in zip(layers.segments, picked, strict=True) if not one.is_glue}
    layers_s = sent_by_layers(layers, work, at, speed, picked) if at.zero else None
    return Candidate(
        arrangement=at,
        picked=picked,
        ways={path: way for path, way in by_path.items() if way != WHOLE},
        stages=_starts(layers, solved.stages),
        seconds=solved.seconds,
        peak=_peak(ways.choices, solved),
        parts=parts_of(ways.choices, solved, at.zero > 0, layers_s),
        bound=solved.bound,
    )


def _starts(layers: Layers, stages: tuple[int, ...]) -> tuple[str, ...]:
    if layers.pieces is None:
        return ()
    pairs = enumerate(itertools.pairwise(stages), start=1)
    return tuple(layers.pieces.starts[place] for place, (before, after) in pairs if before != after)


def _peak(choices: Choices | StagedChoices, solved: Solved) -> float:
    if isinstance(choices, Choices):
        return choices.peak(solved.pick)
    return max(choices.peaks(solved.pick, solved.stages))


def _too_large(
    layers: Layers,
    work: LayerWork,
    speed: Speed,
    space: list[tuple[Arrangement, Ways]],
    room: float,
    limits: Sequence[str],
) -> PlanError:
    """Return what to raise where no arrangement has a way that fits."""
    found = least_of_space([ways.choices for _, ways in space], _LEAST_S)
    if found.least is None and found.bound == math.inf:
        return PlanError(none_left(limits, text("layers left", count=len(space))))
    said = {"bound": format_bytes(found.bound), "room": format_bytes(room)}
    if found.least is None:
        return PlanError(text("nothing fits in time", **said, found=""))
    (at, ways), least = space[found.place], found.least
    said |= {"least": format_bytes(least.peak, up=True), "where": str(at), "bytes": str(math.ceil(least.peak))}
    said["part"] = text(f"plan {most_held(ways.choices, least)}")
    seconds = _seconds(ways.choices, least)
    solved = Solved(pick=least.pick, seconds=seconds, bound=seconds, stages=least.stages)
    key = "nothing fits" if found.is_proved else "nothing fits in time"
    more = {} if found.is_proved else {"found": text("enough was found", **said)}
    return NothingFitsError(text(key, **said, **more), _candidate(layers, work, at, ways, solved, speed))


def _seconds(choices: Choices | StagedChoices, least: Least) -> float:
    if isinstance(choices, Choices):
        return choices.seconds(least.pick)
    return choices.seconds(least.pick, least.stages)

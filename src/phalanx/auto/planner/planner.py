"""`search_plans`: search parallel configs, solve an ILP for the layer strategies of each (pure).

The outer loop runs over parallel configs; for each, a mixed-integer program chooses the strategies of the layers. The
configs are taken in the order of a lower bound of their time (`auto/planner/lower_bound`). When that passes the fastest
Plan so far, none that is left can be better. So the bound covers the whole space.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.parallel_config import ATTENTION, RECOMPUTE, ZERO, ParallelConfig, divisors
from phalanx.auto.planner.candidate import Candidate, build_candidate
from phalanx.auto.planner.lower_bound import LowerBound
from phalanx.auto.planner.search_restrictions import explain_empty_space
from phalanx.auto.planner.strategies import ConfigProblem, StrategyCatalog, build_problem
from phalanx.auto.search.result import SearchResult
from phalanx.auto.solver.min_memory import find_min_memory, largest_part, peak_lower_bound
from phalanx.auto.solver.problem import ROUNDING, Solution
from phalanx.auto.solver.solve import solve
from phalanx.errors import PlanError
from phalanx.i18n import Labels, tr
from phalanx.units import format_bytes

_MEMORY: Labels = {
    "parameters, gradients and optimizer state": "parameters, gradients and optimizer state",
    "inputs, outputs and borders": "inputs and outputs of the model and its stages",
    "activations": "activations",
    "what one layer needs": "what one layer needs while it runs",
}
"""What the parts of a rank's memory are called."""


@dataclass(frozen=True, kw_only=True)
class PlanSearch(SearchResult[Candidate]):
    """The fastest candidate of each parallel config that was worth solving, best first."""

    configs: tuple[ParallelConfig, ...]
    """The parallel configs of the space."""

    listed: int
    """How many of these were listed layer by layer; the others cannot be better by their lower bounds."""


class DoesNotFitError(PlanError):
    """No Plan fits. Its message says what the Plan needs that needs the least."""

    def __init__(self, message: str, least: Candidate) -> None:
        """Keep that Plan.

        Args:
            message: For the user.
            least: The Plan.
        """
        super().__init__(message)
        self.least = least


_MIN_MEMORY_S = 20.0
"""Seconds of the search for what a Plan needs at least."""


def search_plans(
    catalog: StrategyCatalog,
    work: LayerWork,
    configs: Iterable[ParallelConfig],
    *,
    room: float = math.inf,
    top_k: int = 5,
    time_limit: float | None = None,
    limits: Sequence[str] = (),
) -> PlanSearch:
    """Return the fastest Plans of a model that fit the room of every rank.

    Args:
        catalog: The strategies of its layers.
        work: Of the model on a machine.
        configs: How ranks may be arranged.
        room: Bytes that each has.
        top_k: Parallel configs of which the fastest Plan is to be proved.
        time_limit: Seconds after which the best so far and its gap are returned.
        limits: Limits that exclude configs and strategies, as the user wrote them, for the error.

    Raises:
        DoesNotFitError: If nothing fits; says the least bytes that a Plan needs.
        PlanError: If nothing keeps to the limits.
    """
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    space = tuple(configs)
    first = LowerBound(catalog, work)
    # Bounds twice: of the arithmetic alone, and with all that ranks send once a parallel config is near enough.
    queue = [
        (pipeline_lower_bound(work.least_s(config), config.stages, config.virtual, config.micro_batches), i, False)
        for i, config in enumerate(space)
    ]
    heapq.heapify(queue)
    candidates: list[Candidate] = []
    bound, listed = math.inf, dict[int, ConfigProblem]()
    while queue:
        bound_s, i, is_priced = heapq.heappop(queue)
        marks = sorted(candidate.step_time_s for candidate in candidates)
        mark = marks[top_k - 1] if len(marks) >= top_k else math.inf
        left = stop - time.monotonic()
        if bound_s >= mark or (candidates and left <= 0):
            bound = min(bound, bound_s)
            break
        if not is_priced:
            bound_s = max(bound_s, first.least_s(space[i]))
            if bound_s < math.inf:
                heapq.heappush(queue, (bound_s, i, True))
            continue
        listed[i] = config_problem = build_problem(work, space[i], catalog.of(space[i]), room)
        if peak_lower_bound(config_problem.problem) > room * (1 + 2 * ROUNDING):
            continue
        # The first is solved whatever the time: there is to be a Plan.
        try:
            solution = solve(
                config_problem.problem, time_limit=None if stop == math.inf or not candidates else left, below=mark
            )
        except TimeoutError:
            bound = min(bound, bound_s)
            break
        if solution is not None:
            solution = replace(
                solution, bound=max(bound_s, solution.bound)
            )  # of one that time stopped it may be nothing
            candidates.append(build_candidate(work, space[i], config_problem, solution))
            bound = min(bound, solution.bound)
    if not listed:
        raise PlanError(
            explain_empty_space(
                limits, tr(": {count} are left, and in each a layer has no strategy", count=len(space)) if space else ""
            )
        )
    if not candidates:
        tried = [(space[i], config_problem) for i, config_problem in listed.items()]
        raise _build_memory_error(work, tried, room, limits)
    candidates.sort(key=lambda candidate: candidate.step_time_s)
    return PlanSearch(
        top_k=tuple(candidates[:top_k]),
        bound=min(bound, candidates[0].step_time_s),
        configs=space,
        listed=len(listed),
    )


def pipeline_lower_bound(seconds: float, stages: int, virtual: int, micro_batches: int) -> float:
    """Return seconds that a step takes at least whose micro-batches take so long over all stages of equal work."""
    return seconds * ((micro_batches - 1 / virtual) / stages + 1 / virtual)


def list_configs(
    ranks: int,
    *,
    has_blocks: bool,
    per_node: int | None = None,
    max_stages: int = 1,
    batch_size: int = 0,
    may_split: bool = True,
    expert_degrees: Sequence[int] = (),
    context_degrees: Sequence[int] = (),
) -> Iterator[ParallelConfig]:
    """Yield every parallel config of the ranks.

    Args:
        ranks: All of them.
        has_blocks: Whether there is something to recompute.
        per_node: Ranks of one machine; all when None.
        max_stages: Stages that the model may be cut into at most.
        batch_size: Samples of a global batch; 0 if they are not known.
        may_split: Whether gradients of weights may be computed apart from those of inputs.
        expert_degrees: Numbers of ranks, above 1, that may hold one copy of experts together.
        context_degrees: Numbers of ranks, above 1, that divide the ranks and may share sequences.
    """
    node_ranks, recompute_kinds = per_node or ranks, RECOMPUTE if has_blocks else RECOMPUTE[:1]
    for stages, model in itertools.product(divisors(ranks), repeat=2):
        if ranks % (stages * model) or stages > max_stages:
            continue
        data = ranks // stages // model
        orders = (True, False) if model > 1 and model < ranks and node_ranks < ranks else (True,)
        zeros = ZERO if data > 1 else ZERO[:1]
        for virtual, micro in _schedules(stages, max_stages, _micro_batches(batch_size, data)):
            for zero, recompute, inside in itertools.product(zeros, recompute_kinds, orders):
                config = ParallelConfig(
                    data=data, model=model, zero=zero, recompute=recompute, stages=stages, virtual=virtual,
                    micro_batches=micro, model_inside=inside, per_node=node_ranks, batch_size=batch_size,
                )  # fmt: skip
                yield config
                if stages == 1 and not zero:
                    yield from (replace(config, experts=ranks) for ranks in expert_degrees if data % ranks == 0)
                if may_split and config.can_split:
                    yield replace(config, zero_bubble=True)
    for context in context_degrees:
        data = ranks // context
        if 0 < batch_size < data:
            continue
        zeros = ZERO if data > 1 else ZERO[:1]
        for zero, recompute, attention in itertools.product(zeros, recompute_kinds, ATTENTION):
            yield ParallelConfig(
                data=data, context=context, attention=attention, zero=zero, recompute=recompute,
                per_node=node_ranks, batch_size=batch_size,
            )  # fmt: skip


def _micro_batches(batch_size: int, data: int) -> list[int]:
    """Return numbers of equal micro-batches into which the samples of every rank can be split."""
    if batch_size % data == 0:
        return divisors(max(1, batch_size // data))
    return [1] if batch_size > data else []  # some ranks have a sample more, or others none


def _schedules(stages: int, max_stages: int, micro_batches: list[int]) -> Iterator[tuple[int, int]]:
    """Yield stages of each rank and numbers of micro-batches, of those that the batch allows."""
    if stages == 1:
        yield 1, 1
        return
    for virtual in (1, 2, 4):
        # Interleaved stages take micro-batches in groups of the number of ranks.
        fitting = (micro for micro in micro_batches if virtual == 1 or micro % stages == 0)
        if stages * virtual <= max_stages:
            yield from ((virtual, micro) for micro in fitting)


def _build_memory_error(
    work: LayerWork,
    space: list[tuple[ParallelConfig, ConfigProblem]],
    room: float,
    limits: Sequence[str],
) -> PlanError:
    """Return the error to raise where no config has strategies that fit."""
    result = find_min_memory([config_problem.problem for _, config_problem in space], _MIN_MEMORY_S)
    if result.least is None and result.bound == math.inf:
        return PlanError(
            explain_empty_space(limits, tr(": {count} are left, and in each a layer has no strategy", count=len(space)))
        )
    facts = {"bound": format_bytes(result.bound), "room": format_bytes(room)}
    if result.least is None:
        return PlanError(
            tr(
                "No Plan fits: every one needs at least {bound} a rank{found}, and there are {room}. Take more ranks, "
                "ranks with more memory, or a smaller batch.",
                **facts,
                found="",
            )
        )
    (config, config_problem), least = space[result.index], result.least
    facts |= {"least": format_bytes(least.peak, up=True), "where": str(config), "bytes": str(math.ceil(least.peak))}
    facts["part"] = tr(_MEMORY[largest_part(config_problem.problem, least)])
    seconds = config_problem.problem.seconds(least.pick, least.stage_of)
    solution = Solution(pick=least.pick, seconds=seconds, bound=seconds, stage_of=least.stage_of)
    more = (
        {}
        if result.is_proved
        else {"found": tr("; {least} is enough ({where}: {bytes} bytes, most of it {part}), and less may be", **facts)}
    )
    return DoesNotFitError(
        tr(
            "No Plan fits: every one needs {least} a rank or more ({where}: {bytes} bytes), most of it {part}, and "
            "there are {room}. Take more ranks, ranks with more memory, or a smaller batch."
            if result.is_proved
            else "No Plan fits: every one needs at least {bound} a rank{found}, and there are {room}. Take more "
            "ranks, ranks with more memory, or a smaller batch.",
            **facts,
            **more,
        ),
        build_candidate(work, config, config_problem, solution),
    )

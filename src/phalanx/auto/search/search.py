"""`search`: search the fastest parallel configuration of a transformer run spec (pure).

The space is everything that `dimensions` says. Its choices are taken in the order of a lower bound of their time: the
products alone, at the rate of large ones, with the pipeline's idle time. As soon as that bound reaches the best time
found, no choice that is left can be better, so the result is the optimum and the gap is 0 %. Stopped before, the bound
of the next choice bounds all that are left. (Best-first branch and bound; A. Land and A. Doig, 1960.)

All that is about the closed form of `predict`. The fastest few by it are simulated event by event, which may order them
otherwise, and are returned in the order of that.
"""

from __future__ import annotations

import heapq
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.predict.memory_model import Footprint, compute_footprint
from phalanx.auto.predict.prediction import BREAKDOWN, USABLE, Prediction, predict
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.step_seconds import StepSeconds
from phalanx.auto.search.request import SearchRequest, read_limit, read_request
from phalanx.auto.search.result import SearchResult, why_not
from phalanx.auto.search.space import MOST_VIRTUAL, get_knobs, list_dimensions, list_runs, max_tensor_parallel
from phalanx.auto.simulate.events import WHOLE_ROUNDS
from phalanx.auto.simulate.run import simulate_run
from phalanx.auto.simulate.values import step_price
from phalanx.cluster.spec.cluster import Cluster
from phalanx.cluster.spec.devices import GIB
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import Labels, tr

_MEMORY: Labels = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered parameters",
    "workspace": "kernel workspace",
}
"""What the parts of a rank's memory are called."""


_T = TypeVar("_T")

_MEMORY_KNOBS = ("dp", "tp", "pp", "vpp", "zero", "micro", "recompute")
"""Knobs that `footprint` depends on."""

_TENSOR_PARALLEL_KNOBS = ("tp", "micro", "recompute", "order", "dp")
"""Knobs that `estimate_tensor_parallel` depends on."""

SIMULATED = 8
"""How many of the fastest are simulated at least, so that the first is the same whatever smaller number is shown."""

_PASSES = 100_000
"""How many passes of stages are simulated at most, about a second of one core."""


@dataclass(frozen=True, slots=True)
class RunCandidate:
    """One configuration of the run, and its predicted cost."""

    run: RunSpec
    prediction: Prediction
    """By the closed form."""

    simulated_s: float | None = None
    """Seconds of a step that is simulated event by event; None where that would take too long."""

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, simulated if it was."""
        return self.prediction.step_time_s if self.simulated_s is None else self.simulated_s

    @property
    def usd_per_step(self) -> float | None:
        """Price of a step on all devices; None if it is not known."""
        return step_price(self.step_time_s, self.run.cluster.usd_per_hour)

    @property
    def values(self) -> dict[str, int | str]:
        """The knobs."""
        return get_knobs(self.run)

    @property
    def memory_bytes(self) -> float:
        """Bytes of the peak rank."""
        return self.prediction.memory_gib * GIB

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by cause, by the closed form."""
        breakdown = self.prediction.breakdown.items()
        return {name.removesuffix("_s"): seconds for name, seconds in breakdown if name.endswith("_s")}

    def part_label(self, part: str) -> str:
        """Return the name of a part, in the user's language."""
        return tr(BREAKDOWN[part])

    def is_same_as(self, other: object) -> bool:
        """Return whether another candidate is the same configuration."""
        return self == other

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True, kw_only=True)
class RunSearch(SearchResult[RunCandidate]):
    """The fastest configurations by the closed form, in the order of their simulated steps."""

    request: SearchRequest
    closed_form_s: float
    """Seconds of a step of the fastest configuration, by the closed form, as is the bound."""

    choices: int
    """Configurations of the space, those that do not fit among them."""

    priced: int
    """How many the closed form was computed for; the bound or their memory ruled out the others."""

    simulated: int
    """How many of the fastest by the closed form were simulated event by event."""

    dimensions: dict[str, tuple[int | str, ...]]
    """The values of every knob that the space has."""

    @property
    def proved_s(self) -> float:
        """Seconds of the fastest configuration by the closed form."""
        return self.closed_form_s

    @property
    def not_searched(self) -> str:
        """What a run spec may contain and no candidate has, as the end of a sentence."""
        return tr(
            "cp, ep and hsdp (1 in every choice); schedules other than the file's ({schedule}); tp above {cut}; vpp "
            "above {virtual}; dp and micro-batches that do not divide the batch; other orders of ranks",
            schedule=self.request.base.schedule,
            virtual=MOST_VIRTUAL,
            cut=max_tensor_parallel(self.request.base),
        )

    def why_not(self, *limits: str) -> str:
        """Return what it would cost to keep to further limits, such as `tp=1`.

        Args:
            *limits: As `search` takes them.

        Raises:
            ConfigError: If none is given, or one cannot be.
        """

        def search_again(more: Sequence[str]) -> RunSearch:
            limits = (*self.request.limits, *map(read_limit, more))
            return search_request(SearchRequest(base=self.request.base, limits=limits))

        return why_not(self, limits, search_again)


def search(
    described: Mapping[str, Any],
    cluster: str | Cluster | None = None,
    *,
    limits: Iterable[str] = (),
    top_k: int = 5,
    time_limit: float | None = None,
    constants: Constants = DEFAULT,
) -> RunSearch:
    """Return the fastest configurations to train a transformer that fit the memory of every device.

    Args:
        described: A run as `px.predict` takes it, without what is searched.
        cluster: Words such as `h100x8,nodes=16`; that of `described` when None.
        limits: What is fixed: `tp<=8`, `pp=4`, `recompute=none`.
        top_k: How many choices to return.
        time_limit: Seconds after which the best so far and its gap are returned.
        constants: The physical quantities to compute with.

    Raises:
        ConfigError: If the job cannot be.
        PlanError: If no choice keeps to the limits and fits; says the least memory that any needs, and for what.
    """
    return search_request(
        read_request(described, cluster, limits), top_k=top_k, time_limit=time_limit, constants=constants
    )


def search_request(
    request: SearchRequest, *, top_k: int = 5, time_limit: float | None = None, constants: Constants = DEFAULT
) -> RunSearch:
    """See `search`."""
    if top_k < 1:
        raise ConfigError(
            tr("auto_parallel was asked for {name}={value}. Give a number above 0.", name="top_k", value=top_k)
        )
    runs = list(list_runs(request))
    if not runs:
        limits = ", ".join(map(str, request.limits)) or tr("none")
        raise PlanError(
            tr(
                "No parallel configuration on {devices} devices satisfies the limits ({limits}). Relax one, or use "
                "another number of devices.",
                devices=request.devices,
                limits=limits,
            )
        )
    room = USABLE * request.base.device.memory
    least: tuple[float, RunSpec, Footprint | None] = (math.inf, runs[0], None)
    ordered: list[tuple[float, int, RunSpec]] = []
    bytes_of, seconds_of = (
        _cache_by_knobs(compute_footprint, *_MEMORY_KNOBS),
        _cache_by_knobs(partial(estimate_tensor_parallel, constants=constants), *_TENSOR_PARALLEL_KNOBS),
    )
    for number, run in enumerate(runs):
        footprint = bytes_of(run)
        if footprint.total <= room:
            ordered.append((lower_bound(run, seconds_of(run)), number, run))
        elif footprint.total < least[0]:
            least = (footprint.total, run, footprint)
    if not ordered:
        raise PlanError(_memory_error(request, *least))
    ordered.sort(key=lambda entry: entry[:2])
    return _best_first(request, runs, ordered, top_k, time_limit, constants)


def _best_first(
    request: SearchRequest,
    runs: list[RunSpec],
    ordered: list[tuple[float, int, RunSpec]],
    top_k: int,
    time_limit: float | None,
    constants: Constants,
) -> RunSearch:
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    heap: list[tuple[float, int, RunCandidate]] = []  # a heap whose first is the slowest kept
    priced, bound, most = 0, math.inf, max(top_k, SIMULATED)
    for low, number, run in ordered:
        # All that are simulated must be proved, so the slowest of them is the mark.
        if len(heap) == most and low >= -heap[0][0]:
            break
        if heap and time.monotonic() > stop:
            bound = low
            break
        prediction = predict(run, constants, interval=False)
        priced += 1
        heapq.heappush(heap, (-prediction.step_time_s, -number, RunCandidate(run, prediction)))
        if len(heap) > most:
            heapq.heappop(heap)
    best = [candidate for _, _, candidate in sorted(heap, reverse=True)]
    shown = _rank_by_simulation(best, constants, stop)
    return RunSearch(
        request=request,
        top_k=tuple(shown[:top_k]),
        closed_form_s=best[0].prediction.step_time_s,
        bound=min(bound, best[0].prediction.step_time_s),
        choices=len(runs),
        priced=priced,
        simulated=sum(candidate.simulated_s is not None for candidate in shown),
        dimensions=list_dimensions(runs),
    )


def _rank_by_simulation(best: Iterable[RunCandidate], constants: Constants, stop: float) -> list[RunCandidate]:
    """Return choices in the order of their simulated steps; those that would take too long to simulate come last.

    After the time `stop` only the first is simulated.
    """
    simulated: list[RunCandidate] = []
    rest: list[RunCandidate] = []
    passes = 0
    for candidate in best:
        passes += _passes(candidate.run)
        if simulated and (passes > _PASSES or time.monotonic() > stop):
            rest.append(candidate)
        else:
            step = simulate_run(candidate.run, constants).simulation.step_time_s
            simulated.append(replace(candidate, simulated_s=step))
    return sorted(simulated, key=lambda candidate: candidate.step_time_s) + rest


def _passes(run: RunSpec) -> int:
    """Return about how many passes the simulation of a run takes: it leaves out what comes again and again."""
    par, count = run.parallel, math.ceil(run.micro_batches)
    if run.schedule == "zero-bubble":
        return 3 * par.pp * par.vpp * count
    if run.schedule == "gpipe":
        return 2 * par.pp * par.vpp * count
    return 2 * par.pp * par.vpp * min(count, WHOLE_ROUNDS * par.pp)


def _cache_by_knobs(function: Callable[[RunSpec], _T], *knobs: str) -> Callable[[RunSpec], _T]:
    """Return a function of a run that is asked once for all runs of a job with the same of these knobs."""
    cache: dict[tuple[int | str, ...], _T] = {}
    knobs_in = operator.itemgetter(*knobs)

    def of(run: RunSpec) -> _T:
        key = knobs_in(get_knobs(run))
        if key not in cache:
            cache[key] = function(run)
        return cache[key]

    return of


def estimate_tensor_parallel(run: RunSpec, constants: Constants = DEFAULT) -> float:
    """Return the seconds at least in which a block, forward and backward, waits for collectives of sharded layers.

    Waits for experts and rings are in it: no choice of a search has any, for `ep` and `cp` are 1.
    """
    if run.parallel.tp == 1 or run.overlap.tp:
        return 0.0
    seconds = StepSeconds(run, constants)
    return seconds.waits_forward + seconds.waits_backward


def lower_bound(run: RunSpec, tensor_parallel_s: float = 0.0) -> float:
    """Return seconds that a step of a run takes at least, whatever else it has to do.

    Products at the rate of large ones, spread over all devices with nothing in between, collectives of sharded layers,
    and the idle time of its pipeline. Attention, element-wise kernels, the host, other communication and the optimizer
    come on top.

    Args:
        run: The run.
        tensor_parallel_s: As `estimate_tensor_parallel` returns it.
    """
    model, par = run.model, run.parallel
    token_count = run.batch.whole * model.seq
    block = model.attention_parameters + max(1, model.top_k) * model.expert_parameters
    # Shards leave the last product out of what is recomputed (`predict.StepSeconds`).
    last = model.hidden * model.inner if run.habits.stops_checkpoints and not model.experts else 0
    passes = 4 - last / block if run.recompute == "full" else 3
    rate = run.device.rate(run.precision)
    blocks = 2 * passes * token_count * model.layers * block / par.ranks / rate
    blocks += run.micro_batches * model.layers / par.pp * tensor_parallel_s
    idle = (par.pp - 1) / par.vpp / run.micro_batches if run.schedule != "zero-bubble" else 0.0
    return blocks * (1 + idle)


def _memory_error(request: SearchRequest, total: float, run: RunSpec, footprint: Footprint | None) -> str:
    assert footprint is not None
    parts = {name: getattr(footprint, name) for name in footprint.__dataclass_fields__}
    most = max(parts, key=lambda name: parts[name])
    choice = " ".join(f"{name}={value}" for name, value in get_knobs(run).items())
    return tr(
        "No choice fits: the least that any needs is {least} GiB a device ({choice}), of which {part} {most} GiB, and "
        "{device} has {room} GiB to use. Take more devices, devices with more memory, a shorter sequence or a smaller "
        "batch.",
        least=f"{total / GIB:.1f}",
        choice=choice,
        part=tr(_MEMORY[most]),
        most=f"{parts[most] / GIB:.1f}",
        device=request.base.device.name,
        room=f"{USABLE * request.base.device.memory / GIB:.1f}",
    )

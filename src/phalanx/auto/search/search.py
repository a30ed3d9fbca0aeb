"""The fastest way to cut a described transformer over a cluster, and a bound that proves how good it is (pure).

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from phalanx.auto.cost.constants import DEFAULT, Constants
from phalanx.auto.predict.memory_model import Footprint, footprint
from phalanx.auto.predict.prediction import USABLE, Prediction, StepSeconds, predict
from phalanx.auto.predict.run_spec import Run
from phalanx.auto.search.request import Job, read_job, read_limit
from phalanx.auto.search.space import MOST_VIRTUAL, choices_of, dimensions_of, knobs_of, most_cut
from phalanx.auto.simulate.events import WHOLE_ROUNDS
from phalanx.auto.simulate.run import simulate_run
from phalanx.cluster.messages.messages import text
from phalanx.cluster.spec.cluster import Cluster
from phalanx.cluster.spec.devices import GIB
from phalanx.errors import ConfigError, PlanError

_T = TypeVar("_T")

_OF_BYTES = ("dp", "tp", "pp", "vpp", "zero", "micro", "recompute")
"""Knobs that `footprint` depends on."""

_OF_CUT = ("tp", "micro", "recompute", "order", "dp")
"""Knobs that `cut_seconds` depends on."""

SIMULATED = 8
"""How many of the fastest are simulated at least, so that the first is the same whatever smaller number is shown."""

_PASSES = 100_000
"""How many passes of stages are simulated at most, about a second of one core."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the job, and what it takes."""

    run: Run
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
        cluster = self.run.cluster
        an_hour = cluster.usd_per_device_hour
        return None if an_hour is None else an_hour / 3600 * cluster.per_node * cluster.nodes * self.step_time_s

    @property
    def values(self) -> dict[str, int | str]:
        """The knobs."""
        return knobs_of(self.run)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found."""

    job: Job
    top_k: tuple[Choice, ...]
    """The fastest choices that fit by the closed form, in the order of their simulated steps."""

    closed_form_s: float
    """Seconds of a step of the fastest choice found, by the closed form."""

    bound: float
    """Seconds of a step that no choice of the space beats by the closed form."""

    choices: int
    """Choices of the space, those that do not fit among them."""

    priced: int
    """How many the closed form was asked for; the bound ruled out the others, or their memory did."""

    simulated: int
    """How many of the fastest by the closed form were simulated event by event."""

    dimensions: dict[str, tuple[int | str, ...]]
    """The values of every knob that the space has."""

    @property
    def best(self) -> Choice:
        """The choice whose simulated step is the fastest."""
        return self.top_k[0]

    @property
    def gap(self) -> float:
        """How much slower than the bound the fastest choice found is by the closed form, in %."""
        return (self.closed_form_s / self.bound - 1) * 100

    @property
    def not_searched(self) -> str:
        """What a described run may be and no choice is, as the end of a sentence."""
        return text(
            "left out described", schedule=self.job.base.schedule, virtual=MOST_VIRTUAL, cut=most_cut(self.job.base)
        )

    def why_not(self, *limits: str) -> str:
        """Return what it would cost to keep to further limits, such as `tp=1`.

        Args:
            *limits: As `search` takes them.

        Raises:
            ConfigError: If none is given, or one cannot be.
        """
        if not limits:
            raise ConfigError(text("why not nothing"))
        said = ", ".join(limits)
        try:
            other = search_job(Job(base=self.job.base, limits=(*self.job.limits, *map(read_limit, limits))))
        except PlanError as error:
            return text("why not impossible", limits=said, why=error)
        mine, theirs = self.best.prediction, other.best.prediction
        changes = {name: theirs.breakdown[name] - mine.breakdown[name] for name in mine.breakdown}
        cause = max((name for name in changes if name.endswith("_s")), key=lambda name: changes[name])
        if other.best == self.best:
            return text("why not same", limits=said, arrangement=self.best, step=f"{self.best.step_time_s:.4g} s")
        return text(
            "why not choice",
            limits=said,
            choice=other.best,
            step=f"{other.best.step_time_s:.4g} s",
            change=f"{other.best.step_time_s / self.best.step_time_s - 1:+.1%}",
            memory=f"{theirs.memory_gib - mine.memory_gib:+.1f} GiB",
            cause=text(f"spent {cause.removesuffix('_s')}"),
            more=f"{changes[cause]:+.3g} s",
        )


def search(
    described: Mapping[str, Any],
    cluster: str | Cluster | None = None,
    *,
    limits: Iterable[str] = (),
    top_k: int = 5,
    time_limit: float | None = None,
    constants: Constants = DEFAULT,
) -> Found:
    """Return the fastest ways to train a described transformer that fit the memory of every device.

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
    return search_job(read_job(described, cluster, limits), top_k=top_k, time_limit=time_limit, constants=constants)


def search_job(job: Job, *, top_k: int = 5, time_limit: float | None = None, constants: Constants = DEFAULT) -> Found:
    """See `search`."""
    if top_k < 1:
        raise ConfigError(text("not above zero", name="top_k", value=top_k))
    runs = list(choices_of(job))
    if not runs:
        kept = ", ".join(map(str, job.limits)) or text("none cut")
        raise PlanError(text("no choice", devices=job.devices, limits=kept))
    room = USABLE * job.base.device.memory
    least: tuple[float, Run, Footprint | None] = (math.inf, runs[0], None)
    ordered: list[tuple[float, int, Run]] = []
    bytes_of, seconds_of = _once(footprint, *_OF_BYTES), _once(partial(cut_seconds, constants=constants), *_OF_CUT)
    for number, run in enumerate(runs):
        held = bytes_of(run)
        if held.total <= room:
            ordered.append((lower_bound(run, seconds_of(run)), number, run))
        elif held.total < least[0]:
            least = (held.total, run, held)
    if not ordered:
        raise PlanError(_too_large(job, *least))
    ordered.sort(key=lambda one: one[:2])
    return _best_first(job, runs, ordered, top_k, time_limit, constants)


def _best_first(
    job: Job,
    runs: list[Run],
    ordered: list[tuple[float, int, Run]],
    top_k: int,
    time_limit: float | None,
    constants: Constants,
) -> Found:
    stop = math.inf if time_limit is None else time.monotonic() + time_limit
    kept: list[tuple[float, int, Choice]] = []  # a heap whose first is the slowest kept
    priced, bound, most = 0, math.inf, max(top_k, SIMULATED)
    for low, number, run in ordered:
        # All that are simulated must be proved, so the slowest of them is the mark.
        if len(kept) == most and low >= -kept[0][0]:
            break
        if kept and time.monotonic() > stop:
            bound = low
            break
        found = predict(run, constants)
        priced += 1
        heapq.heappush(kept, (-found.step_time_s, -number, Choice(run, found)))
        if len(kept) > most:
            heapq.heappop(kept)
    best = [choice for _, _, choice in sorted(kept, reverse=True)]
    shown = _by_events(best, constants, stop)
    return Found(
        job=job,
        top_k=tuple(shown[:top_k]),
        closed_form_s=best[0].prediction.step_time_s,
        bound=min(bound, best[0].prediction.step_time_s),
        choices=len(runs),
        priced=priced,
        simulated=sum(choice.simulated_s is not None for choice in shown),
        dimensions=dimensions_of(runs),
    )


def _by_events(best: Iterable[Choice], constants: Constants, stop: float) -> list[Choice]:
    """Return choices in the order of their simulated steps; those that would take too long to simulate come last.

    After the time `stop` only the first is simulated.
    """
    found: list[Choice] = []
    rest: list[Choice] = []
    passes = 0
    for choice in best:
        passes += _passes(choice.run)
        if found and (passes > _PASSES or time.monotonic() > stop):
            rest.append(choice)
        else:
            step = simulate_run(choice.run, constants).simulation.step_time_s
            found.append(replace(choice, simulated_s=step))
    return sorted(found, key=lambda choice: choice.step_time_s) + rest


def _passes(run: Run) -> int:
    """Return about how many passes the simulation of a run takes: it leaves out what comes again and again."""
    par, count = run.parallel, math.ceil(run.micro_batches)
    if run.schedule == "zero-bubble":
        return 3 * par.pp * par.vpp * count
    if run.schedule == "gpipe":
        return 2 * par.pp * par.vpp * count
    return 2 * par.pp * par.vpp * min(count, WHOLE_ROUNDS * par.pp)


def _once(function: Callable[[Run], _T], *knobs: str) -> Callable[[Run], _T]:
    """Return a function of a run that is asked once for all runs of a job with the same of these knobs."""
    known: dict[tuple[int | str, ...], _T] = {}
    knobs_in = operator.itemgetter(*knobs)

    def of(run: Run) -> _T:
        key = knobs_in(knobs_of(run))
        if key not in known:
            known[key] = function(run)
        return known[key]

    return of


def cut_seconds(run: Run, constants: Constants = DEFAULT) -> float:
    """Return the seconds at least in which a block, forward and backward, waits for collectives of cut layers."""
    if run.parallel.tp == 1 or run.overlap.tp:
        return 0.0
    seconds = StepSeconds(run, constants)
    return seconds.cut_layers + seconds.cut_backward


def lower_bound(run: Run, cut_s: float = 0.0) -> float:
    """Return seconds that a step of a run takes at least, whatever else it has to do.

    Products at the rate of large ones, spread over all devices with nothing in between, collectives of cut layers, and
    the idle time of its pipeline. Attention, element-wise kernels, the host, other communication and the optimizer come
    on top.

    Args:
        run: The run.
        cut_s: As `cut_seconds` returns it.
    """
    model, par = run.model, run.parallel
    rows = run.batch.whole * model.seq
    block = model.attention_parameters + max(1, model.top_k) * model.expert_parameters
    # Shards leave the last product out of what is computed again (`predict.StepSeconds`).
    last = model.hidden * model.inner if par.zero >= 2 and not model.experts else 0
    passes = 4 - last / block if run.recompute == "full" else 3
    rate = run.device.rate(run.precision)
    blocks = 2 * passes * rows * model.layers * block / par.ranks / rate
    blocks += run.micro_batches * model.layers / par.pp * cut_s
    idle = (par.pp - 1) / par.vpp / run.micro_batches if run.schedule != "zero-bubble" else 0.0
    return blocks * (1 + idle)


def _too_large(job: Job, total: float, run: Run, held: Footprint | None) -> str:
    assert held is not None
    parts = {name: getattr(held, name) for name in held.__dataclass_fields__}
    most = max(parts, key=lambda name: parts[name])
    choice = " ".join(f"{name}={value}" for name, value in knobs_of(run).items())
    return text(
        "no choice fits",
        least=f"{total / GIB:.1f}",
        choice=choice,
        part=text(f"held {most}"),
        most=f"{parts[most] / GIB:.1f}",
        device=job.base.device.name,
        room=f"{USABLE * job.base.device.memory / GIB:.1f}",
    )

"""The fastest way to cut a described transformer over a cluster, and a bound that proves how good it is (pure).

The space is everything that `dimensions` says. Its choices are taken in the order of a lower bound of their time: the
products alone, at the rate of large ones, with the pipeline's idle time. As soon as that bound reaches the best time
found, no choice that is left can be better, so the result is the optimum and the gap is 0 %. Stopped before, the bound
of the next choice bounds all that are left. (Best-first branch and bound; A. Land and A. Doig, 1960.)
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.auto.arrangement import RECOMPUTE, divisors
from phalanx.auto.constants import DEFAULT, Constants
from phalanx.auto.described_run import Run, why_uncut
from phalanx.auto.footprint import Footprint, footprint
from phalanx.auto.job import Job, read_job, read_limit
from phalanx.auto.predict import USABLE, Prediction, predict
from phalanx.cluster.description import Cluster
from phalanx.cluster.devices import GIB
from phalanx.cluster.messages import text
from phalanx.errors import ConfigError, PlanError

_MAX_VIRTUAL = 12


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the job, and what it takes."""

    run: Run
    prediction: Prediction

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
    """The fastest choices that fit, best first."""

    bound: float
    """Seconds of a step that no choice of the space beats."""

    choices: int
    """Choices of the space, those that do not fit among them."""

    priced: int
    """How many were simulated; the bound ruled out the others, or their memory did."""

    dimensions: dict[str, tuple[int | str, ...]]
    """The values of every knob that the space has."""

    @property
    def best(self) -> Choice:
        """The fastest choice."""
        return self.top_k[0]

    @property
    def gap(self) -> float:
        """How much slower than the bound the best choice may be, in %."""
        return (self.best.prediction.step_time_s / self.bound - 1) * 100

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
            return text("why not same", limits=said, arrangement=self.best, step=f"{mine.step_time_s:.4g} s")
        return text(
            "why not choice",
            limits=said,
            choice=other.best,
            step=f"{theirs.step_time_s:.4g} s",
            change=f"{theirs.step_time_s / mine.step_time_s - 1:+.1%}",
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
    runs = list(choices_of(job))
    if not runs:
        kept = ", ".join(map(str, job.limits)) or text("none cut")
        raise PlanError(text("no choice", devices=job.devices, limits=kept))
    room = USABLE * job.base.device.memory
    least: tuple[float, Run, Footprint | None] = (math.inf, runs[0], None)
    ordered: list[tuple[float, int, Run]] = []
    for number, run in enumerate(runs):
        held = footprint(run)
        if held.total <= room:
            ordered.append((lower_bound(run), number, run))
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
    priced, bound = 0, math.inf
    for low, number, run in ordered:
        # All of the top k must be proved, so the slowest of them is the mark.
        if len(kept) == top_k and low >= -kept[0][0]:
            break
        if kept and time.monotonic() > stop:
            bound = low
            break
        found = predict(run, constants)
        priced += 1
        heapq.heappush(kept, (-found.step_time_s, -number, Choice(run, found)))
        if len(kept) > top_k:
            heapq.heappop(kept)
    best = [choice for _, _, choice in sorted(kept, reverse=True)]
    return Found(
        job=job,
        top_k=tuple(best),
        bound=min(bound, best[0].prediction.step_time_s),
        choices=len(runs),
        priced=priced,
        dimensions={
            name: tuple(
                sorted({knobs_of(run)[name] for run in runs}, key=RECOMPUTE.index if name == "recompute" else int)
            )
            for name in knobs_of(runs[0])
        },
    )


def lower_bound(run: Run) -> float:
    """Return seconds that a step of a run takes at least, whatever else it has to do.

    Products at the rate of large ones, spread over all devices with nothing in between, and the idle time of its
    pipeline. Attention, element-wise kernels, the host, communication and the optimizer come on top.
    """
    model, par = run.model, run.parallel
    rows = run.batch.whole * model.seq
    block = model.attention_parameters + max(1, model.top_k) * model.expert_parameters
    passes = 4 if run.recompute == "full" else 3
    rate = run.device.rate(run.precision)
    blocks = 2 * passes * rows * model.layers * block / par.ranks / rate
    idle = (par.pp - 1) / par.vpp / run.micro_batches if run.schedule != "zero-bubble" else 0.0
    return blocks * (1 + idle)


def choices_of(job: Job) -> Iterator[Run]:
    """Yield every run of the space that keeps to the limits."""
    base, devices = job.base, job.devices
    for tp, pp in itertools.product(divisors(devices), repeat=2):
        if devices % (tp * pp) or not _can_cut(base, tp, pp):
            continue
        dp = devices // tp // pp
        if base.batch.whole % dp:
            continue
        sizes = divisors(base.batch.whole // dp)
        virtual = _virtual_stages(base.model.layers, pp)
        zeros = (0,) if dp == 1 else (0, 1, 2, 3)
        for micro, vpp, zero, recompute in itertools.product(sizes, virtual, zeros, RECOMPUTE):
            if recompute == "selective" and zero < 2 and base.model.flash:
                continue  # fused attention keeps no scores: the same as none
            if vpp > 1 and (base.batch.whole // dp // micro) % pp:
                continue  # interleaved stages take micro-batches in groups of the number of stages
            run = _with(base, tp=tp, pp=pp, dp=dp, vpp=vpp, zero=zero, micro=micro, recompute=recompute)
            if all(limit.allows(knobs_of(run)) for limit in job.limits):
                yield run


def knobs_of(run: Run) -> dict[str, int | str]:
    """Return what a search chose of a run."""
    par = run.parallel
    return {
        "dp": par.dp,
        "tp": par.tp,
        "pp": par.pp,
        "vpp": par.vpp,
        "zero": par.zero,
        "micro": run.batch.micro,
        "recompute": run.recompute,
    }


def _with(base: Run, *, micro: int, recompute: str, **cut: int) -> Run:
    # Values of a checked run and whole numbers: nothing to check again, some hundred thousand times.
    parallel = base.parallel.model_copy(update={**cut, "sequence_parallel": cut["tp"] > 1})
    batch = base.batch.model_copy(update={"micro": micro})
    return base.model_copy(update={"parallel": parallel, "batch": batch, "recompute": recompute})


def _can_cut(base: Run, tp: int, pp: int) -> bool:
    cut = base.parallel.model_copy(update={"tp": tp, "pp": pp, "sequence_parallel": tp > 1})
    return tp <= base.cluster.per_node and why_uncut(base.model, cut) is None


def _virtual_stages(layers: int, pp: int) -> list[int]:
    if pp == 1 or layers % pp:
        return [1]
    return [v for v in divisors(layers // pp) if v <= _MAX_VIRTUAL]


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

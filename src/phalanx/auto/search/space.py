"""The ways to cut a described transformer over a cluster that are searched (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from phalanx.auto.cost.parallel_config import RECOMPUTE, divisors
from phalanx.auto.predict.prediction import layout_of
from phalanx.auto.predict.run_spec import ORDERS, Order, Run, why_uncut
from phalanx.auto.search.request import Job

MOST_VIRTUAL = 12
"""Stages of a rank."""

_MOST_CUT = 8
"""Ranks that layers are cut over in published runs, and so in clusters of smaller nodes."""


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
        virtual = _virtual_stages(base, pp)
        zeros = (0,) if dp == 1 else (0, 1, 2, 3)
        orders = _orders(job, tp=tp, pp=pp, dp=dp)
        for micro, vpp, zero, recompute, order in itertools.product(sizes, virtual, zeros, RECOMPUTE, orders):
            if recompute == "selective" and zero < 2 and base.model.flash:
                continue  # fused attention keeps no scores: the same as none
            if not _runs(base.schedule, base.batch.whole // dp // micro, pp, vpp):
                continue
            run = _with(base, micro=micro, recompute=recompute, tp=tp, pp=pp, dp=dp, vpp=vpp, zero=zero, order=order)
            if all(limit.allows(knobs_of(run)) for limit in job.limits):
                yield run


def _orders(job: Job, **sizes: int) -> list[Order]:
    """Return the allowed orders of ranks that differ in what lies on one node; of equal ones the first."""
    base, asked = job.base, [limit for limit in job.limits if limit.knob == "order"]
    found: dict[tuple[tuple[int, int] | None, ...], Order] = {}
    for order in (one for one in ORDERS if all(limit.allows({"order": one}) for limit in asked)):
        run = base.model_copy(update={"parallel": base.parallel.model_copy(update={**sizes, "order": order})})
        layouts = (layout_of(run, axis) for axis in ("tp", "dp", "pp"))
        found.setdefault(tuple((at.in_node, at.sharing) if at.in_node < at.ranks else None for at in layouts), order)
    return list(found.values())


def _runs(schedule: str, micro_batches: int, pp: int, vpp: int) -> bool:
    """Return whether a schedule takes so many micro-batches."""
    if vpp > 1:  # interleaved stages take them in groups of the number of stages
        return micro_batches % pp == 0
    return schedule not in ("interleaved", "zero-bubble") or micro_batches % max(1, micro_batches // pp) == 0


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
        "order": par.order,
    }


def _with(base: Run, *, micro: int, recompute: str, tp: int, **cut: int | str) -> Run:
    # Values of a checked run and whole numbers: nothing to check again, some hundred thousand times.
    parallel = base.parallel.model_copy(update={**cut, "tp": tp, "sequence_parallel": tp > 1})
    batch = base.batch.model_copy(update={"micro": micro})
    return base.model_copy(update={"parallel": parallel, "batch": batch, "recompute": recompute})


def _can_cut(base: Run, tp: int, pp: int) -> bool:
    cut = base.parallel.model_copy(update={"tp": tp, "pp": pp, "sequence_parallel": tp > 1})
    return tp <= most_cut(base) and why_uncut(base.model, cut) is None


def most_cut(base: Run) -> int:
    """Return how many ranks layers are cut over at most: those of a node, or as many as published runs do."""
    return max(base.cluster.per_node, _MOST_CUT)


def _virtual_stages(base: Run, pp: int) -> list[int]:
    if pp == 1 or base.model.layers % pp or base.schedule == "gpipe":
        return [1]
    return [v for v in divisors(base.model.layers // pp) if v <= MOST_VIRTUAL]


def dimensions_of(runs: Iterable[Run]) -> dict[str, tuple[int | str, ...]]:
    """Return the values of every knob of a space."""
    found: dict[str, set[int | str]] = {}
    for run in runs:
        for name, value in knobs_of(run).items():
            found.setdefault(name, set()).add(value)
    words: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "order": ORDERS}
    rank = {name: known.index for name, known in words.items()}
    return {name: tuple(sorted(values, key=rank.get(name, int))) for name, values in found.items()}

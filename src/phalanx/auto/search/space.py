"""`list_runs`: enumerate the parallel configurations of a transformer run spec (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from phalanx.auto.cost.parallel_config import RECOMPUTE, divisors
from phalanx.auto.predict.rank_groups import group_topology
from phalanx.auto.predict.run_parts import ORDERS, Order, find_shape_conflict
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.search.request import SearchRequest

MOST_VIRTUAL = 12
"""Stages of a rank."""

_MOST_TENSOR_PARALLEL = 8
"""Ranks that layers are sharded over in published runs, and so in clusters of smaller nodes."""


def list_runs(request: SearchRequest) -> Iterator[RunSpec]:
    """Yield every run of the space that keeps to the limits."""
    base, devices = request.base, request.devices
    for tp, pp in itertools.product(divisors(devices), repeat=2):
        if devices % (tp * pp) or not _can_shard(base, tp, pp):
            continue
        dp = devices // tp // pp
        if base.batch.whole % dp:
            continue
        sizes = divisors(base.batch.whole // dp)
        virtual = _virtual_stages(base, pp)
        zeros = (0,) if dp == 1 else (0, 1, 2, 3)
        orders = _orders(request, tp=tp, pp=pp, dp=dp)
        for micro, vpp, zero, recompute, order in itertools.product(sizes, virtual, zeros, RECOMPUTE, orders):
            if recompute == "selective" and not base.habits.stops_checkpoints and base.model.flash:
                continue  # fused attention keeps no scores: the same as none
            if not _runs(base, base.batch.whole // dp // micro, pp, vpp):
                continue
            run = _build_run(
                base, micro=micro, recompute=recompute, tp=tp, pp=pp, dp=dp, vpp=vpp, zero=zero, order=order
            )
            if all(limit.allows(get_knobs(run)) for limit in request.limits):
                yield run


def _orders(request: SearchRequest, **sizes: int) -> list[Order]:
    """Return the allowed orders of ranks that differ in what lies on one node; of equal ones the first."""
    base, limits = request.base, [limit for limit in request.limits if limit.knob == "order"]
    orders: dict[tuple[tuple[int, int] | None, ...], Order] = {}
    for order in (order_name for order_name in ORDERS if all(limit.allows({"order": order_name}) for limit in limits)):
        run = base.model_copy(update={"parallel": base.parallel.model_copy(update={**sizes, "order": order})})
        layouts = (group_topology(run, axis) for axis in ("tp", "dp", "pp"))
        orders.setdefault(tuple((at.in_node, at.sharing) if at.in_node < at.ranks else None for at in layouts), order)
    return list(orders.values())


def _runs(base: RunSpec, micro_batches: int, pp: int, vpp: int) -> bool:
    """Return whether a schedule takes so many micro-batches (`find_schedule_conflict`)."""
    if vpp > 1:  # interleaved stages take them in groups of the number of stages
        return micro_batches % pp == 0
    if base.schedule == "zero-bubble":
        return micro_batches % max(1, micro_batches // pp) == 0
    return base.schedule == "gpipe" or micro_batches >= pp or base.habits.pipelines != "torch"


def get_knobs(run: RunSpec) -> dict[str, int | str]:
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


def _build_run(base: RunSpec, *, micro: int, recompute: str, tp: int, **sizes: int | str) -> RunSpec:
    # Values of a checked run and whole numbers: nothing to check again, some hundred thousand times.
    parallel = base.parallel.model_copy(update={**sizes, "tp": tp, "sequence_parallel": tp > 1})
    batch = base.batch.model_copy(update={"micro": micro})
    return base.model_copy(update={"parallel": parallel, "batch": batch, "recompute": recompute})


def _can_shard(base: RunSpec, tp: int, pp: int) -> bool:
    parallel = base.parallel.model_copy(update={"tp": tp, "pp": pp, "sequence_parallel": tp > 1})
    return tp <= max_tensor_parallel(base) and find_shape_conflict(base.model, parallel) is None


def max_tensor_parallel(base: RunSpec) -> int:
    """Return how many ranks layers are sharded over at most: those of a node, or as many as published runs do."""
    return max(base.cluster.per_node, _MOST_TENSOR_PARALLEL)


def _virtual_stages(base: RunSpec, pp: int) -> list[int]:
    if pp == 1 or base.model.layers % pp or base.schedule == "gpipe":
        return [1]
    return [v for v in divisors(base.model.layers // pp) if v <= MOST_VIRTUAL]


def list_dimensions(runs: Iterable[RunSpec]) -> dict[str, tuple[int | str, ...]]:
    """Return the values of every knob of a space."""
    values_of: dict[str, set[int | str]] = {}
    for run in runs:
        for name, value in get_knobs(run).items():
            values_of.setdefault(name, set()).add(value)
    words: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "order": ORDERS}
    rank = {name: order.index for name, order in words.items()}
    return {name: tuple(sorted(values, key=rank.get(name, int))) for name, values in values_of.items()}

"""Benchmarks of `phalanx calibrate`: collectives by kind, backend, group and size."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist

from phalanx.cluster.calibration.figures import BACKENDS, Kind
from phalanx.diagnose.calibrate.operators import COLD_BYTES, Benchmark, BenchmarkTimer, Points, in_turn, points

_SAMPLES = 2
_PAIRS, _IN_A_ROW = 4, 4
"""Samples of runs in which ranks meet, beside as many in which they do not, and runs a sample."""

_BESIDE_BYTES, _BESIDE_SAMPLES = 2**23, 5

# Newer releases of torch name them so, and warn of the older names.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Groups = dict[tuple[str, int], dist.ProcessGroup]
"""This rank's group by backend and number of ranks."""


def groups() -> Groups:
    """Return a group of every size that divides the ranks, neighbours together; collective over all ranks."""
    ranks, mine = dist.get_world_size(), dist.get_rank()
    process_groups: Groups = {}
    for backend in BACKENDS:
        for size in (size for size in range(2, ranks + 1) if ranks % size == 0):
            for first in range(0, ranks, size):
                # Not comm.new_group, which keeps one group for the same ranks whatever its backend.
                group = dist.new_group(list(range(first, first + size)), backend=backend)
                if first <= mine < first + size:
                    process_groups[backend, size] = group
    return process_groups


def collective(kind: Kind, group: dist.ProcessGroup, *, quick: bool) -> Points:
    """Time a collective by its size, while the other groups have theirs; collective over all ranks."""
    sizes = (2**6, 2**16, 2**20) if quick else (2**6, 2**12, 2**16, 2**20, 2**22, 2**24)
    most = 4 if quick or dist.get_backend(group) == "gloo" else 20  # a collective of gloo takes milliseconds
    return points((sizes,), (1,), [_seconds(_call(kind, size, group), size, kind, most) for size in sizes])


def _seconds(run: Benchmark, size: int, kind: Kind, most: int) -> float:
    # As many runs on every rank: how many may not depend on a clock.
    times = max(1, min(most, 2**20 // size))
    run()
    taken = []
    for _ in range(_SAMPLES):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(times):
            run()
        taken.append((time.perf_counter() - started) / times)
    return statistics.median(taken) / (2 if kind == "send" else 1)


def _call(kind: Kind, size: int, group: dist.ProcessGroup) -> Benchmark:
    """Return one call of a collective; a send is there and back.

    Tensors take turns, as in a step: large ones are in no cache.
    """
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, size // 4 // ranks)
    # Memory that was never written is one page of zeros, which any cache holds.
    wholes = itertools.cycle(in_turn(torch.ones(max(COLD_BYTES // 4, part * ranks)), part * ranks))
    slices = itertools.cycle(in_turn(torch.ones(max(COLD_BYTES // 4, part)), part))
    turn = iter(range(2**62))

    def there_and_back() -> None:
        other = mine ^ 1
        if other >= ranks:
            return
        whole = next(wholes)
        for sender in (0, 1):
            if mine % 2 == sender:
                dist.send(whole, group=group, group_dst=other)
            else:
                dist.recv(whole, group=group, group_src=other)

    def to_all() -> None:
        whole = next(wholes)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    calls: dict[Kind, Benchmark] = {
        "all_reduce": lambda: dist.all_reduce(next(wholes), group=group),
        "all_gather": lambda: _gather(next(wholes), next(slices), group=group),
        "reduce_scatter": lambda: _scatter(next(slices), next(wholes), group=group),
        "all_to_all": to_all,
        # The source changes: the one before may not run ahead of those that wait for it.
        "broadcast": lambda: dist.broadcast(next(wholes), group=group, group_src=next(turn) % ranks),
        "send": there_and_back,
    }
    return calls[kind]


def more_s(clock: BenchmarkTimer, meeting: Benchmark, alone: Benchmark, *, quick: bool) -> float:
    """Return how much longer a run takes in which ranks meet than one in which they do not, the median of some pairs.

    Ranks that share a core would seem faster alone than they are in turns, so there it is the processor's time.
    Collective over all ranks.
    """
    more = []
    for _ in range(2 if quick else _PAIRS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(_IN_A_ROW):
            meeting()
        taken = time.perf_counter() - started
        more.append(taken / _IN_A_ROW - clock.sample(alone, _IN_A_ROW))
    return max(statistics.median(more), 1e-6)


def contention(group: dist.ProcessGroup, *, quick: bool) -> float:
    """Return the extra seconds for each second that an all-reduce and products share; collective over all ranks."""
    x = torch.zeros(_BESIDE_BYTES // (32 if quick else 4))
    a, b = torch.randn(256, 256), torch.randn(256, 256)

    def reduce() -> None:
        dist.all_reduce(x, group=group)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b)

    def beside() -> None:
        started = dist.all_reduce(x, group=group, async_op=True)
        work(times)
        if started is not None:
            started.wait()

    samples = _SAMPLES if quick else _BESIDE_SAMPLES
    link = _median(reduce, samples)
    # As much work on every rank, whatever each one's clock says: else it is the difference that is waited for.
    target = torch.tensor(max(1.0, link / (_median(lambda: work(20), samples) / 20)))
    dist.all_reduce(target, dist.ReduceOp.MAX, group=group)
    times = round(target.item())
    alone, both = _median(lambda: work(times), samples), _median(beside, samples)
    return max(0.0, (both - max(alone, link)) / min(alone, link))


def _median(run: Benchmark, samples: int) -> float:
    run()
    taken = []
    for _ in range(samples):
        dist.barrier()
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def kinds() -> Sequence[Kind]:
    """Return the kinds of collectives."""
    return get_args(Kind)

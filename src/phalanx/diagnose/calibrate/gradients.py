"""Benchmarks of `phalanx calibrate`: gradient all-reduce and ZeRO units.

Each is what training runs, so its copies, hooks, new memory and Python count, and not only what moves between ranks.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from phalanx.cluster.calibration.figures import Sharding
from phalanx.comm.context import current
from phalanx.diagnose.calibrate import collectives as links
from phalanx.diagnose.calibrate.operators import BenchmarkTimer, Points, points
from phalanx.parallel.data.reducer import Reducer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.model_shape import shape_of
from phalanx.plan.buckets import GradientBucket
from phalanx.plan.mesh import Position
from phalanx.plan.value import AllReduce, Axis

WIDTH = 256
"""Of the rows of sharded parameters."""

UNITS = 2
"""Sharded units in a row: the next is gathered beside the one before."""

_TINY = 16
"""Elements of gradients of which only their number counts."""

_WARM_UP, _STEPS = 2, 2
"""Steps of sharded units: the first ones take new memory, which later ones have again."""


def time_averaged(clock: BenchmarkTimer, group: dist.ProcessGroup, *, quick: bool) -> Points:
    """Time what each gradient of a bucket adds to a step, whatever its size; collective over all ranks."""
    many = 8 if quick else 32
    few, more = (_step_with_averaging(clock, group, count, quick=quick) for count in (1, many))
    return points(((1,),), (1,), [max((more - few) / (many - 1), 1e-7)])


def _step_with_averaging(clock: BenchmarkTimer, group: dist.ProcessGroup, count: int, *, quick: bool) -> float:
    ranks, world = dist.get_world_size(group), dist.get_world_size()
    axes = (Axis(name="others", size=world // ranks), Axis(name="data", size=ranks))
    mesh = Mesh(Position(axes, dist.get_rank()), ("data",), "cpu")
    plain, together = _Scales(count), _Scales(count)
    Reducer(together, [GradientBucket(shape_of(together).params, ("data",), AllReduce())], mesh, current())

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    x = torch.ones(_TINY)
    step(together)
    return links.more_s(clock, partial(step, together), partial(step, plain), quick=quick)


class _Scales(nn.Module):
    """Parameters that a step reads one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(_TINY)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with all of them."""
        for scale in self.scales:
            x = x * scale
        return x


class _Unit(nn.Module):
    """Parameters that a step reads once each way."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        rows = max(8, size // 4 // WIDTH // tensors)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(rows, WIDTH)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        """Return what every weight adds to a row."""
        return x + sum(F.linear(x, weight).sum() for weight in self.weights)


def time_sharded(
    clock: BenchmarkTimer, group: dist.ProcessGroup, update_s: Callable[[float, float], float], *, quick: bool
) -> dict[Sharding, Points]:
    """Time what sharding adds to a step, a unit, by its tensors and bytes; collective over all ranks.

    What more tensors add does not depend on their size: it is timed on small ones.

    Args:
        clock: Times what no rank waits for.
        group: Ranks that hold slices.
        update_s: What SGD takes for so many elements in so many plain tensors.
        quick: Few points.
    """
    few, many = 1, 8
    sizes = (2**16, 2**20) if quick else (2**16, 2**20, 2**24)
    points_by_mode: dict[Sharding, Points] = {}
    several = _time_sharded_unit(clock, group, update_s, many, sizes[0], quick=quick)
    alone = [_time_sharded_unit(clock, group, update_s, few, size, quick=quick) for size in sizes]
    for how in several:
        seconds = [taken[how] for taken in alone]
        more = max(several[how] - seconds[0], 0.0)
        points_by_mode[how] = points(((few, many), sizes), (1, 1), [*seconds, *(taken + more for taken in seconds)])
    return points_by_mode


def _time_sharded_unit(
    clock: BenchmarkTimer,
    group: dist.ProcessGroup,
    update_s: Callable[[float, float], float],
    tensors: int,
    size: int,
    *,
    quick: bool,
) -> dict[Sharding, float]:
    """Return what sharding adds to a step, a unit of so many tensors and bytes."""
    ranks = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.ones(1, WIDTH, requires_grad=True)
    plain = _units(size, tensors)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        # New memory of gradients is in what products are measured to take.
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()

    seconds_by_mode: dict[Sharding, float] = {}
    for how in get_args(Sharding):
        model = _units(size, tensors)
        for unit in (*model, model):
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(unit, mesh=mesh, reshard_after_forward=how == "freed", mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        more = []
        for _ in range(_WARM_UP + (1 if quick else _STEPS)):
            dist.barrier()
            started = time.perf_counter()
            step(model, optimizer)
            taken = time.perf_counter() - started
            more.append(taken - clock.sample(lambda: step(plain)))
        update = update_s(UNITS * size / 4 / ranks, UNITS * tensors)
        seconds_by_mode[how] = max((statistics.median(more[_WARM_UP:]) - update) / UNITS, 1e-6)
        del model, optimizer
        gc.collect()
    return seconds_by_mode


def _units(size: int, tensors: int) -> nn.Sequential:
    return nn.Sequential(*(_Unit(size, tensors) for _ in range(UNITS)))

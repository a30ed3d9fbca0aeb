"""Benchmarks of `phalanx calibrate`: tensor-parallel exchanges, placed operators, recomputation.

Each is what training runs, so its copies, hooks, new memory and Python count, and not only what moves between ranks.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cluster.calibration.figures import LayerKind
from phalanx.comm import collectives
from phalanx.diagnose.calibrate import collectives as links
from phalanx.diagnose.calibrate.operators import (
    COLD_BYTES,
    MOST_IN_A_ROW,
    Benchmark,
    BenchmarkTimer,
    Points,
    in_turn,
    points,
)
from phalanx.parallel.memory.activation_checkpointing import apply_recompute
from phalanx.parallel.operators.placement import place_module
from phalanx.plan.sites import Site
from phalanx.plan.value import ModuleRule

WIDTH = 256
"""Features of the activations that exchanges are timed on."""

BLOCKS = 4
"""Modules that are computed again, one after another."""

_TINY = 16
"""Their width."""

WORK_S = (2e-4, 1e-3, 4e-3, 1.6e-2)
"""Seconds of work after which ranks meet."""

_NARROW = 64
"""Rows of the products that such work is made of."""

_MET_BYTES = 2**20
"""Of the exchange with which ranks meet: as of activations. After a smaller one they wait less."""

_OWNED = 2
"""Parameters of the operator that has some."""

_SAMPLES = 4


def time_exchange(clock: BenchmarkTimer, kind: LayerKind, group: dist.ProcessGroup, *, quick: bool) -> Points:
    """Time an exchange of a cut layer, recorded by autograd, of ranks in step, by its bytes; collective over all."""
    sizes = (2**10, 2**18) if quick else (2**10, 2**17, 2**19, 2**21, 2**23)
    seconds = []
    for size in sizes:
        run = _exchanging(kind, size, group)
        run()
        seconds.append(links.more_s(clock, run, _nothing, quick=quick))
    return points((sizes,), (1,), seconds)


def time_waiting(clock: BenchmarkTimer, group: dist.ProcessGroup, *, quick: bool) -> Points:
    """Time how long ranks wait for the slowest where they meet, by the seconds of work before; collective over all.

    Work twice as long is disturbed twice as often: beyond the end waits grow with its root.
    """
    seconds_of_work = WORK_S[:2] if quick else WORK_S
    meet, product = _exchanging("all_to_all", _MET_BYTES, group), _product()
    meet()
    in_step = links.more_s(clock, meet, _nothing, quick=quick)
    # As much work on every rank, whatever each one's clock says: else it is the difference that is waited for.
    once = torch.tensor(clock.seconds(product))
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    seconds = []
    for target_s in seconds_of_work:
        count = max(1, round(target_s / once.item()))

        def work(count: int = count) -> None:
            for _ in range(count):
                product()

        def both(work: Benchmark = work) -> None:
            work()
            meet()

        seconds.append(max(links.more_s(clock, both, work, quick=quick) - in_step, 1e-6))
    return points((seconds_of_work,), (0.5,), seconds)


def _nothing() -> None:
    """Do what ranks in step do before they meet."""


def _exchanging(kind: LayerKind, size: int, group: dist.ProcessGroup) -> Benchmark:
    """Return one call of an exchange. Tensors take turns, as in a step: large ones are in no cache."""
    ranks = dist.get_world_size(group)
    width = min(WIDTH, size // 4 // ranks)
    rows = size // 4 // width
    inputs = _in_turn(rows, width // ranks if kind == "all_gather" else width)
    calls: dict[LayerKind, Benchmark] = {
        "all_reduce": lambda: collectives.all_reduce(next(inputs), group=group),
        "all_gather": lambda: collectives.all_gather(next(inputs), 1, same_shapes=True, group=group),
        "reduce_scatter": lambda: collectives.reduce_scatter(next(inputs), 0, group=group),
        "all_to_all": lambda: collectives.all_to_all(next(inputs), 0, 1, arriving=[width] * ranks, group=group),
    }
    return calls[kind]


def _in_turn(rows: int, columns: int) -> Iterator[Tensor]:
    size = rows * columns
    # Memory that was never written is one page of zeros, which any cache holds.
    memory = torch.ones(max(size, min(COLD_BYTES // 4, MOST_IN_A_ROW * size)))
    return itertools.cycle(part.requires_grad_() for part in in_turn(memory, rows, columns))


def _product() -> Benchmark:
    """Return a product as a step has them: of weights and inputs that are in no cache. Others' work disturbs those."""
    memory = torch.ones(COLD_BYTES // 4)
    narrow, wide = (itertools.cycle(in_turn(memory, rows, WIDTH)) for rows in (_NARROW, WIDTH))
    return lambda: F.linear(next(narrow), next(wide))


def time_placed(clock: BenchmarkTimer, group: dist.ProcessGroup, *, quick: bool) -> tuple[Points, Points]:
    """Time what computing operators in parts adds to a step, by their number, and what a parameter adds; collective."""
    counts = (1, 4) if quick else (1, 4, 16)
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.ones(dist.get_world_size(group), _TINY, requires_grad=True)

    def seconds(count: int, *, owning: bool) -> float:
        plain, in_parts = _Chain(count, owning=owning), _Chain(count, owning=owning)
        place_module(in_parts, "", mesh, in_parts.rules(), Shard(0))

        def step(model: nn.Module) -> None:
            model.zero_grad()
            model(x).sum().backward()

        step(in_parts)
        return links.more_s(clock, partial(step, in_parts), partial(step, plain), quick=quick)

    added_s = [seconds(count, owning=False) for count in counts]
    parameter = max((seconds(1, owning=True) - added_s[0]) / _OWNED, 1e-6)
    return points((counts,), (1,), added_s), points(((1,),), (1,), [parameter])


class _Chain(nn.Module):
    """Operators one after another, the last of which may read two parameters."""

    def __init__(self, count: int, *, owning: bool) -> None:
        super().__init__()
        self.count = count
        self.owned = nn.ParameterList(nn.Parameter(torch.ones(_TINY)) for _ in range(_OWNED if owning else 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last one's output."""
        for _ in range(self.count - 1):
            x = F.relu(x)
        return torch.addcmul(self.owned[0], x, self.owned[1]) if len(self.owned) else F.relu(x)

    def rules(self) -> dict[Site, tuple[Shard]]:
        """Return rules by which each rank computes some rows of every output."""
        names = ["relu"] * (self.count - 1) + ["addcmul" if len(self.owned) else "relu"]
        return {Site("", index, f"aten.{name}.default"): (Shard(0),) for index, name in enumerate(names)}


def time_recomputation(clock: BenchmarkTimer) -> tuple[float, float]:
    """Return the seconds of computing a module again, whatever is in it, and what `selective` adds to an operator.

    Of differences of runs one after another, on ranks that need not wait for each other.
    """
    plain, full, selective = (_blocks(rule) for rule in (None, "full", "selective"))
    x = torch.ones(1, 4, _TINY, requires_grad=True)
    with OperatorCounter() as counter:
        plain(x)
    taken = []
    for _ in range(_SAMPLES + 1):
        forward = clock.sample(lambda: plain(x))
        steps = [clock.sample(lambda model=model: model(x).sum().backward()) for model in (plain, full, selective)]  # type: ignore[misc]
        taken.append((steps[1] - steps[0] - forward, steps[2] - steps[1]))
    again, more = (statistics.median(values) for values in zip(*taken[1:], strict=True))
    return max(again / BLOCKS, 1e-6), max(more / 2 / counter.count, 1e-7)


class _Block(nn.Module):
    """What blocks of models are made of, so small that only starting it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(_TINY), nn.Linear(_TINY, _TINY), nn.Linear(_TINY, _TINY)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2)
        output: Tensor = x + self.outer(F.gelu(parts.transpose(1, 2).flatten(2)))
        return output


def _blocks(recompute: Literal["full", "selective"] | None) -> nn.Module:
    model = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
    if recompute is not None:
        apply_recompute([ModuleRule(match="*", recompute=recompute)], model)
    return model


class OperatorCounter(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))

"""Entry of one rank of `phalanx calibrate`: runs the benchmarks and writes their results."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import click
import torch
import torch.distributed as dist

from phalanx.cluster.calibration.figures import LAYER_KINDS, Kind, LayerKind, Precision, Rates
from phalanx.comm.context import init
from phalanx.diagnose.calibrate import collectives as links
from phalanx.diagnose.calibrate import gradients, layers
from phalanx.diagnose.calibrate import operators as work
from phalanx.diagnose.calibrate.operators import Points

OPTIMIZERS = ("sgd", "momentum", "adam")
SEED = 1
ROUNDS = 3
MEETINGS = 3
"""Times that a round measures what ranks exchange: how long they wait for each other differs most."""


class _RankBenchmark:
    """What this rank measured so far."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        ranks_a_core = ranks * torch.get_num_threads() / len(os.sched_getaffinity(0))
        self.clock = work.BenchmarkTimer(_align, quick=quick, ranks_a_core=ranks_a_core)
        self.points: dict[str, list[Points]] = {}
        """What every round timed."""

        self.numbers: dict[str, list[float]] = {}
        self.shared: dict[str, list[float]] = {}

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every part, its name and what measures it, round after round.

        A machine's speed changes in seconds to minutes. Short rounds meet all parts at all times, so what changes
        changes all of them alike, and the median of a part leaves out one round that was disturbed.
        """
        groups = links.groups() if dist.is_initialized() else {}
        on_shm = {key: group for key, group in groups.items() if key[0] == "shm"}
        for number in range(1 if self.quick else ROUNDS):
            yield from self._operators()
            yield from self._links(on_shm if number else groups)  # gloo is slow, and once will do
            yield from self._units(on_shm)
            for again in range(1 if self.quick else MEETINGS):
                if again:
                    yield from self._links(on_shm)
                yield from self._layers(on_shm)

    def _operators(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "launch", self._launch
        for dtype in get_args(Precision):
            yield f"matmul {dtype}", partial(self._matmul, dtype)
            yield f"narrow matmul {dtype}", partial(self._narrow_matmul, dtype)
        for name, kernel in (("pointwise", 1), ("convolution", 3)):
            yield name, partial(self._convolve, name, kernel)
        yield "depthwise", self._depthwise
        yield "attention", self._attend
        for name in work.OPERATORS:
            yield name, partial(self._operator, name)
        for kind in OPTIMIZERS:
            yield f"optimizer {kind}", partial(self._optimizer, kind)

    def _links(self, groups: links.Groups) -> Iterator[tuple[str, Callable[[], None]]]:
        for backend, size in groups:
            for kind in links.kinds():
                yield f"{kind} {backend} {size}", partial(self._collective, kind, backend, size, groups[backend, size])
        for backend in sorted({backend for backend, _ in groups}):
            yield f"beside work, {backend}", partial(self._beside, backend, groups[backend, dist.get_world_size()])

    def _layers(self, groups: links.Groups) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "recomputation", self._recompute
        for size in sorted({size for _, size in groups}):
            group = groups["shm", size]
            for kind in LAYER_KINDS:
                yield f"layer {kind} {size}", partial(self._exchange, kind, size, group)
            yield f"waiting {size}", partial(self._wait, size, group)
            yield f"averaged {size}", partial(self._average, size, group)

    def _units(self, groups: links.Groups) -> Iterator[tuple[str, Callable[[], None]]]:
        for size in sorted({size for _, size in groups}):
            yield f"placed {size}", partial(self._place, size, groups["shm", size])
            yield f"sharded {size}", partial(self._shard, size, groups["shm", size])

    def _keep(self, name: str, points: Points) -> None:
        self.points.setdefault(name, []).append(points)

    def _note(self, name: str, seconds: float) -> None:
        self.numbers.setdefault(name, []).append(seconds)

    def _launch(self) -> None:
        for name, seconds in zip(("launch_s", "backward_launch_s"), work.launch(self.clock), strict=True):
            self._note(name, seconds)

    def _recompute(self) -> None:
        for name, seconds in zip(
            ("checkpoint_s", "selective_op_s"), layers.time_recomputation(self.clock), strict=True
        ):
            self._note(name, seconds)

    def _exchange(self, kind: LayerKind, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"layer {kind} {size}", layers.time_exchange(self.clock, kind, group, quick=self.quick))

    def _wait(self, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"waiting {size}", layers.time_waiting(self.clock, group, quick=self.quick))

    def _place(self, size: int, group: dist.ProcessGroup) -> None:
        operators, parameter = layers.time_placed(self.clock, group, quick=self.quick)
        self._keep(f"placed {size}", operators)
        self._keep(f"placed parameter {size}", parameter)

    def _average(self, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"averaged {size}", gradients.time_averaged(self.clock, group, quick=self.quick))

    def _shard(self, size: int, group: dist.ProcessGroup) -> None:
        update = work.median_grid(self.points["optimizer sgd"])

        def update_s(elements: float, tensors: float) -> float:
            return tensors * update.at(elements / tensors)

        for how, points in gradients.time_sharded(self.clock, group, update_s, quick=self.quick).items():
            self._keep(f"sharded {how} {size}", points)

    def _matmul(self, dtype: Precision) -> None:
        self._keep(f"matmul {dtype}", work.matmul(self.clock, dtype, quick=self.quick))

    def _narrow_matmul(self, dtype: Precision) -> None:
        self._keep(f"narrow matmul {dtype}", work.narrow_matmul(self.clock, dtype, quick=self.quick))

    def _convolve(self, name: str, kernel: int) -> None:
        self._both(name, work.convolution(self.clock, kernel, quick=self.quick))

    def _depthwise(self) -> None:
        self._both("depthwise", work.depthwise(self.clock, quick=self.quick))

    def _attend(self) -> None:
        self._both("attention", work.attention(self.clock, quick=self.quick))

    def _operator(self, name: str) -> None:
        self._both(name, work.operator(self.clock, name, quick=self.quick))

    def _both(self, name: str, both: tuple[Points, Points]) -> None:
        for direction, points in zip(("forward", "backward"), both, strict=True):
            self._keep(f"{name} {direction}", points)

    def _optimizer(self, kind: str) -> None:
        self._keep(f"optimizer {kind}", work.optimizer(self.clock, kind, quick=self.quick))

    def _collective(self, kind: Kind, backend: str, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"{kind} {backend} {size}", links.collective(kind, group, quick=self.quick))

    def _beside(self, backend: str, group: dist.ProcessGroup) -> None:
        self.shared.setdefault(backend, []).append(links.contention(group, quick=self.quick))

    def rates(self) -> Rates:
        """Return all of it, of every figure the median over rounds."""
        return Rates(
            threads=torch.get_num_threads(),
            grids={name: work.median_grid(rounds) for name, rounds in self.points.items()},
            shared={name: statistics.median(values) for name, values in self.shared.items()},
            **{name: statistics.median(values) for name, values in self.numbers.items()},
        )


def _align() -> None:
    if dist.is_initialized():
        dist.barrier()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True)
def main(folder: Path, quick: bool) -> None:
    """Measure and write FOLDER/RANK.json; rank 0 also tells how far it is, in FOLDER/progress."""
    init(backend="shm")
    torch.manual_seed(SEED)
    rank = int(os.environ.get("PHALANX_RANK", "0"))
    sheet = _RankBenchmark(quick=quick)
    parts = list(sheet.parts())
    for number, (name, measure) in enumerate(parts, 1):
        if rank == 0:
            with (folder / "progress").open("a") as file:
                file.write(f"{number} {len(parts)} {name}\n")
        measure()
    (folder / f"{rank}.json").write_text(sheet.rates().model_dump_json())


if __name__ == "__main__":
    main()

"""One rank of `phalanx calibrate`: times one part after the other beside its peers, and writes its own figures."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import click
import torch
import torch.distributed as dist

from phalanx.cluster.measured import LAYER_KINDS, Grid, Kind, LayerKind, Precision, Rates, never_falling
from phalanx.comm.context import init
from phalanx.diagnose import calibrate_links as links
from phalanx.diagnose import calibrate_plans as plans
from phalanx.diagnose import calibrate_work as work

OPTIMIZERS = ("sgd", "momentum", "adam")
SEED = 1


class _Sheet:
    """What this rank measured so far."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        ranks_a_core = ranks * torch.get_num_threads() / len(os.sched_getaffinity(0))
        self.clock = work.Clock(_align, quick=quick, ranks_a_core=ranks_a_core)
        self.grids: dict[str, Grid] = {}
        self.launch = (math.inf, math.inf)
        self.again = (0.0, 0.0)
        self.shared: dict[str, float] = {}

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every part, its name and what measures it: twice, some time apart, where the less time counts."""
        yield "recomputation", self._recompute
        made = links.groups() if dist.is_initialized() else {}
        yield from self._operators()
        yield from self._links(made)
        yield from self._plans(made)
        if not self.quick:
            yield from self._operators()
            on_shm = {key: group for key, group in made.items() if key[0] == "shm"}
            yield from self._links(on_shm)
            yield from self._plans(on_shm)

    def _operators(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "launch", self._launch
        for dtype in get_args(Precision):
            yield f"matmul {dtype}", partial(self._matmul, dtype)
        for name, kernel in (("pointwise", 1), ("convolution", 3)):
            yield name, partial(self._convolve, name, kernel)
        yield "depthwise", self._depthwise
        yield "attention", self._attend
        for name in work.OPERATORS:
            yield name, partial(self._operator, name)
        for kind in OPTIMIZERS:
            yield f"optimizer {kind}", partial(self._optimizer, kind)

    def _links(self, made: links.Groups) -> Iterator[tuple[str, Callable[[], None]]]:
        for backend, size in made:
            for kind in links.kinds():
                yield f"{kind} {backend} {size}", partial(self._collective, kind, backend, size, made[backend, size])
        for backend in sorted({backend for backend, _ in made}):
            yield f"beside work, {backend}", partial(self._beside, backend, made[backend, dist.get_world_size()])

    def _plans(self, made: links.Groups) -> Iterator[tuple[str, Callable[[], None]]]:
        for size in sorted({size for _, size in made}):
            group = made["shm", size]
            for kind in LAYER_KINDS:
                yield f"layer {kind} {size}", partial(self._exchange, kind, size, group)
            yield f"placed {size}", partial(self._place, size, group)
            yield f"sharded {size}", partial(self._shard, size, group)

    def _keep(self, name: str, found: Grid) -> None:
        """Keep a grid, of every point the less of what was measured before and now."""
        before = self.grids.get(name, found)
        less = tuple(map(min, before.seconds, found.seconds))
        self.grids[name] = found.model_copy(update={"seconds": never_falling(found.axes, less)})

    def _launch(self) -> None:
        found = work.launch(self.clock)
        self.launch = (min(self.launch[0], found[0]), min(self.launch[1], found[1]))

    def _recompute(self) -> None:
        self.again = plans.recomputation(self.clock)

    def _exchange(self, kind: LayerKind, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"layer {kind} {size}", plans.exchange(kind, group, quick=self.quick))

    def _place(self, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"placed {size}", plans.placed(group, quick=self.quick))

    def _shard(self, size: int, group: dist.ProcessGroup) -> None:
        update_s = partial(self.rates().optimizer_s, "sgd")
        for how, found in plans.sharded(group, update_s, quick=self.quick).items():
            self._keep(f"sharded {how} {size}", found)

    def _matmul(self, dtype: Precision) -> None:
        self._keep(f"matmul {dtype}", work.matmul(self.clock, dtype, quick=self.quick))

    def _convolve(self, name: str, kernel: int) -> None:
        self._both(name, work.convolution(self.clock, kernel, quick=self.quick))

    def _depthwise(self) -> None:
        self._both("depthwise", work.depthwise(self.clock, quick=self.quick))

    def _attend(self) -> None:
        self._both("attention", work.attention(self.clock, quick=self.quick))

    def _operator(self, name: str) -> None:
        self._both(name, work.operator(self.clock, name, quick=self.quick))

    def _both(self, name: str, grids: tuple[Grid, Grid]) -> None:
        for way, found in zip(("forward", "backward"), grids, strict=True):
            self._keep(f"{name} {way}", found)

    def _optimizer(self, kind: str) -> None:
        self._keep(f"optimizer {kind}", work.optimizer(self.clock, kind, quick=self.quick))

    def _collective(self, kind: Kind, backend: str, size: int, group: dist.ProcessGroup) -> None:
        self._keep(f"{kind} {backend} {size}", links.collective(kind, group, quick=self.quick))

    def _beside(self, backend: str, group: dist.ProcessGroup) -> None:
        found = links.contention(group, quick=self.quick)
        self.shared[backend] = min(self.shared.get(backend, found), found)

    def rates(self) -> Rates:
        """Return all of it."""
        return Rates(
            threads=torch.get_num_threads(),
            launch_s=self.launch[0],
            backward_launch_s=self.launch[1],
            checkpoint_s=self.again[0],
            selective_op_s=self.again[1],
            grids=self.grids,
            shared=self.shared,
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
    sheet = _Sheet(quick=quick)
    parts = list(sheet.parts())
    for number, (name, measure) in enumerate(parts, 1):
        if rank == 0:
            with (folder / "progress").open("a") as file:
                file.write(f"{number} {len(parts)} {name}\n")
        measure()
    (folder / f"{rank}.json").write_text(sheet.rates().model_dump_json())


if __name__ == "__main__":
    main()

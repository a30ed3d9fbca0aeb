"""Benchmarks of `phalanx calibrate`: matrix products, convolutions, attention, operators, optimizers."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.cluster.calibration.figures import Grid, Precision, never_falling

Benchmark = Callable[[], object]

LEAST_SAMPLE_S = 2e-4
"""Shorter runs are repeated within a sample: below this the clock's own time would count."""

SAMPLES = 3
BUDGET_S = 0.005
"""A point ends after this long, or after SAMPLES samples; there are other rounds."""

LONG_S = 0.02
"""A run this long is not repeated: what only the first one takes is little of it."""

COLD_BYTES = 2**26
"""Weights and what is made of them take turns in so much memory, as in a step: no cache keeps one until it is used
again."""

MOST_IN_A_ROW = 256
"""Tensors that take turns at most, as those of small layers do stay in a cache."""

SIDE = 16
"""Height and width of the images that convolutions are timed on."""

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": F.relu,
    "gelu": F.gelu,
    "dropout": lambda x: F.dropout(x, 0.1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "batch_norm": lambda x: F.batch_norm(x.view(-1, 16, 8, 8), None, None, training=True),
    "softmax": lambda x: F.softmax(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x.view(-1, 16, 8, 8), 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), reduction="none"),
}
"""Operators bound by memory, of a float32 tensor with rows of 1,024."""

_TINY_CHAIN = 100

_NARROW_INNER = 8
"""Inner dimension that stands for all below `figures.FULL_INNER`: with 2 to 12, products of large matrices take the
same to a tenth."""


class BenchmarkTimer:
    """Least of a few runs, as others' work only ever makes one slower; one run when in a hurry."""

    def __init__(self, align: Callable[[], None], *, quick: bool, ranks_a_core: float = 1.0) -> None:
        self._align = align
        self._samples = 1 if quick else SAMPLES
        self._ranks_a_core = ranks_a_core

    def seconds(self, run: Benchmark) -> float:
        """Return the seconds of one run while the other ranks do the same; collective over the ranks."""
        self._align()
        once = self.sample(run)
        if once > LONG_S:
            return once
        once = self.sample(run)
        times = max(1, int(LEAST_SAMPLE_S / once))
        taken, started = [once] if times == 1 else [], time.perf_counter()
        while not taken or (len(taken) < self._samples and time.perf_counter() - started < BUDGET_S):
            taken.append(self.sample(run, times))
        return min(taken)

    def sample(self, run: Benchmark, times: int = 1) -> float:
        """Return the seconds of one of some runs.

        Ranks that share a core take turns, longer ones than most runs take: what counts is the processor's time, for
        as many ranks as share it.
        """
        clock = time.process_time if self._ranks_a_core > 1 else time.perf_counter
        started = clock()
        for _ in range(times):
            run()
        return max((clock() - started) * max(1.0, self._ranks_a_core) / times, 1e-9)


class Points(NamedTuple):
    """What was timed once at every crossing of some axes, the last axis fastest; `powers` are those of a grid."""

    axes: tuple[tuple[float, ...], ...]
    powers: tuple[float, ...]
    seconds: tuple[float, ...]


def points(axes: Sequence[Sequence[float]], powers: Sequence[float], seconds: Sequence[float]) -> Points:
    """Return what was timed, in the types of a grid."""
    return Points(tuple(tuple(map(float, axis)) for axis in axes), tuple(powers), tuple(seconds))


def median_grid(rounds: Sequence[Points]) -> Grid:
    """Return the medians over rounds; more work that seemed to take less corrects the smaller one."""
    axes, powers, _ = rounds[0]
    seconds = tuple(statistics.median(taken) for taken in zip(*(points.seconds for points in rounds), strict=True))
    return Grid(axes=axes, seconds=never_falling(axes, seconds), powers=powers)


def matmul(clock: BenchmarkTimer, dtype: Precision, *, quick: bool) -> Points:
    """Time linear layers over a grid of shapes.

    Up to as many rows as features: the gradient of a weight is a product of which the features of the output are rows.
    """
    rows: tuple[int, ...] = (1, 8, 64, 512, 2048)
    widths: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    if quick:
        rows, widths = (1, 512), (64, 512)
    elif dtype == "bf16":  # what trains on processors is rarely in bfloat16
        rows, widths = (1, 64, 512), (16, 256, 2048)
    axes = rows, widths, widths
    return points(axes, (1, 1, 1), _time_products(clock, dtype, itertools.product(*axes)))


def narrow_matmul(clock: BenchmarkTimer, dtype: Precision, *, quick: bool) -> Points:
    """Time products with a small inner dimension, such as gradients of weights from few rows, by both sides."""
    sides = (64, 512) if quick else (16, 256, 2048) if dtype == "bf16" else (16, 64, 256, 1024, 2048)
    sizes = ((m, n, _NARROW_INNER) for m, n in itertools.product(sides, sides))
    return points((sides, sides), (1, 1), _time_products(clock, dtype, sizes))


def _time_products(clock: BenchmarkTimer, dtype: Precision, sizes: Iterable[tuple[int, int, int]]) -> list[float]:
    """Time linear layers of (n, k) on (m, k), whose outputs lie in memory that was used before, as in a step."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    memory, output_memory = (torch.ones(COLD_BYTES // kind.itemsize, dtype=kind) for _ in range(2))

    def time_point(m: int, n: int, k: int) -> float:
        x, weights = torch.ones(m, k, dtype=kind), itertools.cycle(in_turn(memory, n, k))
        outputs = itertools.cycle(in_turn(output_memory, m, n))
        return clock.seconds(lambda: torch.mm(x, next(weights).t(), out=next(outputs)))

    return [time_point(*size) for size in sizes]


def in_turn(memory: Tensor, *shape: int) -> list[Tensor]:
    """Return tensors of one shape that lie side by side."""
    size = math.prod(shape)
    count = _in_a_row(size * memory.itemsize)
    return [memory[index * size : (index + 1) * size].view(shape) for index in range(count)]


def _in_a_row(size: int) -> int:
    """Return how many tensors of so many bytes are used until the first one's turn comes again."""
    return max(1, min(MOST_IN_A_ROW, COLD_BYTES // size))


def attention(clock: BenchmarkTimer, *, quick: bool) -> tuple[Points, Points]:
    """Time fused attention, forward and backward, by heads of all sequences, length and width of a head."""
    axes = ((4, 16), (16, 64), (32,)) if quick else ((4, 32), (16, 128, 512), (16, 64))
    forward, backward = [], []
    for heads, seq, width in itertools.product(*axes):
        q, k, v = (torch.randn(1, heads, seq, width, requires_grad=True) for _ in range(3))
        there, back = _both_ways(clock, partial(F.scaled_dot_product_attention, q, k, v), [q, k, v])
        forward.append(there)
        backward.append(back)
    return points(axes, (1, 2, 1), forward), points(axes, (1, 2, 1), backward)


def operator(clock: BenchmarkTimer, name: str, *, quick: bool) -> tuple[Points, Points]:
    """Time an operator bound by memory, forward and backward, by the bytes of its input."""
    sizes = (2**14, 2**20) if quick else (2**12, 2**16, 2**20, 2**22, 2**24)
    forward, backward = [], []
    for size in sizes:
        x = torch.randn(size // 4096, 1024, requires_grad=True)
        there, back = _both_ways(clock, partial(OPERATORS[name], x), [x])
        forward.append(there)
        backward.append(back)
    return points((sizes,), (1,), forward), points((sizes,), (1,), backward)


def launch(clock: BenchmarkTimer) -> tuple[float, float]:
    """Return the seconds of one operator on a tiny tensor, forward as autograd records it, and backward."""
    x = torch.ones(1, requires_grad=True)

    def chain() -> Tensor:
        y = x
        for _ in range(_TINY_CHAIN):
            y = y * 1.0
        return y

    end = chain()
    forward = clock.seconds(chain)
    backward = clock.seconds(lambda: torch.autograd.grad(end, x, retain_graph=True))
    return forward / _TINY_CHAIN, backward / _TINY_CHAIN


def convolution(clock: BenchmarkTimer, kernel: int, *, quick: bool) -> tuple[Points, Points]:
    """Time convolutions of one kernel, forward and both gradients, by places, channels out and values an output."""
    places = (256, 1024) if quick else (256, 4096)
    channels = (16,) if quick else (16, 64, 256)
    inner = channels if kernel == 1 or quick else (3, *channels)
    axes = (places, channels, tuple(kernel**2 * width for width in inner))
    forward, backward = [], []
    for m, n, width in itertools.product(places, channels, inner):
        x = torch.randn(m // SIDE**2, width, SIDE, SIDE, requires_grad=True)
        weight = torch.randn(n, width, kernel, kernel, requires_grad=True)
        there, back = _both_ways(clock, partial(F.conv2d, x, weight, padding=kernel // 2), [x, weight])
        forward.append(there)
        backward.append(back)
    return points(axes, (1, 1, 1), forward), points(axes, (1, 1, 1), backward)


def depthwise(clock: BenchmarkTimer, *, quick: bool) -> tuple[Points, Points]:
    """Time convolutions by channel with a kernel of 3, forward and both gradients, by the values of the output."""
    images = (1, 4) if quick else (1, 8, 32)
    weight = torch.randn(64, 1, 3, 3, requires_grad=True)
    forward, backward = [], []
    for count in images:
        x = torch.randn(count, 64, SIDE, SIDE, requires_grad=True)
        there, back = _both_ways(clock, partial(F.conv2d, x, weight, padding=1, groups=64), [x, weight])
        forward.append(there)
        backward.append(back)
    sizes = [count * 64 * SIDE**2 for count in images]
    return points((sizes,), (1,), forward), points((sizes,), (1,), backward)


def optimizer(clock: BenchmarkTimer, kind: str, *, quick: bool) -> Points:
    """Time steps of an optimizer, a tensor, by its elements."""
    sizes = (2**8, 2**16) if quick else (2**6, 2**12, 2**16, 2**20)
    seconds = []
    for size in sizes:
        tensors = 16 if size < 2**20 else 4
        parameters = [torch.zeros(size, requires_grad=True) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.ones(size)
        if kind == "adam":
            torch_optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters)
        else:
            torch_optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if kind == "momentum" else 0.0)
        seconds.append(clock.seconds(torch_optimizer.step) / tensors)
    return points((sizes,), (1,), seconds)


def _both_ways(clock: BenchmarkTimer, run: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the seconds of an operator and of its gradient.

    Starting the engine of autograd, which a model does once for all its operators, is taken off the gradient's.
    """
    forward = clock.seconds(run)
    output = run()
    seed = torch.ones_like(output)

    def back() -> object:
        return torch.autograd.grad(output, list(inputs), seed, retain_graph=True)

    tiny = torch.ones(1, requires_grad=True)
    end = tiny * 1.0
    engine = clock.seconds(lambda: torch.autograd.grad(end, tiny, retain_graph=True))
    return forward, max(clock.seconds(back) - engine, 1e-6)

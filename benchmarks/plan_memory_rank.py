"""One rank of `bench_plan_memory`: measure the peak memory of a step under a Plan, or train under a limit.

What a C library keeps of freed memory is nobody's tensor, so every block of 128 KiB and more goes back to the system as
soon as it is freed, as the memory guard does where memory is short. Nor does any lie in the heap that a rank has of the
process that it is a copy of: memory that is mapped already counts under no limit.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile

import phalanx as px
from benchmarks.plans_rank import GPT, AlexNet, Loss, Transformer, of_tokens
from phalanx.auto.capture.step import capture
from phalanx.cluster.proc import process_memory, status, status_bytes
from phalanx.parallel.distribute import use_strategy
from phalanx.parallel.memory.failures import is_out_of_memory
from phalanx.parallel.session import session
from phalanx.plan.value import Plan

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
STEPS = 2
"""The first makes the optimizer's state, and the memory that ranks exchange through."""

_MMAP_THRESHOLD, _TIGHT_BYTES = -3, 1 << 17
"""M_MMAP_THRESHOLD of glibc (man mallopt), and the smallest block that goes back at once."""


_SPARE_BYTES = 1 << 22
"""By which the limit is raised while an error is classified: less than what counts as little memory, so that errors of
oneDNN still count as out of memory."""


class _HeapUse(ctypes.Structure):
    """What `mallinfo2` of glibc returns: ten numbers, the fourth is that of blocks that are mapped by themselves."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


Model = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Loss]


def _ids(words: int, rows: int, places: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (rows, places)), torch.randint(words, (rows, places))


LARGE: dict[str, Model] = {
    "transformer": (lambda: Transformer(384), lambda: _ids(512, 32), of_tokens),
    "gpt": (lambda: GPT(16384), lambda: _ids(16384, 16), of_tokens),
    "tied_gpt": (lambda: GPT(65536, tied=True), lambda: _ids(65536, 16, places=4), of_tokens),
    "alexnet": (
        lambda: AlexNet(4096),
        lambda: (torch.randn(128, 3, 64, 64), torch.randint(100, (128,))),
        F.cross_entropy,
    ),
}
"""The models of `bench_plans` with more words, width or rows, so that tensors are most of what a rank has. The tied GPT
has few rows beside its table of words, so that it is fullest where both gradients of the table meet."""


class Training:
    """A model, its optimizer and its batch under a Plan. Collective."""

    def __init__(
        self, plan: Plan, name: str, optimizer: str, data: tuple[Tensor, Tensor], *, return_outputs: bool
    ) -> None:
        make, _, self._loss_fn = LARGE[name]
        self._return_outputs = return_outputs
        use_strategy(px.DistributedStrategy(out_of_memory="raise"))
        torch.manual_seed(0)
        model = make()
        if plan.ops:
            capture(model, data, self._loss_fn)  # which operators are placed is said of the captured step
        rows = torch.utils.data.TensorDataset(*data)
        self._model, self._optimizer, loader = px.distribute(
            model, OPTIMIZERS[optimizer](model.parameters(), lr=1e-4), rows, global_batch=len(rows), shuffle=False,
            plan=plan,
        )  # fmt: skip
        self._inputs, self._target = next(iter(loader))
        self._staged = None
        if plan.schedule.kind != "none":  # such a Plan trains in no loop
            self._staged = px.train_step(self._model, self._loss_fn, self._optimizer)
        gc.collect()  # the whole model that this rank has a part of now, and what was captured

    def step(self) -> None:
        """Train once on the batch. What the model returns stays where the loop has a name for it."""
        if self._staged is not None:
            self._staged(self._inputs, self._target)
            return
        self._optimizer.zero_grad()
        if self._return_outputs:
            self._output = self._model(self._inputs)
            self._loss_fn(self._output, self._target).backward()
        else:
            self._loss_fn(self._model(self._inputs), self._target).backward()
        self._optimizer.step()


def measure(plan: Plan, name: str, optimizer: str, return_outputs: bool) -> list[tuple[float, float]]:
    """Return the peak bytes of private memory and of tensors under a Plan, by rank.

    Collective, and of fresh processes: what another Plan left would be missing. The Plan is trained twice, as a
    profiler that sees every allocation takes memory itself.
    """
    data = _start(name)
    make_training = partial(Training, plan, name, optimizer, data, return_outputs=return_outputs)
    mine = [private_peak(make_training), tensor_peak(make_training)]
    by_rank = px.comm.all_gather(torch.tensor([mine], dtype=torch.float64))
    return [(private, tensors) for private, tensors in by_rank.tolist()]


def private_peak(make_training: Callable[[], Training]) -> float:
    """Return the most bytes that this process has to itself in the last step, beside those before the model."""
    before = _resident("RssAnon")
    training = make_training()
    for _ in range(STEPS - 1):
        training.step()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # from here on VmHWM counts anew
    training.step()
    # What is shared is there from the first step on.
    peak = _resident("VmHWM") - _resident("RssShmem") - _resident("RssFile") - before
    del training
    _end()
    return float(peak)


def tensor_peak(make_training: Callable[[], Training]) -> float:
    """Return the most bytes of all tensors in the last step, the model's among them."""
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as before:
        training = make_training()
        for _ in range(STEPS - 1):
            training.step()
    with profile(use_cpu=True, use_kineto=True, profile_memory=True) as last:
        training.step()
    del training
    _end()
    size = sum(_changes(before))
    peak = size
    for change in _changes(last):
        size += change
        peak = max(peak, size)
    return float(peak)


def _changes(profiled: profile) -> list[int]:
    """Return the bytes that were allocated, or freed if negative, one after the other."""
    events = sorted(profiled.kineto_results.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def train_limited(plan: Plan, name: str, optimizer: str, return_outputs: bool, budget: float, folder: Path) -> None:
    """Train with so many bytes beside what was there before the model; a file says so where memory runs out.

    RLIMIT_DATA counts what a process may write to and has to itself: neither the shared memory of collectives nor
    address space that is only reserved, which RLIMIT_AS counts. It is set before the first step: the whole model that
    the user makes, of which `px.distribute` keeps a part, is no step.
    """
    data = _start(name)
    before = process_memory().data
    training = Training(plan, name, optimizer, data, return_outputs=return_outputs)
    px.comm.barrier()
    _limit(int(before + budget))
    try:
        for _ in range(STEPS):
            training.step()
    except Exception as error:
        _limit(int(before + budget) + _SPARE_BYTES)
        has_run_out = is_out_of_memory(error)  # of oneDNN's errors only the limit tells
        _limit(resource.RLIM_INFINITY)
        if has_run_out:
            (folder / f"{px.current().rank}.txt").write_text(str(error), encoding="utf-8")
        raise


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def _start(name: str) -> tuple[Tensor, Tensor]:
    """Join the job, let libraries allocate what they keep for good, and return the user's data."""
    logging.disable(logging.WARNING)
    px.init()
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _TIGHT_BYTES)
    _fill_heap()
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 64), nn.LayerNorm(64))
    layers(torch.randn(64, 3, 8, 8)).square().sum().backward()
    px.comm.all_reduce(torch.ones(1 << 20))
    _end()
    torch.manual_seed(0)
    return LARGE[name][1]()


def _fill_heap() -> None:
    """Leave no free block in the heap that holds a tensor: the next one is mapped."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _HeapUse
    mapped = libc.mallinfo2().sizes[3]
    while libc.mallinfo2().sizes[3] == mapped:
        libc.malloc(_TIGHT_BYTES)


def _end() -> None:
    """Let go of the last Plan's model: the next is another job."""
    session.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    return status_bytes(status(os.getpid()), name)

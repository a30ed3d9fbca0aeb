"""`label_units`: label all-gathers of FSDP units, so that ranks that run different units get an error, not a hang.

Ranks gather a unit when their forward pass comes to it. A rank that skips one (LayerDrop, experts, stochastic depth) is
a call ahead of the others from then on, and where units are equally long, the weights of different layers would be
gathered together. Ranks that share memory compare the names of every call before they use a number of it. Other
backends compare lengths at most: over them the names of all calls since the last update are compared at the end of each
backward pass, by one all-reduce of 16 bytes. That is before the update; on a card, where looking would make the host
wait, it is one step later.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.comm.labels import label_calls
from phalanx.errors import ConfigError

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# torch before 2.13 has the second names.


def label_units(model: nn.Module) -> None:
    """Let every unit of a sharded model issue its calls under its name."""
    calls = UnitCalls()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit = name or "what no unit holds"
            module.set_custom_all_gather(_Gather(unit, calls))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_Scatter(unit, calls))  # type: ignore[arg-type]


@dataclass(slots=True)
class UnitCalls:
    """The calls of a model's units since they were compared last, for groups that compare nothing themselves."""

    counts: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    """Of the names in their order, below 2 ** 62."""

    is_queued: bool = False
    """Whether this backward pass ends with a comparison."""

    sent: _Sent | None = None

    def note(self, name: str, group: dist.ProcessGroup, tensor: Tensor) -> None:
        """Add a call; in a backward pass, see to it that calls are compared at its end."""
        if tensor.is_cpu and getattr(group, "carrier", "") == "shm":
            return
        self.counts[name] += 1
        text = f"{self.digest} {name}".encode()
        self.digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
        if torch._C._current_graph_task_id() == -1:
            self.is_queued = False  # the backward pass before this forward pass may have raised
        elif not self.is_queued:
            self.is_queued = True
            device = tensor.device
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._compare(group, device))

    def _compare(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.is_queued = False
        both = torch.tensor([self.digest, -self.digest], device=device)
        work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True)
        before, self.sent = self.sent, _Sent(both, work, dict(self.counts), group)
        self.counts.clear()
        due = self.sent if device.type == "cpu" else before
        if due is not None:
            due.check()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A comparison under way."""

    both: Tensor
    work: Any
    counts: Mapping[str, int]
    group: dist.ProcessGroup

    def check(self) -> None:
        """Raise, on all ranks of the group, if their calls differ."""
        self.work.wait()
        highest, lowest = self.both.tolist()
        if highest == -lowest:
            return
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, self.counts, group=self.group)
        raise ConfigError(
            f"Ranks used different units of a sharded model in one step, so weights of different layers were gathered "
            f"together: {_difference(everyone)}. Every rank must use the same units in the same order: draw what is "
            "skipped from a generator of one seed, or compute it and multiply by 0."
        )


def _difference(counts: Sequence[Mapping[str, int]]) -> str:
    for name in dict.fromkeys(name for count in counts for name in count):
        calls = [count.get(name, 0) for count in counts]
        if len(set(calls)) > 1:
            return f"{name!r} made " + ", ".join(f"{n} calls on rank {r}" for r, n in enumerate(calls))
    return "the same ones in another order"


class _Call:
    """One kind of call of one unit, in the place of torch's own."""

    def __init__(self, unit: str, calls: UnitCalls) -> None:
        self._unit, self._calls = unit, calls

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Call):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._calls.note(self._unit, group, input_tensor)
        with label_calls(f"the weights of {self._unit}"):
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Call):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._calls.note(self._unit, group, input_tensor)
        with label_calls(f"the gradients of {self._unit}"):
            return _scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

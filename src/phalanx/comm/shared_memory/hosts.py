"""`meet`, `Between`: shared-memory groups over several hosts: all-reduce within each host first, then between hosts.

Over several hosts every host adds up its ranks' tensors in shared memory, each of its ranks a shard; ranks that own the
same shard on different hosts exchange it by gloo; and the shards are put together in shared memory. So a tensor
crosses the network once for each host, not once for each rank.
"""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx.comm.elastic.membership import current as current_membership
from phalanx.comm.labels import current_label, label_calls
from phalanx.comm.shared_memory import region
from phalanx.comm.shared_memory.buffers import TYPES, to_reduce
from phalanx.comm.shared_memory.native import MEMBERS_S, Native
from phalanx.errors import PeerLostError


@dataclass(frozen=True, slots=True)
class Met:
    """What a group found when its ranks met."""

    core: Any = None
    """The native group of all ranks, where they are on one host."""

    between: Between | None = None
    """How several hosts reduce together."""

    refusal: str = ""
    """Why the group has neither, and uses gloo."""

    @property
    def carrier(self) -> str:
        """What carries tensors of the CPU: `shm`, `shm+gloo` or `gloo`."""
        return "shm" if self.core is not None else "shm+gloo" if self.between is not None else "gloo"


def meet(store: Any, rank: int, size: int, name: str, timeout: timedelta) -> Met:
    """Find out which ranks of a group share a host, and enter the memory they share. Collective over the group.

    Args:
        store: Keys of this group alone.
        rank: This rank in the group.
        size: Number of ranks.
        name: How errors of other ranks call this one.
        timeout: How long an operation may take.
    """
    met = _enter(store, rank, size, name, timeout)
    store.set(f"met/{rank}", "")
    if rank == 0:  # where it holds the store too, the others still read from it, and its script may end at once
        for r in range(size):
            region.await_key(store, f"met/{r}")
    return met


def _enter(store: Any, rank: int, size: int, name: str, timeout: timedelta) -> Met:
    identity = region.host_identity()
    store.set(f"host/{rank}", identity)
    hosts = [region.await_key(store, f"host/{r}") for r in range(size)]
    local = [r for r in range(size) if hosts[r] == identity]
    core, refusal = region.join(store, rank, local, name, timeout.total_seconds())
    store.set(f"joined/{rank}", json.dumps(refusal))
    answers = [json.loads(region.await_key(store, f"joined/{r}")) for r in range(size)]
    refusals = [f"rank {r}: {text}" for r, text in enumerate(answers) if text]
    if refusals:
        return Met(refusal=refusals[0])
    if len(local) == size:
        return Met(core)
    by_host = [[r for r in range(size) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    return Met(between=Between(core, store, rank, by_host, timeout))


class Between:
    """The all_reduce of a group over several hosts.

    Its calls are carried out one after the other on a thread of its own, in the order they are made.

    Args:
        core: The native group of this host's ranks.
        store: Keys of this group alone.
        rank: This rank in the group.
        by_host: The group's ranks on each host.
        timeout: How long an operation may take.
    """

    def __init__(self, core: Any, store: Any, rank: int, by_host: list[list[int]], timeout: timedelta) -> None:
        self._core = core
        self._native: Any = Native(core)
        host = next(i for i, ranks in enumerate(by_host) if rank in ranks)
        self._place, self._here = by_host[host].index(rank), len(by_host[host])
        self._size = sum(len(ranks) for ranks in by_host)
        self._shards = min(len(ranks) for ranks in by_host)
        self._across: Any = None
        if self._place < self._shards:
            keys = PrefixStore(f"shard/{self._place}", store)
            self._across = dist.ProcessGroupGloo(keys, host, len(by_host), timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "phalanx shm between hosts")

    def all_reduce(self, tensor: Tensor, how: int) -> Errand:
        """Issue the reduction of a contiguous tensor, in place; `how` is the code of torch's operation."""
        return Errand(self._thread.submit(self._carry_or_leave, tensor, how, current_label()))

    def wait(self, errand: Errand, timeout_s: float) -> None:
        """Wait for an errand; raises what ended it, or that a member of an elastic job is lost."""
        membership, began = current_membership(), time.monotonic()
        while membership is not None and not timeout_s and not errand.is_done:
            wait([errand.outcome], MEMBERS_S)
            membership.check()
            membership.suspect_other_nodes(time.monotonic() - began)
        try:
            errand.outcome.result(timeout_s or None)
        except CancelledError:
            raise RuntimeError("the process group was ended before this was done") from None
        except TimeoutError:
            raise PeerLostError(
                f"all_reduce between hosts timed out after {timeout_s:g} s. See what the other ranks are doing, or "
                "wait longer."
            ) from None

    def tend(self, errand: Errand) -> None:
        """Wait for an errand; does not raise."""
        with contextlib.suppress(CancelledError):
            errand.outcome.exception()

    def close(self) -> None:
        """End; errands not begun are dropped."""
        self._core.close()
        self._core = self._native = Ended()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._across is not None:
            self._across.shutdown()

    def _carry_or_leave(self, tensor: Tensor, how: int, label: str) -> None:
        try:
            with label_calls(label):
                self._carry(tensor, how)
        except Exception:
            self._core.close()  # This host's other ranks hear of it at once, not at their deadline.
            raise

    def _carry(self, tensor: Tensor, how: int) -> None:
        is_mean = how == _AVG
        within = _SUM if is_mean else how
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        counts = self._counts(flat.numel())
        begins = [sum(counts[:index]) for index in range(self._here)]
        address, _, code = to_reduce(flat, "all_reduce")
        places = [address + begin * flat.element_size() for begin in begins]
        own = places[self._place]
        self._native.wait(self._core.reduce_scatter(places, own, counts, code, within))
        if self._across is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(within))
            mine = flat.narrow(0, begins[self._place], counts[self._place])
            self._across.allreduce([mine], options).wait()
        self._native.wait(self._core.all_gather(own, places, counts, code))
        if is_mean:
            flat.div_(self._size, rounding_mode=None if flat.is_floating_point() else "trunc")

    def _counts(self, length: int) -> list[int]:
        """How long the shard of each rank of this host is: the same cut on every host."""
        share, rest = divmod(length, self._shards)
        return [share + (i < rest) if i < self._shards else 0 for i in range(self._here)]


@dataclass(frozen=True, slots=True)
class TorchOperation:
    """A work of another backend, as an operation of ours."""

    work: Any

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return bool(self.work.is_completed())


class OfOthers:
    """Waits for works of other backends as for operations of ours."""

    def wait(self, operation: TorchOperation, timeout_s: float, /) -> None:
        """Wait for the end; raises what ended it."""
        if timeout_s:
            operation.work.wait(timedelta(seconds=timeout_s))
        else:
            operation.work.wait()

    def tend(self, operation: TorchOperation, /) -> None:
        """Wait for the end; does not raise."""
        with contextlib.suppress(Exception):
            operation.work.wait()


class Ended:
    """In the place of the native group once a group has ended."""

    def __getattr__(self, name: str) -> Any:
        """Refuse every call."""
        raise RuntimeError("the process group was ended: no call of it works any more")

    def close(self) -> None:
        """Nothing is left to close."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One reduction over several hosts, under way."""

    outcome: Future[None]

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.outcome.done()


_SUM, _AVG = 0, 1  # torch's codes


def can_carry(tensor: Tensor) -> bool:
    """Return whether `Between` reduces such tensors; gloo takes the others."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return tensor.is_cpu and tensor.layout is torch.strided and dtype in TYPES and dtype is not torch.bool

"""`SharedMemoryGroup`: a torch `ProcessGroup` whose collectives run over shared memory.

What moves bytes is `csrc/shm_group.h`; here torch's calls become its calls. Tensors of other devices, sparse tensors
and everything between hosts but `all_reduce` go to the backends that know them.
"""

# mypy: disable-error-code="no-any-return"
# Other backends' works come back as they are, and torch's bindings are untyped.

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx.comm import crossed
from phalanx.comm.elastic import membership
from phalanx.comm.shared_memory import hosts
from phalanx.comm.shared_memory.buffers import (
    BufferView,
    OutputBuffers,
    copy_if_overlapping,
    even,
    reduction,
    require_fit,
    shares,
    to_move,
    to_reduce,
)
from phalanx.comm.shared_memory.native import Native
from phalanx.comm.shared_memory.torch_group import NamedGroup
from phalanx.comm.shared_memory.work import CompletionThread, SharedWork
from phalanx.errors import ConfigError, PeerLostError

logger = logging.getLogger("phalanx.comm")


class SharedMemoryGroup(NamedGroup):
    """One group of ranks; torch makes it for the backend `shm`.

    Args:
        options: What torch says of the group: store, ranks, timeout.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.calls_issued = 0
        self._coalesced: list[SharedWork] | None = None
        self._keeper = CompletionThread(f"phalanx shm {options.group_id}")
        ranks = list(options.global_ranks_in_group) or list(range(self._size))
        me = f"rank {ranks[self._rank]} (host {socket.gethostname()}, pid {os.getpid()})"
        met = hosts.meet(self._store, self._rank, self._size, me, self._timeout)
        self._core = met.core
        if met.core is not None:
            crossed.watch(met.core)
        self._between = met.between
        self._carrier: Any = Native(met.core) if met.core is not None else met.between
        self.carrier = met.carrier
        """What carries the tensors of the CPU, in words."""

        if met.refusal:
            logger.warning("this group of ranks uses gloo instead of shared memory: %s", met.refusal)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take from now on."""
        self._timeout = timeout
        if self._core is not None:
            self._core.set_timeout(timeout.total_seconds())

    def under_way(self) -> Any:
        """Return what `csrc/shm_group.h` says of calls that have not ended, or None where ranks share no memory."""
        return self._core.under_way() if isinstance(self._carrier, Native) else None

    def wait_times(self) -> Any:
        """Return whom this rank waited for, as `csrc/shm_group.h` says, or None where ranks share no memory."""
        return self._core.wait_times() if isinstance(self._carrier, Native) else None

    def shutdown(self) -> None:
        """Leave the group. Operations under way fail."""
        if self._core is not None:
            self._core.close()
        if self._between is not None:
            self._between.close()
        # A message between hosts ends when the other side closes its connection, which may wait for this one.
        self._keeper.stop(None if membership.current() is None else 0.1)
        # Torch, meshes and caches may keep this object until the interpreter has ended, and the memory must not stay.
        if self._core is not None:
            self._core = self._carrier = hosts.Ended()
        for other in self._others.values():
            other.shutdown()

    abort = shutdown

    # Collectives. Their lists are torch's: tensors of one call for each device of a rank, here always one.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Combine tensors over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        if (work := self._errands(tensors, opts)) is not None:
            return work
        if (other := self._other(tensors[0])) is not None:
            return other.allreduce(tensors, opts)
        return self._reduced(tensors, opts, "all_reduce", lambda n, how: self._core.all_reduce(*n, how))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Combine several tensors over the ranks, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        if (work := self._errands(tensors, opts)) is not None:
            return work
        if (other := self._other(tensors[0])) is not None:
            return other.allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Combine tensors over the ranks, in place at the root."""
        if (other := self._other(tensors[0])) is not None:
            return self._without_gaps(
                tensors, opts, lambda memory: other.reduce(memory, opts), self._rank == opts.rootRank
            )
        return self._reduced(tensors, opts, "reduce", lambda n, how: self._core.reduce(*n, how, opts.rootRank))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Give every rank the root's tensors."""
        if (other := self._other(tensors[0])) is not None:
            return self._without_gaps(tensors, opts, lambda memory: other.broadcast(memory, opts), True)
        landing = OutputBuffers(tensors, keep_values=True)
        operations = [self._core.broadcast(*to_move(t), opts.rootRank) for t in landing.memory]
        return self._issued(operations, tensors, landing, opts, landing.then)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Give every rank all ranks' tensors, which may differ in length."""
        if (other := self._other(inputs[0])) is not None:
            return other.allgather(outputs, inputs, opts or AllgatherOptions())
        works = [self._gathered(outs, x, opts) for outs, x in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._join_works(works)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Give every rank all ranks' tensors; `outputs` has one list for each rank."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Give every rank all ranks' tensors, one behind the other."""
        if (other := self._other(input)) is not None:
            return other._allgather_base(output, input, opts or AllgatherOptions())
        landing, x = OutputBuffers([output]), input.contiguous()
        address, count, code = to_move(x)
        places = even(landing.memory[0], x, self._size, "all_gather")
        operation = self._core.all_gather(address, places, [count] * self._size, code)
        return self._issued([operation], [output], (landing, x), opts, landing.then)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`all_gather_single` of several tensors."""
        if (other := self._other(inputs[0])) is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts or AllgatherOptions())
        return self._join_works([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Combine one tensor for each rank over the ranks; each keeps its own, which may differ in length."""
        opts = opts or dist.ReduceScatterOptions()
        if (other := self._other(outputs[0])) is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        works = [self._scattered_sum(out, parts, opts) for out, parts in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._join_works(works)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine a tensor over the ranks; each keeps its run of it."""
        opts = opts or dist.ReduceScatterOptions()
        if (other := self._other(input)) is not None:
            return other._reduce_scatter_base(output, input, opts)
        landing, x = OutputBuffers([output]), input.contiguous()
        places = even(x, landing.memory[0], self._size, "reduce_scatter")
        address, count, code = to_reduce(landing.memory[0], "reduce_scatter")
        how = reduction(opts.reduceOp, output, "reduce_scatter")
        operation = self._core.reduce_scatter(places, address, [count] * self._size, code, how)
        return self._issued([operation], [output], (landing, x), opts, landing.then)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """`reduce_scatter_single` of several tensors."""
        if (other := self._other(inputs[0])) is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts or dist.ReduceScatterOptions())
        return self._join_works([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Send a run of rows to every rank, and put what arrives one behind the other."""
        if (other := self._other(input)) is not None:
            return other.alltoall_base(output, input, output_splits, input_splits, opts or dist.AllToAllOptions())
        landing = OutputBuffers([output])
        x = copy_if_overlapping(input.contiguous(), landing.memory)
        to = shares(landing.memory[0], output_splits or self._even_rows(output), "all_to_all_single output")
        pieces = shares(x, input_splits or self._even_rows(input), "all_to_all_single input")
        return self._issued([self._exchange(pieces, to)], [output], (landing, x), opts, landing.then)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send a tensor to every rank."""
        if (other := self._other(inputs[0])) is not None:
            return other.alltoall(outputs, inputs, opts or dist.AllToAllOptions())
        landing = OutputBuffers(outputs)
        pieces = [copy_if_overlapping(x.contiguous(), landing.memory) for x in inputs]
        operation = self._exchange([to_move(x) for x in pieces], [to_move(t) for t in landing.memory])
        return self._issued([operation], outputs, (landing, pieces), opts, landing.then)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Give the root all ranks' tensors."""
        if (other := self._other(inputs[0])) is not None:
            return other.gather(outputs, inputs, opts)
        (x,), tensors = [t.contiguous() for t in inputs], outputs[0] if outputs else []
        require_fit(x, tensors, "gather", self._size)
        landing = OutputBuffers(tensors)
        address, count, code = to_move(x)
        operation = self._core.gather(address, [t.data_ptr() for t in landing.memory], count, code, opts.rootRank)
        return self._issued([operation], tensors, (landing, x), opts, landing.then)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Give every rank its tensor of the root's."""
        if (other := self._other(outputs[0])) is not None:
            return other.scatter(outputs, inputs, opts)
        pieces = [x.contiguous() for x in inputs[0]] if inputs else []
        require_fit(outputs[0], pieces, "scatter", self._size)
        landing = OutputBuffers(outputs)
        address, count, code = to_move(landing.memory[0])
        operation = self._core.scatter([x.data_ptr() for x in pieces], address, count, code, opts.rootRank)
        return self._issued([operation], outputs, (landing, pieces), opts, landing.then)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until every rank is here."""
        opts = opts or dist.BarrierOptions()
        if self._core is None:
            return self._gloo().barrier(opts)
        return self._issued([self._core.barrier()], [], None, opts, None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank is here; `torch.distributed.monitored_barrier` knows only gloo by name.

        Args:
            timeout: How long; that of the group when omitted.
            wait_all_ranks: Has no effect where ranks share memory: all ranks that are missing are named.

        Raises:
            PeerLostError: If a rank does not come in time, on every rank that came; names those that did not.
        """
        timeout = timeout or self._timeout
        if self._core is None:
            self._gloo().monitored_barrier(timeout, wait_all_ranks)
            return
        barrier, seconds = self._core.barrier(), timeout.total_seconds()
        if self._core.ends_within(barrier, seconds):
            return
        missing = self._core.missing_from(barrier)
        try:
            self._core.wait(barrier, 1e-3)  # ends the group, so that nobody waits for it
        except PeerLostError as error:
            raise PeerLostError(f"monitored_barrier: Timed out after {seconds:g} s: {missing or error}.") from None

    # Messages

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Send a tensor to a rank."""
        if (other := self._other(tensors[0])) is not None:
            return other.send(tensors, rank, tag)
        x = tensors[0].contiguous()
        return self._issued([self._core.send(x.data_ptr(), _bytes_of(x), rank, tag)], tensors, x, None, None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Receive a tensor from a rank."""
        if (other := self._other(tensors[0])) is not None:
            return other.recv(tensors, rank, tag)
        landing = OutputBuffers(tensors)
        (memory,) = landing.memory
        operation = self._core.receive(memory.data_ptr(), _bytes_of(memory), rank, tag)
        return self._issued([operation], tensors, landing, None, landing.then)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive a tensor from whichever rank sends one."""
        if (other := self._other(tensors[0])) is not None:
            return other.recv_anysource(tensors, tag)
        return self.recv(tensors, -1, tag)

    # torch before 2.13 has these names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._get_backend(device)._start_coalescing()
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != "cpu":
            work: dist.Work = self._get_backend(device)._end_coalescing()
            return work
        works, self._coalesced = self._coalesced or [], None
        return self._join_works(works)

    # How it is done.

    def _other(self, tensor: Tensor) -> Any:
        """Return the backend that a tensor is for, or None when it is for us."""
        if tensor.is_cpu:
            if self._core is not None and tensor.layout is torch.strided:
                return None
            return self._gloo()
        return self._others.get(tensor.device.type) or self._gloo()

    def _without_gaps(
        self, tensors: list[Tensor], opts: Any, issue: Callable[[list[Tensor]], Any], is_filled: bool
    ) -> Any:
        """Issue a call of another backend; gloo takes the memory of a tensor with gaps for its numbers.

        Where the call fills no tensors of this rank, gloo would still leave sums of some ranks in them.
        """
        if not tensors[0].is_cpu or tensors[0].layout is not torch.strided:
            return issue(tensors)
        if not is_filled:
            return issue([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])
        landing = OutputBuffers(tensors, keep_values=True)
        work = issue(landing.memory)
        if landing.then is None:
            return work
        return self._issued([hosts.TorchOperation(work)], tensors, landing, opts, landing.then, hosts.OfOthers())

    def _errands(self, tensors: list[Tensor], opts: Any) -> SharedWork | None:
        """Issue an all_reduce over several hosts; None for tensors that have to go another way."""
        if self._between is None or not all(hosts.can_carry(t) for t in tensors):
            return None
        codes = [reduction(opts.reduceOp, t, "all_reduce") for t in tensors]
        landing = OutputBuffers(tensors, keep_values=True)
        errands = [self._between.all_reduce(*each) for each in zip(landing.memory, codes, strict=True)]
        return self._issued(errands, tensors, landing, opts, landing.then)

    def _reduced(
        self, tensors: list[Tensor], opts: Any, verb: str, issue: Callable[[BufferView, int], Any]
    ) -> SharedWork:
        landing = OutputBuffers(tensors, keep_values=True)
        operations = []
        for tensor in landing.memory:
            numbers = to_reduce(tensor, verb)
            operations.append(issue(numbers, reduction(opts.reduceOp, tensor, verb)))
        return self._issued(operations, tensors, landing, opts, landing.then)

    def _gathered(self, outputs: list[Tensor], input: Tensor, opts: Any) -> SharedWork:
        landing, x = OutputBuffers(outputs), input.contiguous()
        address, _, code = to_move(x)
        if len(outputs) != self._size or outputs[self._rank].numel() != x.numel() or outputs[0].dtype is not x.dtype:
            raise ConfigError(
                f"all_gather needs {self._size} outputs of {x.dtype}, that of this rank with {x.numel()} numbers, "
                f"found {len(outputs)} of {outputs[0].dtype} with {[t.numel() for t in outputs]}. Correct them."
            )
        numbers = [to_move(t) for t in landing.memory]
        operation = self._core.all_gather(address, [n.address for n in numbers], [n.length for n in numbers], code)
        return self._issued([operation], outputs, (landing, x), opts, landing.then)

    def _scattered_sum(self, output: Tensor, parts: list[Tensor], opts: Any) -> SharedWork:
        landing, pieces = OutputBuffers([output]), [x.contiguous() for x in parts]
        address, _, code = to_reduce(landing.memory[0], "reduce_scatter")
        if (
            len(pieces) != self._size
            or pieces[self._rank].numel() != output.numel()
            or pieces[0].dtype is not output.dtype
        ):
            raise ConfigError(
                f"reduce_scatter needs {self._size} inputs of {output.dtype}, that for this rank with {output.numel()} "
                f"numbers, found {len(pieces)} of {pieces[0].dtype} with {[x.numel() for x in pieces]}. Correct them."
            )
        numbers = [to_reduce(x, "reduce_scatter") for x in pieces]
        how = reduction(opts.reduceOp, output, "reduce_scatter")
        counts = [n.length for n in numbers]
        operation = self._core.reduce_scatter([n.address for n in numbers], address, counts, code, how)
        return self._issued([operation], [output], (landing, pieces), opts, landing.then)

    def _exchange(self, pieces: Sequence[BufferView], to: Sequence[BufferView]) -> Any:
        if len(pieces) != self._size or len(to) != self._size:
            raise ConfigError(
                f"all_to_all over {self._size} ranks needs that many inputs and outputs, found {len(pieces)} "
                f"and {len(to)}."
            )
        return self._core.all_to_all(
            [n.address for n in pieces], [n.length for n in pieces], [n.address for n in to], [n.length for n in to],
            pieces[0].type,
        )  # fmt: skip

    def _even_rows(self, tensor: Tensor) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows % self._size:
            raise ConfigError(
                f"all_to_all_single cannot split {rows} rows evenly for {self._size} ranks. Give split sizes."
            )
        return [rows // self._size] * self._size

    def _issued(
        self,
        operations: list[Any],
        result: list[Tensor],
        keep_alive: object,
        opts: Any,
        then: Callable[[], None] | None,
        carrier: Any = None,
    ) -> SharedWork:
        self.calls_issued += 1
        work = SharedWork(carrier or self._carrier, operations, result, keep_alive, then)
        try:
            if opts is not None and not opts.asyncOp and self._coalesced is None:
                work.wait()
        finally:
            # Nor has it ended where a signal interrupted the wait: what it reads and writes must stay.
            if not work.is_completed():
                self._keeper.keep(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _join_works(self, works: Sequence[SharedWork]) -> SharedWork:
        """Return one work for several."""
        operations = [operation for work in works for operation in work.operations]
        result = [tensor for work in works for tensor in work.result()]

        def wait_for_each() -> None:
            for work in works:
                work.wait()

        work = SharedWork(self._carrier, operations, result, works, wait_for_each)
        if not work.is_completed():
            self._keeper.keep(work)
        return work


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

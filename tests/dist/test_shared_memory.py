"""Collectives over shared memory give what gloo gives: every operation, dtype and number of ranks."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.comm import shared_memory
from phalanx.errors import ConfigError, PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.dist

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLES = (torch.uint8, torch.int8, torch.int32, torch.int64)
MOVED = (*FLOATS, *WHOLES, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2)
LENGTHS = (0, 1, 37, 20_001, 300_011)
"""Nothing, one number, less than a cache line for each rank, one round, several rounds."""


def groups() -> tuple[dist.ProcessGroup, int, int]:
    """Start with shared memory; return a gloo group of the same ranks, the rank and the size."""
    shared_memory.register()
    dist.init_process_group("shm", init_method="env://")
    return dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size()


def numbers(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers: exact in every dtype, so that the order of additions does not matter."""
    made = torch.randint(0, 5, (length,), generator=torch.Generator().manual_seed(seed))
    return made.to(torch.float32).to(dtype) if dtype.is_floating_point else made.to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype is b.dtype
    assert a.shape == b.shape
    # Compared bit by bit, because some dtypes have no equality on the CPU.
    assert torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_operation_gives_what_gloo_gives(n: int):
    run_ranks(_everything, n)


def _everything() -> None:
    gloo, rank, size = groups()
    _reductions(gloo, rank, size)
    _moves(gloo, rank, size)
    _messages(rank, size)
    _odd_tensors(rank, size)
    _asynchronous(rank, size)
    _refused(size)


def _reductions(gloo: dist.ProcessGroup, rank: int, size: int) -> None:
    for dtype in (*FLOATS, *WHOLES):
        for length in LENGTHS:
            mine = numbers(length, dtype, rank)
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)[: 4 if length < 300_000 else 1]:
                ours, theirs = mine.clone(), mine.clone()
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                same(ours, theirs)
            root = length % size
            ours, theirs = mine.clone(), mine.clone()
            dist.reduce(ours, root)
            dist.all_reduce(theirs, group=gloo)
            same(ours, theirs if rank == root else mine)
            _reduce_scatter(theirs, mine, rank, size)
    for dtype in FLOATS:
        everyone = torch.stack([numbers(20_001, dtype, r) for r in range(size)])
        ours = everyone[rank].clone()
        dist.all_reduce(ours, ReduceOp.AVG)
        same(ours, (everyone.sum(0, dtype=torch.promote_types(dtype, torch.float32)) / size).to(dtype))
    for dtype in WHOLES:
        ours = torch.full((37,), rank + 1, dtype=dtype)
        dist.all_reduce(ours, ReduceOp.AVG)
        assert ours.eq(size * (size + 1) // 2 // size).all()
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        ours = numbers(37, torch.int32, rank)
        theirs = ours.clone()
        dist.all_reduce(ours, op)
        dist.all_reduce(theirs, op, group=gloo)
        same(ours, theirs)
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        for dtype in FLOATS:
            for whose in range(size):  # not a number on one rank, whichever, is not a number in the end
                ours = torch.tensor([float("nan") if rank == whose else 1.0], dtype=dtype)
                dist.all_reduce(ours, op)
                assert ours.isnan().all()
    truths = torch.tensor([rank == 0, True, False])
    for op, wanted in ((ReduceOp.SUM, [True, True, False]), (ReduceOp.MIN, [False, True, False])):
        ours = truths.clone()
        dist.all_reduce(ours, op)
        assert ours.tolist() == wanted


def _reduce_scatter(total: Tensor, mine: Tensor, rank: int, size: int) -> None:
    sizes = [mine.numel() // size] * size
    sizes[-1] += mine.numel() - sum(sizes)
    out = torch.empty(sizes[rank], dtype=mine.dtype)
    dist.reduce_scatter(out, list(mine.split(sizes)))
    same(out, total.split(sizes)[rank])
    even = mine[: sizes[0] * size]
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        out = torch.empty(sizes[0], dtype=mine.dtype)
        with older_names():
            getattr(dist, name, dist.reduce_scatter_tensor)(out, even)
        same(out, total[: even.numel()].split(sizes[0] or 1)[rank] if even.numel() else out)


@contextlib.contextmanager
def older_names() -> Iterator[None]:
    """Newer torch warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _moves(gloo: dist.ProcessGroup, rank: int, size: int) -> None:
    for dtype in MOVED:
        for length in (0, 1, 37, 300_011):
            everyone = [numbers(length, dtype, r) for r in range(size)]
            mine, root = everyone[rank], length % size
            for name, moved in _moved(mine, everyone, rank, size, root):
                for got, wanted in moved():
                    try:
                        same(got, wanted)
                    except AssertionError:
                        raise AssertionError(f"{name} of {length} {dtype}") from None


def _moved(
    mine: Tensor, everyone: list[Tensor], rank: int, size: int, root: int
) -> Iterator[tuple[str, Callable[[], list[tuple[Tensor, Tensor]]]]]:
    def empties(like: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(t) for t in like]

    def broadcast() -> list[tuple[Tensor, Tensor]]:
        x = mine.clone()
        dist.broadcast(x, root)
        return [(x, everyone[root])]

    def all_gather() -> list[tuple[Tensor, Tensor]]:
        out = empties(everyone)
        dist.all_gather(out, mine)
        return list(zip(out, everyone, strict=True))

    def all_gather_of_different_lengths() -> list[tuple[Tensor, Tensor]]:
        parts = [t[: t.numel() // (r + 1)] for r, t in enumerate(everyone)]
        out = empties(parts)
        dist.all_gather(out, parts[rank])
        return list(zip(out, parts, strict=True))

    def all_gather_into_tensor() -> list[tuple[Tensor, Tensor]]:
        out = mine.new_empty(mine.numel() * size)
        with older_names():
            dist.all_gather_into_tensor(out, mine)
        return [(out, torch.cat(everyone))]

    def gather() -> list[tuple[Tensor, Tensor]]:
        out = empties(everyone) if rank == root else None
        dist.gather(mine, out, root)
        return list(zip(out or [], everyone if out else [], strict=True))

    def scatter() -> list[tuple[Tensor, Tensor]]:
        out = torch.empty_like(mine)
        dist.scatter(out, everyone if rank == root else None, root)
        return [(out, everyone[rank])]

    def all_to_all() -> list[tuple[Tensor, Tensor]]:
        out = empties(everyone)
        dist.all_to_all(out, [mine] * size)
        return list(zip(out, everyone, strict=True))

    def all_to_all_single_uneven() -> list[tuple[Tensor, Tensor]]:
        cut = [mine.numel() * r // 10 for r in range(size)]  # so much of everybody's goes to rank r
        given = torch.cat([mine[:c] for c in cut])
        out = mine.new_empty(cut[rank] * size)
        dist.all_to_all_single(out, given, [cut[rank]] * size, cut)
        return [(out, torch.cat([t[: cut[rank]] for t in everyone]))]

    for function in (
        broadcast, all_gather, all_gather_of_different_lengths, all_gather_into_tensor, gather, scatter, all_to_all,
        all_to_all_single_uneven,
    ):  # fmt: skip
        yield function.__name__, function


def _messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (0, 1, 300_011):
        out, given = torch.empty(length), numbers(length, torch.float32, rank)
        # All send before they receive: messages longer than the ring must not lock each other out.
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, out, before)]):
            work.wait()
        same(out, numbers(length, torch.float32, before))
    if rank == 0:
        for tag in (1, 2):
            for _ in range(2):
                dist.send(torch.full((90_000,), float(tag)), 1, tag=tag)
    if rank == 1:
        for tag in (2, 1, 1, 2):  # asked for in another order than they were sent
            x = torch.empty(90_000)
            assert dist.recv(x, 0, tag=tag) == 0
            assert x.eq(tag).all()
    if rank > 0:
        dist.send(torch.tensor([rank]), 0)
    else:
        got = {dist.recv(x := torch.empty(1, dtype=torch.int64)): int(x) for _ in range(size - 1)}
        assert got == {r: r for r in range(1, size)}
    dist.barrier()


def _odd_tensors(rank: int, size: int) -> None:
    """Tensors with gaps, of no dims, and complex ones."""
    x = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(x)
    same(x.contiguous(), torch.arange(12.0).view(3, 4).t().contiguous() * size)
    out = torch.zeros(4, size)
    columns = [c for c in out.t()]
    dist.all_gather(columns, torch.full((4,), float(rank)))
    same(out, torch.arange(float(size)).expand(4, size).contiguous())
    scalar = torch.tensor(1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == size
    z = torch.tensor([1 + 2j])
    dist.all_reduce(z)
    assert z.item() == size * (1 + 2j)


def _asynchronous(rank: int, size: int) -> None:
    tensors = [torch.full((100_000,), float(i)) for i in range(6)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [work.get_future() for work in works[:3]]
    for i in (5, 0, 3):  # waited for in any order
        assert works[i].wait()
    for i, future in enumerate(futures):
        (value,) = future.wait()
        assert value[0].item() == i * size
    for i, (work, t) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert work.is_success()
        assert work.exception() is None
        assert t.eq(i * size).all()
    # What has ended is in place, also in a tensor with gaps that is filled from memory of ours, and for who only looks.
    matrix = torch.ones(3, 2)
    for i in range(20):
        matrix.fill_(i)
        work = dist.all_reduce(matrix[:, 1], async_op=True)
        while not work.is_completed():
            pass
        assert matrix[0].tolist() == [i, i * size]
    # Rank 1 takes part only after rank 0 has heard from it, while rank 0's call is under way.
    x = torch.ones(300_000)
    if rank == 1:
        dist.send(torch.ones(1), 0)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        dist.recv(torch.empty(1), 1)
    work.wait()
    assert x.eq(size).all()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        for t in tensors[:3]:
            dist.all_reduce(t)
    coalesced.wait()
    assert tensors[2][0].item() == 2 * size * size
    part = dist.new_group([0, 1])
    if rank < 2:
        y = torch.ones(1)
        dist.all_reduce(y, group=part)
        assert y.item() == 2
    # Torch names groups that their members make after the ranks: keys of the one before must not be taken for theirs.
    for members in ([rank], [0, 1], [0, 1]):
        if rank in members:
            own = dist.new_group(members, use_local_synchronization=True)
            assert own.carrier == "shm"
            dist.all_reduce(y := torch.ones(5), group=own)
            assert y.sum().item() == 5 * len(members)
            dist.destroy_process_group(own)


def _refused(size: int) -> None:
    """Calls that cannot work are errors before anything is sent, so the group continues."""
    with pytest.raises(ConfigError, match=r"all_reduce cannot take AVG of torch\.bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(ConfigError, match=r"no kernel for torch\.float8_e5m2"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(ConfigError, match=f"all_gather over {size} ranks needs one tensor {size} times as long"):
        dist.distributed_c10d._get_default_group().all_gather_single(torch.empty(size + 1), torch.ones(1))
    dist.barrier()


def test_ranks_that_make_different_calls_are_told_both():
    for case, (first, second) in {
        "all_gather": ("all_reduce sum of 3 float32", "all_gather of 6 float32"),
        "dtype": ("all_reduce sum of 3 float32", "all_reduce sum of 3 int64"),
        "count": ("all_reduce sum of 3 float32", "all_reduce sum of 4 float32"),
        "parts": ("all_gather of 3 float32", "all_gather of 3 float32 cut into parts of other lengths"),
    }.items():
        for outcome in run_ranks(_disagreeing, 2, case, expect_failure=True):
            assert outcome.error_type == "ConfigError"
            assert f"made {first}" in outcome.message
            assert f"made {second}" in outcome.message
            assert "In call 2 of the group rank " in outcome.message


def _disagreeing(case: str) -> None:
    _, rank, _ = groups()
    dist.barrier()
    if case == "parts":
        dist.all_gather([torch.empty(1 + rank), torch.empty(2 - rank)], torch.ones(2 - rank if rank else 1))
    elif rank == 0:
        dist.all_reduce(torch.ones(3))
    elif case == "all_gather":
        dist.all_gather([torch.empty(3)] * 2, torch.ones(3))
    elif case == "dtype":
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
    else:
        dist.all_reduce(torch.ones(4))


def test_a_message_from_any_rank_does_not_need_those_that_left():
    """It comes from one that stays, until all others have left."""
    value, message = run_ranks(_any_source, 3)[0]
    assert value == 1.0
    assert "recv number 2 on rank 0 (host " in message
    assert "it left the group" in message


def _any_source() -> tuple[float, str]:
    _, rank, _ = groups()
    left = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.recv(x := torch.zeros(1))
        with pytest.raises(PeerLostError) as caught:
            dist.recv(torch.zeros(1))
        return x.item(), str(caught.value)
    if rank == 1:
        left.wait(["rank 2"])
        time.sleep(0.5)  # longer than rank 0 takes to look who is left
        dist.send(torch.ones(1), 0)
    dist.destroy_process_group()
    left.set(f"rank {rank}", "")
    return 0.0, ""


def test_a_wait_keeps_its_deadline_behind_other_calls():
    waited, message = run_ranks(_wait_behind, 2)[0]
    assert waited < 5.0
    assert "all_reduce, call 1 of the group, on rank 0 (" in message
    assert "Timed out waiting for rank 1 (" in message


def _wait_behind() -> tuple[float, str]:
    _, rank, _ = groups()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"])
        return 0.0, ""
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        works[1].wait(timedelta(seconds=0.2))
    store.set("over", "")
    return time.monotonic() - started, str(caught.value)


def test_a_message_of_another_size_is_told_on_both_sides():
    receiver = run_ranks(_short_message, 2, expect_failure=True)[1]
    assert receiver.error_type == "ConfigError"
    assert "sent 12 bytes with tag 0 to rank 1" in receiver.message
    assert "which expects 16" in receiver.message


def _short_message() -> None:
    _, rank, _ = groups()
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.barrier()
    else:
        dist.recv(torch.empty(4), 0)

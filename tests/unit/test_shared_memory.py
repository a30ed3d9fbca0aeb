"""The arithmetic and the rings of shared memory: two ranks of one group in one process, one thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, ReduceOp

from open_files import no_descriptor_left
from phalanx.comm.shared_memory import region
from phalanx.comm.shared_memory.buffers import TYPES, OutputBuffers, even, reduction, shares, to_move, to_reduce
from phalanx.comm.shared_memory.work import SharedWork
from phalanx.errors import ConfigError, PeerLostError

core = pytest.importorskip("phalanx._core")


@contextmanager
def members(size: int) -> Iterator[list[Any]]:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, core.SharedGroup.bytes_for(size))
        groups = [core.SharedGroup(fd, rank, size, f"rank {rank}", 5.0) for rank in range(size)]
    finally:
        os.close(fd)
    yield groups
    for group in groups:
        group.close()


def all_reduced(tensors: list[Tensor], op: object) -> list[Tensor]:
    """Reduce tensors small enough for one round, in which no rank has to continue before another can."""
    results = [t.clone() for t in tensors]
    with members(len(tensors)) as groups:
        calls = [
            group.all_reduce(*to_reduce(t, "all_reduce"), reduction(op, t, "all_reduce"))
            for group, t in zip(groups, results, strict=True)
        ]
        for group, call in zip(groups, calls, strict=True):
            group.wait(call)
    return results


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_goes_through_float32_and_back(dtype: torch.dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    (result,) = all_reduced([every], ReduceOp.SUM)
    numbers = ~every.isnan()
    assert torch.equal(bits(result[numbers]), bits(every[numbers]))
    assert result[~numbers].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_are_added_in_float32_and_rounded_once(dtype: torch.dtype):
    random = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-7, 1e-4, 1.0, 300.0, 60_000.0]).repeat(600)
    parts = [(torch.randn(3000, generator=random) * scales).to(dtype) for _ in range(3)]
    wanted = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    for result in all_reduced(parts, ReduceOp.SUM):
        assert torch.equal(bits(result), bits(wanted))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_whole_numbers_wrap_as_torchs_do(dtype: torch.dtype):
    top = torch.iinfo(dtype).max
    parts = [torch.tensor([top, -top, 7], dtype=dtype), torch.tensor([2, -5, 3], dtype=dtype)]
    for op, wanted in ((ReduceOp.SUM, parts[0] + parts[1]), (ReduceOp.PRODUCT, parts[0] * parts[1])):
        assert torch.equal(all_reduced(parts, op)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_mean_of_whole_numbers_is_their_sum_divided_towards_zero(dtype: torch.dtype):
    parts = [torch.tensor([7, 0, 9, 100], dtype=dtype), torch.tensor([2, 5, -20, 100], dtype=dtype)]
    total = parts[0] + parts[1]  # wraps around
    for result in all_reduced(parts, ReduceOp.AVG):
        assert torch.equal(result, total.div(2, rounding_mode="trunc"))


def test_the_mean_over_more_ranks_than_a_byte_counts_is_right():
    for result in all_reduced([torch.ones(1, dtype=torch.int8)] * 130, ReduceOp.AVG)[:1]:
        assert result.item() == 0  # 130 wraps around to -126


def test_all_ranks_get_the_same_bits():
    random = torch.Generator().manual_seed(0)
    results = all_reduced([torch.randn(1000, generator=random) for _ in range(4)], ReduceOp.AVG)
    assert all(torch.equal(result, results[0]) for result in results)


def test_messages_are_found_by_their_tag_and_sender():
    with members(3) as (first, second, third):
        sent = {tag: torch.full((5,), float(tag)) for tag in (1, 2, 3)}
        for tag in (1, 2):
            assert first.send(sent[tag].data_ptr(), 20, 1, tag).is_done
        third.send(sent[3].data_ptr(), 20, 1, 3)
        got = torch.empty(5)
        for tag, source, sender in ((2, 0, 0), (3, -1, 2), (1, -1, 0)):
            call = second.receive(got.data_ptr(), 20, source, tag)
            second.wait(call)
            assert call.peer == sender
            assert torch.equal(got, sent[tag])


def test_a_message_longer_than_the_ring_waits_for_its_receiver():
    with members(2) as (first, second):
        long = torch.arange(200_000)
        got = torch.empty_like(long)
        sent = first.send(long.data_ptr(), 1_600_000, 1, 0)
        assert not sent.is_done
        received = second.receive(got.data_ptr(), 1_600_000, 0, 0)
        while not received.is_done:  # every call moves on what waits
            first.receive(0, 0, 1, 9)
            second.receive(0, 0, 0, 9)
        assert sent.is_done
        assert torch.equal(got, long)


class Span:
    """When something began and ended, by the clock that groups count with: a busy machine makes it long."""

    def __enter__(self) -> Span:
        self.began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def test_the_wait_for_a_rank_counts_from_ones_own_entry_and_only_while_the_main_thread_waits():
    tensors = [torch.ones(8), torch.ones(8), torch.ones(8)]
    entries, ends = [Span() for _ in tensors], [Span() for _ in tensors]
    with members(3) as groups:
        calls = []
        for group, tensor, entry in zip(groups, tensors, entries, strict=True):
            with entry:
                calls.append(group.all_reduce(*to_reduce(tensor, "all_reduce"), reduction(ReduceOp.SUM, tensor, "")))
            time.sleep(0.05)
        for group, call, end in zip(groups, calls, ends, strict=True):
            with end:
                group.wait(call)
        in_calls_s, main_s, entered_s = groups[0].wait_times()
        assert main_s == [0.0, 0.0, 0.0]  # all were there before it asked for the end
        assert in_calls_s <= entries[0].seconds + ends[0].seconds
        assert entered_s[:2] == [0.0, 0.0]
        for waits, entered in ((entered_s, entries[0]), (groups[1].wait_times()[2], entries[1])):
            assert entries[2].began - entered.ended <= waits[2] <= entries[2].ended - entered.began
        assert groups[2].wait_times()[2] == [0.0, 0.0, 0.0]


def test_a_wait_in_slices_is_one_wait():
    with members(2) as groups:
        first = groups[0].barrier()
        with Span() as wait:
            assert not groups[0].ends_within(first, 0.05)
            threading.Timer(0.05, groups[1].barrier).start()
            groups[0].wait(first)
        in_calls_s, main_s, _ = groups[0].wait_times()
        assert 0.1 <= main_s[1] <= wait.seconds
        assert 0.09 <= in_calls_s <= wait.seconds


def test_operations_under_way_fail_when_the_group_ends():
    with members(2) as (first, _):
        call = first.barrier()
        first.close()
        with pytest.raises(RuntimeError, match="the process group was ended before this was done"):
            first.wait(call)


def test_a_dtype_without_a_code_moves_as_bytes_and_is_not_reduced():
    x = torch.zeros(3, dtype=torch.complex128)
    assert to_move(x)[1:] == (48, TYPES[torch.uint8])
    assert to_reduce(x, "all_reduce")[1:] == (6, TYPES[torch.float64])
    with pytest.raises(ConfigError, match=r"all_reduce has no kernel for torch\.uint64.*backend='gloo'"):
        to_reduce(torch.zeros(3, dtype=torch.uint64), "all_reduce")
    with pytest.raises(ConfigError, match=r"all_reduce cannot take MAX of torch\.complex128"):
        reduction(ReduceOp.MAX, x, "all_reduce")
    with pytest.raises(ConfigError, match=r"reduce cannot take BXOR of torch\.float32"):
        reduction(ReduceOp.BXOR, torch.zeros(1), "reduce")


def test_a_rank_that_does_not_join_a_group_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.01))
    store.set("host/0", "here")
    assert region.await_key(store, "host/0") == "here"
    with pytest.raises(PeerLostError, match=r"rank 1 did not join the process group within 0 s; see its log"):
        region.await_key(store, "host/1")


def test_cuts_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"add up to dim 0 of shape \(4, 2\), found \[1, 2\]"):
        shares(torch.zeros(4, 2), [1, 2], "all_to_all_single input")
    assert [n.length for n in shares(torch.zeros(4, 2), [1, 3], "all_to_all_single input")] == [2, 6]
    with pytest.raises(ConfigError, match="all_gather over 2 ranks needs one tensor 2 times as long"):
        even(torch.zeros(5), torch.zeros(2), 2, "all_gather")


def test_a_system_that_does_not_tell_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PHALANX_HOST_ID", raising=False)
    assert region.host_identity() == region.host_identity()
    monkeypatch.setattr(os, "readlink", _refuse)
    assert region.host_identity() != region.host_identity()


def _refuse(_: object) -> str:
    raise PermissionError(13, "not for you")


@pytest.mark.parametrize(("mode", "is_taken"), [("0", False), ("2", True)])
def test_memory_is_taken_at_once_where_the_kernel_may_refuse_it_later(
    mode: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "overcommit").write_text(f"{mode}\n")
    monkeypatch.setattr(region, "_OVERCOMMIT", tmp_path / "overcommit")
    fd = region._make(HashStore(), 0, 1 << 16)
    try:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert (os.fstat(fd).st_blocks * 512 >= 1 << 16) == is_taken
    finally:
        os.close(fd)


def test_memory_that_cannot_be_had_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "ftruncate", lambda *_: _refuse(None))
    with no_descriptor_left(), pytest.raises(PermissionError):
        region._make(HashStore(), 0, 1 << 16)


def test_an_error_after_the_operations_is_kept_and_told():
    def fail() -> None:
        raise ValueError("no room")

    with members(1) as (group,):
        work = SharedWork(group, [group.barrier()], [], None, fail)
        with pytest.raises(RuntimeError, match="no room"):  # torch's futures carry words only
            work.get_future().wait()
        assert str(work.exception()) == "no room"
        for _ in range(2):
            with pytest.raises(ValueError, match="no room"):
                work.wait()


def test_a_tensor_with_gaps_is_filled_through_memory_of_its_own():
    whole = torch.zeros(3, 2)
    landing = OutputBuffers([whole[:, 1]])
    landing.memory[0].fill_(7)
    assert landing.then is not None
    landing.then()
    assert whole.tolist() == [[0, 7]] * 3
    assert OutputBuffers([whole]).then is None

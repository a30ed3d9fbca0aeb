"""What waits for a future of an asynchronous call runs as over other backends, also where it makes calls itself."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.futures import Future

import phalanx as px
from ranks import run_ranks

pytestmark = pytest.mark.dist


def chain() -> None:
    rank = px.init().rank
    summed(rank)
    answered_while_the_main_thread_receives(rank)
    compressed_by_torch(rank)


def test_callbacks_of_futures_may_make_calls_and_wait_for_theirs() -> None:
    run_ranks(chain, 2, timeout_s=40)


def summed(rank: int) -> None:
    """Callbacks of callbacks, three levels deep; rank 1 is late to some calls, so that rank 0 is not waiting inside."""

    def again(future: Future) -> torch.Tensor:
        (total,) = future.value()
        return dist.all_reduce(total, async_op=True).get_future().then(once_more).wait()

    def once_more(future: Future) -> torch.Tensor:
        (total,) = future.value()
        return dist.all_reduce(total, async_op=True).get_future().wait()[0]

    for turn in range(60):
        x = torch.ones(20_000)
        if rank == 1 and turn % 3 == 0:
            time.sleep(0.002)
        total = dist.all_reduce(x, async_op=True).get_future().then(again).wait()
        assert total.eq(8).all()


def answered_while_the_main_thread_receives(rank: int) -> None:
    x, word = torch.ones(4_000_000), torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        sent = work.get_future().then(lambda _: dist.send(word, 1))
        dist.recv(answer := torch.zeros(3), 1)
        assert answer.eq(2).all()
        sent.wait()
    else:
        work.wait()
        dist.recv(word, 0)
        dist.send(word * 2, 0)


def crossed(rank: int) -> str:
    """A callback makes a call before one of the main thread on rank 0, and after it on rank 1."""

    def call_again(_: Future) -> torch.Tensor:
        return dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]

    if rank == 1:
        time.sleep(0.5)  # a callback of a call that has ended runs at once, in the thread of the script
    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    if rank == 0:
        again = first.then(call_again)
        with pytest.raises(RuntimeError):
            again.wait()
        with pytest.raises(px.PhalanxError) as caught:
            dist.all_reduce(torch.ones(2))
    else:
        with pytest.raises(px.PhalanxError) as caught:
            dist.all_reduce(torch.ones(2))
    return str(caught.value)


def crossed_on_each() -> str:
    return crossed(px.init().rank)


def test_calls_of_callbacks_that_cross_those_of_the_script_are_an_error_that_says_so() -> None:
    first, second = run_ranks(crossed_on_each, 2, timeout_s=40)
    assert "made all_reduce sum of 1 float32" in first
    assert "torch's PowerSGD hook does so where a model has several buckets" in first
    assert "made all_reduce sum of 2 float32" in second


def compressed_by_torch(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60))
    ddp = nn.parallel.DistributedDataParallel(model)
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(6):
        ddp(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        everyone = [torch.empty_like(param) for _ in range(2)]
        dist.all_gather(everyone, param.detach())
        assert torch.equal(*everyone)

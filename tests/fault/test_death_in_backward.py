"""A rank that dies in the middle of a backward pass is an error on the others within seconds, never a hang."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.fault


class DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.how == "raises":
            raise ValueError("rank 1's own error")
        return gradient, None


class Net(nn.Module):
    """Backward reaches the last layer's bucket first, then the place of death, then the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        return self.last(DiesInBackward.apply(self.first(x), how)).sum()


def train(how):
    rank = px.init().rank
    model, _, _ = px.distribute(Net(), strategy=px.DistributedStrategy(fuse_all_reduce_ops=False))
    for step in range(3):
        started = time.monotonic()
        try:
            model(torch.ones(2, 4), how if (rank, step) == (1, 2) else "").backward()
        except PeerLostError as error:
            return str(error), time.monotonic() - started
    return "nothing happened"


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_survivor_says_which_step_lost_a_rank_within_seconds(how):
    survivor, victim = run_ranks(train, 2, how, expect_failure=True, timeout_s=30)
    assert victim.error_type == {"killed": "Killed", "raises": "ValueError"}[how]
    message, seconds = survivor.value
    assert "rank 0 of 2: the all-reduce of gradients in step 3 failed" in message
    assert "Another rank ended or stopped answering; its log says why." in message
    assert seconds < 5.0

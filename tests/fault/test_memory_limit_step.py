"""A real limit on memory at the optimizer's first step: the same weights, or parameters as they were."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from memory_traps import digest
from phalanx.parallel.memory.free_memory import block_return
from ranks import run_ranks

pytestmark = pytest.mark.fault

WIDTH, LAYERS = 1024, 8
PARAMETERS = LAYERS * WIDTH * WIDTH * 4
STATE = 2 * PARAMETERS
TEMPORARIES = 3 * WIDTH * WIDTH * 4
REST = 16 << 20
"""What else may be allocated meanwhile."""


class Ring:
    """Memory that only a collection frees."""

    def __init__(self, size: int) -> None:
        self.block, self.itself = torch.ones(size, dtype=torch.uint8), self


def step_under_limit(how: str, foreach: bool) -> tuple[str, str, bool]:
    """Return the weights after two steps, the error of the first one, and whether it had changed a weight or state."""
    gc.freeze()
    gc.disable()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    half = LAYERS // 2  # of two groups, the first would be updated before the second has its state
    groups = [list(net[:half].parameters()), list(net[half:].parameters())]
    optimizer = torch.optim.AdamW([{"params": params} for params in groups], foreach=foreach)
    px.distribute(net, optimizer)
    x = torch.randn(4, WIDTH)
    net(x).square().mean().backward()
    block_return.tighten(torch.device("cpu"))
    if how == "garbage":
        Ring(2 * STATE)
    room = {"garbage": REST, "short": STATE // 2, "loop": STATE + TEMPORARIES + REST, "": None}[how]
    before, error = digest(net), ""
    if room is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size_now() + room, resource.RLIM_INFINITY))
    try:
        optimizer.step()
    except RuntimeError as raised:
        error = "\n".join((str(raised), *raised.__notes__))
    has_changed = digest(net) != before or bool(optimizer.state)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(1 + bool(error)):
        optimizer.step()
    return digest(net), error, has_changed


def size_now() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize:"))


def outcome_of(how: str, *, foreach: bool = False) -> Any:
    (outcome,) = run_ranks(step_under_limit, 1, how, foreach, expect_failure=True)
    assert not outcome.failed, outcome.output
    return outcome


@pytest.mark.parametrize(
    ("how", "foreach", "effect"),
    [("garbage", False, "frees what nothing refers to"), ("loop", True, "updates its parameters one by one")],
)
def test_a_first_step_goes_on_with_less(how: str, foreach: bool, effect: str) -> None:
    whole, limited = outcome_of("", foreach=foreach), outcome_of(how, foreach=foreach)
    assert limited.value == (whole.value[0], "", True)
    assert "ran out of memory in the optimizer's step of AdamW" in limited.output
    assert effect in limited.output


def test_a_step_whose_state_does_not_fit_changes_nothing_and_can_be_made_again() -> None:
    weights, error, has_changed = outcome_of("short").value
    assert "can't allocate memory" in error
    assert "parameters and state are as they were" in error
    assert not has_changed
    assert weights == outcome_of("").value[0]

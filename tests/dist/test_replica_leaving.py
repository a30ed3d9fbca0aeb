"""A loop that leaves an epoch early, where ranks hold different numbers of logical replicas."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from dist.test_logical_replicas import digest, error_of
from ranks import run_ranks

pytestmark = pytest.mark.dist


def distributed() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    x, y = torch.randn(60, 5), torch.randint(0, 3, (60,))
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return px.distribute(net, optimizer, TensorDataset(x, y), global_batch=12, replicas=3, seed=3)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def leave_by_batches(stop: int) -> tuple[str, list[str], str]:
    net, optimizer, loader = distributed()
    messages = Messages()
    logging.getLogger("phalanx.comm").addHandler(messages)

    def train() -> None:
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                if number == stop:
                    break

    source, start = inspect.getsourcelines(train)
    line = start + next(at for at, text in enumerate(source) if "break" in text)
    return error_of(train), messages.texts, f"{__file__.rpartition('/')[2]}:{line}"


@pytest.mark.parametrize("stop", [2, 3])
def test_leaving_after_a_number_of_batches_is_an_error_at_the_next_sum_that_names_the_line(stop: int) -> None:
    (first, messages, line), (second, others, _) = run_ranks(leave_by_batches, 2, stop)
    assert "the ranks compute different global batches" in first
    assert f"This rank left an epoch at {line}" in first
    assert "the ranks compute different global batches" in second
    assert "Count updates, not batches" in second
    assert not others
    if stop == 2:  # inside a global batch: the rank knows at once
        assert f"left an epoch at {line} inside a global batch, after 1 of this rank's 2" in messages[0]
    else:
        assert not messages


def leave_by_updates() -> str:
    net, optimizer, loader = distributed()
    for _ in range(3):
        updates = 0
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            updates += px.has_updated(optimizer)
            if updates == 3:
                break
    return digest(net)


def test_leaving_after_a_number_of_updates_has_the_same_bits_on_any_number_of_ranks() -> None:
    digests = {run_ranks(leave_by_updates, ranks)[0] for ranks in (1, 2, 3)}
    assert len(digests) == 1

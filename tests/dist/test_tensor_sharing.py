"""Tensors that another process sends in memory without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from phalanx.comm.local.tensor_sharing import share_by_memfd

pytestmark = pytest.mark.dist


def _send(queue: Any, strategy: str, is_over: Any) -> None:
    share_by_memfd()
    multiprocessing.set_sharing_strategy(strategy)
    base = torch.arange(6.0)
    collated = torch.zeros(4).new(torch.zeros(4)._typed_storage()._new_shared(4)).copy_(torch.ones(4))
    queue.put((base, base[2:], torch.empty(0), torch.tensor(True), collated, torch.nn.Parameter(torch.ones(2))))
    is_over.wait(30)  # torch's way asks the sender for the descriptor


def _receive(strategy: str) -> tuple[torch.Tensor, ...]:
    context = multiprocessing.get_context("fork")
    queue, is_over = context.Queue(), context.Event()
    sender = context.Process(target=_send, args=(queue, strategy, is_over))
    sender.start()
    try:
        return tuple(queue.get(timeout=30))
    finally:
        is_over.set()
        sender.join(30)
        assert sender.exitcode == 0


def test_tensors_arrive_and_those_that_share_memory_still_do() -> None:
    base, view, empty, truth, collated, parameter = _receive("file_descriptor")
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    assert (empty.numel(), bool(truth), collated.tolist(), parameter.tolist()) == (0, True, [1] * 4, [1] * 2)
    base[3] = 9
    assert view.tolist() == [2, 9, 4, 5]
    assert Path("/proc/self/maps").read_text().count("memfd:phalanx-tensor") >= 4


def test_a_script_that_asks_for_files_gets_files() -> None:
    base, view, *_ = _receive("file_system")
    assert view.tolist() == base[2:].tolist()
    assert "memfd:phalanx-tensor" not in Path("/proc/self/maps").read_text()

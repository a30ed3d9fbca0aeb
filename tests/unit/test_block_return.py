"""When blocks that are freed go back to the system: all but small ones while memory is short, else the largest."""

from __future__ import annotations

import resource

import pytest
import torch

from phalanx.parallel.memory import free_memory
from phalanx.parallel.memory.free_memory import BlockReturn

CPU = torch.device("cpu")
START, LIMIT = 1000, 2000


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What malloc is told, in turn, in a process that has 1000 bytes and may have 2000."""
    told: list[int] = []
    memory = free_memory.process_memory()
    object.__setattr__(memory, "address_space", START)
    monkeypatch.setattr(free_memory, "process_memory", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (LIMIT, LIMIT))
    monkeypatch.setattr(
        free_memory, "_call_libc", lambda name, *values: told.append(values[1]) if name == "mallopt" else None
    )
    return told


def run_first_passes(blocks: BlockReturn) -> None:
    for _ in range(free_memory._FIRST_PASSES + 1):
        blocks.count_pass()


@pytest.mark.parametrize(("most", "is_short"), [(1750, False), (1751, True)])
def test_memory_is_short_where_the_first_steps_leave_little_of_the_limit(
    thresholds: list[int], monkeypatch: pytest.MonkeyPatch, most: int, is_short: bool
) -> None:
    monkeypatch.setattr(free_memory, "most_address_space", lambda: most)
    blocks = BlockReturn()
    blocks.begin(CPU)
    assert thresholds == [1 << 17]
    run_first_passes(blocks)
    run_first_passes(blocks)
    assert thresholds == ([1 << 17] if is_short else [1 << 17, 1 << 20])


@pytest.mark.parametrize("in_turn", [("begin", "tighten"), ("tighten", "begin")])
def test_memory_that_has_run_out_is_short_for_good(
    thresholds: list[int], monkeypatch: pytest.MonkeyPatch, in_turn: tuple[str, str]
) -> None:
    monkeypatch.setattr(free_memory, "most_address_space", lambda: START)
    blocks = BlockReturn()
    for name in in_turn:  # a second model begins after the first has run out
        getattr(blocks, name)(CPU)
    run_first_passes(blocks)
    assert thresholds == [1 << 17, 1 << 17]


def test_the_most_address_space_is_that_of_all_times() -> None:
    before = free_memory.most_address_space()
    block = torch.empty(1 << 28, dtype=torch.uint8)
    most = free_memory.most_address_space()
    del block
    assert most >= before
    assert free_memory.most_address_space() == most >= free_memory.process_memory().address_space

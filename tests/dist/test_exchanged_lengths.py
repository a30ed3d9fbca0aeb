"""Exchanges of parts of any lengths over shared memory, at any address."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import shared_memory
from ranks import run_ranks

pytestmark = pytest.mark.dist

LONG = 9_000_001
"""Bytes: several rounds for any number of ranks, and no multiple of a cache line."""


def numbered(length: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def part(source: int, target: int, lengths: list[list[int]]) -> Tensor:
    return numbered(lengths[source][target], 100 * source + target)


def tables(size: int) -> list[list[list[int]]]:
    """Return what each rank sends to each, in bytes."""
    lengths = [0, 1, 63, 64, 65, 5000, 400_000, 1_500_001]
    picks = torch.randint(0, len(lengths), (6, size, size), generator=torch.Generator().manual_seed(1)).tolist()
    all_to_first = [[LONG if target == 0 else 1000 for target in range(size)] for _ in range(size)]
    to_itself = [[LONG if target == source else 3 for target in range(size)] for source in range(size)]
    return [[[lengths[i] for i in row] for row in table] for table in picks] + [all_to_first, to_itself]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_parts_of_any_lengths_arrive_whole(n: int):
    run_ranks(_exchange, n)


def _exchange() -> None:
    shared_memory.register()
    dist.init_process_group("shm", init_method="env://")
    rank, size = dist.get_rank(), dist.get_world_size()
    for lengths in tables(size):
        parts = [part(rank, target, lengths) for target in range(size)]
        expected = [part(source, rank, lengths) for source in range(size)]
        outputs = [torch.empty_like(x) for x in expected]
        dist.all_to_all(outputs, parts)
        assert all(map(torch.equal, outputs, expected)), lengths
        memory = torch.empty(1 + sum(map(len, expected)), dtype=torch.uint8)
        dist.all_to_all_single(memory[1:], torch.cat(parts), list(map(len, expected)), list(map(len, parts)))
        assert torch.equal(memory[1:], torch.cat(expected)), lengths
    _exchange_in_place(rank, size)


def _exchange_in_place(rank: int, size: int) -> None:
    """Ranks send each other as much as they get, of different lengths, and the outputs are the inputs.

    With three ranks or more they take different numbers of rounds: one writes further than it has read.
    """
    lengths = [[700_000 * (1 + a * b) for b in range(size)] for a in range(size)]
    parts = [part(rank, target, lengths) for target in range(size)]
    memory = torch.cat(parts)
    dist.all_to_all_single(memory, memory, lengths[rank], lengths[rank])
    dist.all_to_all(parts, parts)
    expected = [part(source, rank, lengths) for source in range(size)]
    assert torch.equal(memory, torch.cat(expected))
    assert all(map(torch.equal, parts, expected))

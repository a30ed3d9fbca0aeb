"""The tree in which logical replicas are added up has the same bits however they lie on ranks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.comm.batch.replicas import Replicas, ReplicaTurn, assign_replicas
from phalanx.errors import ConfigError
from phalanx.parallel.data.replicas.replica_sums import PartialSums, branches, is_one_branch_each, wide


def tree_sum(values: list[Tensor]) -> Tensor:
    """Return the sum by halves, of which the left is the longest power of two below the number of values."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return tree_sum(values[:half]) + tree_sum(values[half:])


def values_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(33, generator=generator) * 10.0**power for power in torch.arange(count) % 7]


@given(st.integers(1, 40), st.integers(1, 40))
def test_any_assignment_gives_the_same_bits(count: int, ranks: int) -> None:
    ranks = min(ranks, count)
    values = values_of(count)
    total = PartialSums(count)
    for local in assign_replicas(count, ranks):
        own = PartialSums(count)
        for replica in local:
            own.add(range(replica, replica + 1), values[replica].clone())
        assert [run for run, _ in own.sums] == branches(local, count)
        for run, value in own.sums:
            total.add(run, value)
    ((run, result),) = total.sums
    assert run == range(count)
    assert torch.equal(result, tree_sum(values))


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_rank_sends_few_sums(count: int, ranks: int) -> None:
    ranks = min(ranks, count)
    for local in assign_replicas(count, ranks):
        assert len(branches(local, count)) <= max(1, 2 * (count - 1).bit_length())


@given(st.integers(1, 32), st.integers(1, 32))
def test_ranks_with_one_branch_each_are_added_up_like_replicas(count: int, ranks: int) -> None:
    ranks = min(ranks, count)
    assignment = assign_replicas(count, ranks)
    if not is_one_branch_each(assignment):
        return
    values = values_of(count)
    of_ranks = [tree_sum(values[local.start : local.stop]) for local in assignment]
    assert torch.equal(tree_sum(of_ranks), tree_sum(values))


@pytest.mark.parametrize(
    ("count", "ranks", "is_one"),
    [(4, 4, True), (4, 2, True), (4, 3, False), (6, 3, True), (6, 2, False), (3, 3, True), (8, 1, True)],
)
def test_which_assignments_need_no_exchange(count: int, ranks: int, is_one: bool) -> None:
    assert is_one_branch_each(assign_replicas(count, ranks)) is is_one


def test_sixteen_bits_are_added_up_in_thirty_two() -> None:
    small = torch.ones(3, dtype=torch.bfloat16)
    assert wide(small).dtype == torch.float32
    assert wide(torch.ones(3)).data_ptr() != torch.ones(3).data_ptr()


def test_fewer_replicas_than_ranks_are_an_error() -> None:
    with pytest.raises(ConfigError, match="2 logical replicas were asked for and 3 ranks"):
        assign_replicas(2, 3)


class Listener:
    def __init__(self) -> None:
        self.turns: list[int] = []

    def hear(self, replica: int, _is_continued: bool) -> None:
        self.turns.append(replica)


def test_a_turn_starts_the_random_numbers_and_tells_listeners() -> None:
    replicas, listener = Replicas(assign_replicas(4, 2), rank=1), Listener()
    replicas.on_turn(listener.hear)
    turn = ReplicaTurn(2, seed=7)
    replicas.begin(turn)
    first = torch.rand(3), random.random()
    replicas.begin(turn)  # the forward pass on the batch that began it
    assert not torch.equal(torch.rand(3), first[0])
    replicas.begin_backward()
    replicas.begin(ReplicaTurn(2, seed=7))
    assert torch.equal(torch.rand(3), first[0])
    assert random.random() == first[1]
    assert listener.turns == [2, 2]
    replicas.begin(ReplicaTurn(2, seed=7))  # of another loader: the same turn
    assert torch.equal(torch.rand(3), first[0])
    assert listener.turns == [2, 2]
    assert (replicas.current, replicas.is_last, list(replicas.local)) == (2, False, [2, 3])
    del listener
    replicas.begin(ReplicaTurn(3, seed=8, index=1))
    assert replicas.is_last

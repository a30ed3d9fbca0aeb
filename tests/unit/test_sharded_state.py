"""Ranks that keep shards of an optimizer's state make the update of one that keeps all, whoever has which shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.errors import ConfigError
from phalanx.parallel.elastic.sharded_state import ShardedState
from phalanx.parallel.elastic.state_shards import WHOLE, StateShard, plan_moves, shards_of

SHAPES = ((70,), (3, 50), (1,), (), (130, 2))

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(of: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in of:
        param.grad = torch.randn(param.shape, generator=generator)


class Rank:
    """A rank without a process."""

    def __init__(self, make: MakeOptimizer, rank: int, ranks: int, mirror: int) -> None:
        self.params = params()
        self.optimizer = make(self.params)
        self.state = ShardedState(self.optimizer, rank, ranks, mirror)

    def update(self, step: int) -> None:
        set_gradients(self.params, step)
        self.state.put_slices(self.optimizer)
        self.optimizer.step()
        self.state.put_back(self.optimizer)


def share_values(ranks: Sequence[Rank]) -> None:
    total = ranks[0].state.table.total
    for index, source in enumerate(ranks):
        packed = source.state.pack_values(StateShard(index, len(ranks)).blocks(total))
        for target in ranks:
            target.state.unpack_values(packed)


def move(ranks: Sequence[Rank], held: Sequence[tuple[StateShard, ...]], mirror: int) -> None:
    needed = [shards_of(rank, len(ranks), mirror) for rank in range(len(ranks))]
    plan = plan_moves(held, needed, ranks[0].state.table.total)
    assert not plan.missing
    packed = [(each.target, ranks[each.source].state.pack_state(each.blocks)) for each in plan.moves]
    for index, rank in enumerate(ranks):
        received = [part for target, parts in packed if target == index for part in rank.state.unpack_state(parts)]
        rank.state.install(needed[index], received, is_new=not held[index])


def adamw(of: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([{"params": of[:2]}, {"params": of[2:], "lr": 0.1}], lr=0.01)


def sgd(of: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(of, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_updates_have_the_bits_of_whole_state_while_ranks_are_lost_and_join(make: MakeOptimizer) -> None:
    whole = params()
    optimizer = make(whole)
    ranks = [Rank(make, rank, 3, 1) for rank in range(3)]
    for step in range(6):
        if step == 2:  # rank 1 is lost; rank 0 has its shard
            left = [ranks[0], ranks[2]]
            move(left, [each.state.shards for each in left], 1)
            ranks = left
        if step == 4:  # two join, with the values of a peer
            joiners = [Rank(make, 0, 1, 1) for _ in range(2)]
            for joiner in joiners:
                joiner.state.unpack_values(ranks[0].state.pack_values(WHOLE.blocks(ranks[0].state.table.total)))
            held = [*(each.state.shards for each in ranks), (), ()]
            ranks = [*ranks, *joiners]
            move(ranks, held, 1)
        set_gradients(whole, step)
        optimizer.step()
        for each in ranks:
            each.update(step)
        share_values(ranks)
        for each in ranks:
            assert all(torch.equal(mine, other) for mine, other in zip(each.params, whole, strict=True))


def test_the_whole_state_is_that_of_an_optimizer_that_keeps_all() -> None:
    whole = params()
    optimizer = adamw(whole)
    ranks = [Rank(adamw, rank, 2, 0) for rank in range(2)]
    set_gradients(whole, 0)
    optimizer.step()
    for each in ranks:
        each.update(0)
    other = ranks[1].state
    received = ranks[0].state.unpack_state(other.pack_state(StateShard(1, 2).blocks(other.table.total)))
    with ranks[0].state.whole(received):
        gathered = ranks[0].optimizer.state_dict()
    expected = optimizer.state_dict()
    assert gathered["param_groups"] == expected["param_groups"]
    assert gathered["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(gathered["state"][index][key], value)
    # A rank of another job keeps its part of what was loaded.
    loaded = Rank(adamw, 1, 2, 0)
    loaded.optimizer.load_state_dict(gathered)
    again = other.pack_state(StateShard(1, 2).blocks(other.table.total))
    taken = loaded.state.pack_state(StateShard(1, 2).blocks(other.table.total))
    assert [part[:3] for part in taken] == [part[:3] for part in again]
    assert all(same_state(mine[3], theirs[3]) for mine, theirs in zip(taken, again, strict=True))
    assert not loaded.optimizer.state
    alone = Rank(adamw, 0, 1, 0)
    alone.optimizer.load_state_dict(gathered)
    with alone.state.whole(()):
        saved = alone.optimizer.state_dict()["state"]
    assert all(same_state(saved[index], entries) for index, entries in expected["state"].items())


def test_state_of_steps_before_it_was_sharded_stays() -> None:
    whole, own = params(), params()
    optimizers = [adamw(whole), adamw(own)]
    for of, optimizer in zip((whole, own), optimizers, strict=True):
        set_gradients(of, 0)
        optimizer.step()
    state = ShardedState(optimizers[1], 0, 1, 0)
    for of in (whole, own):
        set_gradients(of, 1)
    optimizers[0].step()
    state.put_slices(optimizers[1])
    optimizers[1].step()
    state.put_back(optimizers[1])
    assert all(torch.equal(mine, other) for mine, other in zip(own, whole, strict=True))


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_part_of_the_state_is_not_given_out_as_all() -> None:
    with pytest.raises(ConfigError, match="a part of that state only"):
        Rank(sgd, 0, 2, 0).optimizer.state_dict()


def test_parameters_that_are_added_later_are_an_error() -> None:
    rank = Rank(sgd, 0, 2, 0)
    rank.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigError, match=r"Add them before px\.distribute"):
        rank.update(0)


def test_memory_with_gaps_is_an_error() -> None:
    param = nn.Parameter(torch.zeros(4, 6).t())
    with pytest.raises(ConfigError, match="not contiguous"):
        ShardedState(torch.optim.SGD([param]), 0, 2, 0)

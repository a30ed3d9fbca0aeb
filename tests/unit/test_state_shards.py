"""Which rank keeps which part of an optimizer's state, and what moves when ranks are lost, leave and join."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.elastic.state_shards import (
    BLOCK,
    WHOLE,
    BlockTable,
    ShardMove,
    StateShard,
    plan_moves,
    runs_of,
    shards_of,
)

RANKS = st.integers(1, 9)
TOTALS = st.integers(0, 200)
MIRRORS = st.integers(0, 1)


def blocks_of(shards: tuple[StateShard, ...], total: int) -> set[int]:
    return {block for shard in shards for block in shard.blocks(total)}


@given(RANKS, TOTALS)
def test_shards_are_equal_and_cover_every_block_once(ranks: int, total: int) -> None:
    parts = [StateShard(index, ranks).blocks(total) for index in range(ranks)]
    assert [block for part in parts for block in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.data(), RANKS, RANKS, TOTALS, MIRRORS)
def test_each_rank_gets_what_it_lacks_once_from_one_that_has_it(
    data: st.DataObject, before: int, after: int, total: int, mirror: int
) -> None:
    """Survivors of one cut and ranks of another one, as after a recovery that some had finished, and joiners."""
    survivors = data.draw(st.lists(st.integers(0, before - 1), unique=True))
    current = [shards_of(rank, before, mirror) for rank in survivors]
    current += [shards_of(0, after, mirror)] * data.draw(st.integers(0, 1)) + [()] * data.draw(st.integers(0, 2))
    needed = [shards_of(rank, len(current), mirror) for rank in range(len(current))]
    plan = plan_moves(current, needed, total)
    has = [blocks_of(shards, total) for shards in current]
    lost = set(range(total)) - set().union(*has) if current else set()
    assert {block for run in plan.missing for block in run} == lost
    for rank, shards in enumerate(needed):
        arriving = [block for move in plan.moves if move.target == rank for block in move.blocks]
        assert sorted(arriving) == sorted(blocks_of(shards, total) - has[rank] - lost)
    for move in plan.moves:
        assert set(move.blocks) <= has[move.source]
        assert move.source != move.target


@given(st.integers(2, 9), st.integers(1, 200), st.data())
def test_with_a_mirror_a_shard_is_lost_only_with_the_rank_before_it(
    ranks: int, total: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    left = [shards_of(rank, ranks, 1) for rank in range(ranks) if rank not in gone]
    plan = plan_moves(left, [shards_of(rank, len(left), 1) for rank in range(len(left))], total)
    lost = [rank for rank in gone if (rank - 1) % ranks in gone and StateShard(rank, ranks).blocks(total)]
    assert bool(plan.missing) == bool(lost)


def test_nothing_moves_between_ranks_that_have_what_they_need() -> None:
    current = [shards_of(rank, 3, 1) for rank in range(3)]
    assert plan_moves(current, current, 90) == plan_moves([], [], 0)


def test_who_has_sent_least_sends() -> None:
    plan = plan_moves([(WHOLE,), (WHOLE,), (), ()], [(WHOLE,), (WHOLE,), (StateShard(0, 2),), (StateShard(1, 2),)], 8)
    assert plan.moves == (ShardMove(0, 2, range(4)), ShardMove(1, 3, range(4, 8)))


def test_shards_that_touch_are_one_run() -> None:
    assert runs_of(shards_of(1, 4, 1), 40) == [range(10, 30)]
    assert runs_of(shards_of(3, 4, 1), 40) == [range(10), range(30, 40)]


@given(st.lists(st.integers(0, 5 * BLOCK), max_size=8), RANKS)
def test_every_element_is_in_one_slice_which_begins_at_a_block(sizes: list[int], ranks: int) -> None:
    table, seen = BlockTable(sizes), [0] * len(sizes)
    for shard in shards_of(0, ranks, ranks - 1):
        for index, start, stop in table.slices(shard.blocks(table.total)):
            assert start == seen[index]
            assert start % BLOCK == 0
            assert start < stop
            seen[index] = stop
    assert seen == sizes

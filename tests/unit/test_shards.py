from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.sampling.shards import EpochPlan, even_split
from phalanx.errors import ConfigError

plans = st.builds(EpochPlan, rows=st.integers(0, 300), global_batch=st.integers(1, 60), drop_last=st.booleans())
worlds = st.integers(1, 9)


def counted_positions(plan: EpochPlan, step: int, world_size: int) -> list[int]:
    batches = [plan.rank_batch(step, rank, world_size) for rank in range(world_size)]
    return [batch.start + i for batch in batches for i in range(batch.rows)]


@given(plan=plans, world_size=worlds)
def test_every_row_is_counted_once_and_in_the_order_of_one_process(plan: EpochPlan, world_size: int) -> None:
    seen = [p for step in range(plan.steps) for p in counted_positions(plan, step, world_size)]
    whole = plan.rows - plan.rows % plan.global_batch if plan.drop_last else plan.rows
    assert seen == list(range(whole))


@given(plan=plans, world_size=worlds)
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(plan: EpochPlan, world_size: int) -> None:
    for step in range(plan.steps):
        assert counted_positions(plan, step, world_size) == counted_positions(plan, step, 1)


@given(plan=plans, world_size=worlds)
def test_every_rank_has_something_to_load_and_shares_add_up(plan: EpochPlan, world_size: int) -> None:
    for step in range(plan.steps):
        batches = [plan.rank_batch(step, rank, world_size) for rank in range(world_size)]
        assert all(batch.count >= 1 and batch.start + batch.count <= plan.rows for batch in batches)
        assert sum(batch.rows for batch in batches) == batches[0].global_rows
        assert max(batch.rows for batch in batches) - min(batch.rows for batch in batches) <= 1


@given(rows=st.integers(1, 300), batch=st.integers(1, 40), other_batch=st.integers(1, 40), data=st.data())
def test_an_epoch_resumed_with_another_batch_size_counts_the_rest_once(
    rows: int, batch: int, other_batch: int, data: st.DataObject
) -> None:
    plan = EpochPlan(rows, batch)
    done = data.draw(st.integers(0, plan.steps))
    position = plan.position_after(done - 1) if done else 0
    rest = EpochPlan(rows, other_batch, first=position)
    seen = [p for step in range(rest.steps) for p in counted_positions(rest, step, 3)]
    assert seen == list(range(position, rows))


def test_cifar_on_eight_ranks_of_32_takes_195_steps() -> None:
    assert EpochPlan(50_000, 8 * 32, drop_last=True).steps == 195


def test_70_samples_in_batches_of_32_without_the_last_are_2_steps() -> None:
    assert EpochPlan(70, 32, drop_last=True).steps == 2
    assert EpochPlan(70, 32).steps == 3


def test_a_batch_of_128_on_three_ranks_stays_128() -> None:
    assert [EpochPlan(1000, 128).rank_batch(0, rank, 3).rows for rank in range(3)] == [43, 43, 42]


def test_a_rank_without_rows_loads_one_that_does_not_count() -> None:
    batch = EpochPlan(9, 4).rank_batch(2, 1, 2)
    assert (batch.start, batch.count, batch.rows, batch.global_rows) == (8, 1, 0, 1)


def test_even_split_gives_the_first_parts_more() -> None:
    assert [even_split(11, 4, index) for index in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 2)]


def test_an_empty_global_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="Asked for a global batch of 0 samples"):
        EpochPlan(10, 0)


def test_a_position_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume at position 11, but the epoch has 10 samples"):
        EpochPlan(10, 2, first=11)

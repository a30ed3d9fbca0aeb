from __future__ import annotations

import copy
import logging
import random
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from phalanx.comm import context
from phalanx.comm.context import BatchShare
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.pipeline.pipeline import Pipeline
from phalanx.errors import ConfigError, DataError


class Numbers(Dataset[int]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Dataset[Any]):
    """Every sample is three fresh random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([2, 0, 1])


class Fixed(Unsized):
    def __len__(self) -> int:
        return 3


class Liar(Unsized):
    def __len__(self) -> int:
        return 4


class Pairs(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4], [5]])

    def __len__(self) -> int:
        return 3


def rows_of(loader: ShardedLoader) -> list[int]:
    """What one pass hands out and counts."""
    seen: list[int] = []
    for batch in loader:
        assert loader.share is not None
        seen += batch.tolist()[: loader.share.rows]
    return seen


def global_batches(count: int, data: Any, **options: Any) -> list[list[int]]:
    """The batches of `count` ranks, laid side by side step by step."""
    loaders = [ShardedLoader(data, shard=(index, count), **options) for index in range(count)]
    steps = []
    for batches in zip(*loaders, strict=True):
        shares = [loader.share for loader in loaders]
        assert all(share is not None for share in shares)
        steps.append([x for b, s in zip(batches, shares, strict=True) for x in b.tolist()[: s.rows]])
        assert {s.global_rows for s in shares} == {len(steps[-1])}
    return steps


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"drop_last": True, "seed": 4}])
def test_any_number_of_ranks_trains_on_the_batches_of_one(count: int, options: dict[str, Any]) -> None:
    alone = global_batches(1, Numbers(50), global_batch=8, **options)
    assert global_batches(count, Numbers(50), global_batch=8, **options) == alone


def test_a_batch_size_is_per_rank() -> None:
    loader = ShardedLoader(Numbers(1000), batch_size=32, shard=(1, 4))
    assert (loader.global_batch, loader.per_rank_batch, loader.steps_per_epoch) == (128, 32, 8)


def test_a_global_batch_that_does_not_divide_stays_whole() -> None:
    loader = ShardedLoader(Numbers(1000), global_batch=128, shard=(2, 3))
    next(iter(loader))
    assert loader.share == BatchShare(rows=42, global_rows=128)
    assert (loader.global_batch, loader.per_rank_batch, len(loader)) == (128, 43, 8)


def test_each_pass_is_a_new_order_without_set_epoch() -> None:
    loader = ShardedLoader(Numbers(40), batch_size=8)
    first, second = rows_of(loader), rows_of(loader)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_set_epoch_brings_an_order_back() -> None:
    loader = ShardedLoader(Numbers(40), batch_size=8)
    first = rows_of(loader)
    loader.set_epoch(0)
    assert rows_of(loader) == first
    assert loader.epoch == 1


def test_another_seed_is_another_order() -> None:
    loaders = [ShardedLoader(Numbers(40), batch_size=8, seed=seed) for seed in (0, 1)]
    assert rows_of(loaders[0]) != rows_of(loaders[1])


def test_tensors_come_out_as_torch_would_collate_them() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    ours = list(ShardedLoader((x, y), batch_size=4, shuffle=False))
    theirs = list(DataLoader(TensorDataset(x, y), batch_size=4))
    assert [[type(b), *(t.tolist() for t in b)] for b in ours] == [[type(b), *(t.tolist() for t in b)] for b in theirs]


def test_arrays_are_taken_as_tensors() -> None:
    batch = next(iter(ShardedLoader((np.arange(4), np.ones(4)), batch_size=2, shuffle=False)))
    assert batch[0].tolist() == [0, 1]


def test_a_torch_loader_keeps_its_settings() -> None:
    torch_loader = DataLoader(Numbers(10), batch_size=4, shuffle=True, drop_last=True, collate_fn=tuple)
    loader = ShardedLoader(torch_loader, shard=(0, 2))
    assert (loader.global_batch, len(loader), loader.dataset) == (8, 1, torch_loader.dataset)
    batch = next(iter(loader))
    assert isinstance(batch, tuple)
    assert batch != (0, 1, 2, 3)


def test_a_torch_loader_without_shuffle_is_not_shuffled() -> None:
    assert rows_of(ShardedLoader(DataLoader(Numbers(10), batch_size=4))) == list(range(10))


def test_a_distributed_sampler_is_replaced_by_ours() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(11), 2, 1, shuffle=False)
    assert rows_of(ShardedLoader(DataLoader(Numbers(11), batch_size=4, sampler=sampler))) == list(range(11))


def test_a_distributed_sampler_keeps_its_seed() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(11), 2, 1, seed=7)
    assert ShardedLoader(DataLoader(Numbers(11), batch_size=4, sampler=sampler)).seed == 7


@pytest.mark.parametrize(
    "sampler",
    [
        Fixed(),
        SubsetRandomSampler(range(3, 9)),
        WeightedRandomSampler([1.0, 0.0, 1.0], 9),
        RandomSampler(Numbers(10), replacement=True, generator=torch.Generator()),
    ],
)
def test_a_sampler_of_the_users_decides_which_rows_are_shared_out(sampler: Sampler[int]) -> None:
    def batches(count: int) -> list[list[int]]:
        torch_loader = DataLoader(Numbers(10), batch_size=1, sampler=sampler)
        return global_batches(count, torch_loader, global_batch=2)

    alone = batches(1)
    assert batches(2) == alone
    assert sum(map(len, alone)) == len(sampler)  # type: ignore[arg-type]


def test_batches_a_batch_sampler_cut_go_to_the_ranks_in_turn() -> None:
    torch_loader = DataLoader(Numbers(6), batch_sampler=Pairs())
    assert global_batches(2, torch_loader) == [[0, 1, 2, 3, 4], [5]]
    assert ShardedLoader(torch_loader, shard=(0, 2)).global_batch == 2


def test_a_generator_function_is_read_anew_each_epoch() -> None:
    def reader() -> Iterator[int]:
        yield from range(70)

    loader = ShardedLoader(reader, batch_size=32, drop_last=True)
    assert [len(list(loader)) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_split_into_the_batches_of_one_process(count: int, drop_last: bool) -> None:
    alone = global_batches(1, Stream(), global_batch=5, drop_last=drop_last)
    assert alone == ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] + ([] if drop_last else [[10]]))
    assert global_batches(count, Stream(), global_batch=5, drop_last=drop_last) == alone


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError, match="A stream has no length"):
        len(ShardedLoader(Stream(), batch_size=2))


def test_an_empty_stream_ends_at_once() -> None:
    assert list(ShardedLoader(lambda: [], batch_size=2)) == []


def test_a_run_resumes_in_the_middle_at_another_number_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    before = ShardedLoader(Numbers(50), global_batch=8, shard=(0, 2))
    whole = ShardedLoader(Numbers(50), global_batch=8)
    rows_of(before)
    expected = [rows_of(whole), rows_of(whole), rows_of(whole)]
    passing = iter(before)
    for _ in range(3):
        next(passing)
    state = before.state_dict()
    assert state == {"version": 1, "epoch": 1, "position": 24, "seed": 0, "global_batch": 8, "rows": 50}
    after = ShardedLoader(Numbers(50), global_batch=10)
    with caplog.at_level(logging.WARNING, "phalanx"):
        after.load_state_dict(state)
    assert "resumes at sample 24 in global batches of 10, and was started in global batches of 8" in caplog.text
    assert rows_of(after) == expected[1][24:]
    assert rows_of(after) == expected[2]


def test_a_state_taken_between_epochs_starts_the_next() -> None:
    loader = ShardedLoader(Numbers(10), batch_size=4)
    rows_of(loader)
    state = {"version": 1, "epoch": 1, "position": 0, "seed": 0, "global_batch": 4, "rows": 10}
    assert loader.state_dict() == state
    ShardedLoader(Numbers(20), batch_size=4).load_state_dict(state)  # more data, from the next epoch on


def test_an_epoch_does_not_go_on_with_other_data() -> None:
    loader = ShardedLoader(Numbers(10), batch_size=4)
    next(iter(loader))
    for other, has in ((Numbers(20), "20"), (Stream(), "no length")):
        with pytest.raises(ConfigError, match=f"inside an epoch of 10 samples, and this data has {has}"):
            ShardedLoader(other, batch_size=4).load_state_dict(loader.state_dict())


def test_a_stream_resumes_by_reading_up_to_the_position() -> None:
    loader = ShardedLoader(Stream(), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    other = ShardedLoader(Stream(), batch_size=4)
    other.load_state_dict(state)
    assert rows_of(other) == list(range(2, 11))


def test_random_data_depends_on_epoch_and_rank_and_leaves_the_training_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    loaders = [ShardedLoader(Draws(), batch_size=4, shard=(index, 2)) for index in (0, 1)]
    first = [torch.cat(list(loader)) for loader in loaders]
    second = torch.cat(list(loaders[0]))
    everything = torch.cat([*first, second])
    assert len(torch.unique(everything)) == everything.numel()
    assert torch.equal(torch.get_rng_state(), state)
    again = ShardedLoader(Draws(), batch_size=4, shard=(0, 2))
    assert torch.equal(torch.cat(list(again)), first[0])


def test_a_training_loader_tells_the_context_what_its_batch_holds() -> None:
    here = context.init()
    shares = [here.batch for _ in ShardedLoader(Numbers(5), batch_size=4)]
    assert shares == [BatchShare(4, 4), BatchShare(1, 1)]
    assert here.batch is None


def test_an_evaluation_in_between_leaves_the_training_batch_as_it_was() -> None:
    here = context.init()
    training = iter(ShardedLoader(Numbers(5), batch_size=4))
    next(training)
    for _ in ShardedLoader(Numbers(3), batch_size=3, training=False):
        assert here.batch == BatchShare(3, 3)
    assert here.batch == BatchShare(4, 4)


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("disk gone")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_cannot_be_read_is_named(num_workers: int) -> None:
    for data in (Broken(9), Pipeline(Broken(9))):
        with pytest.raises(OSError, match="disk gone") as caught:
            list(ShardedLoader(data, batch_size=2, num_workers=num_workers))
        assert "while reading sample 5 of Broken" in "".join(traceback.format_exception(caught.value))
        # They have the loader's iterator: collected together with its queues, it would wait for workers in vain.
        traceback.clear_frames(caught.tb)


def test_an_evaluation_loader_keeps_the_rows_in_order() -> None:
    assert rows_of(ShardedLoader(Numbers(9), batch_size=2, training=False)) == list(range(9))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (5, {}, "Asked to load from a int. Give a torch Dataset or DataLoader"),
        ({"x": 1}, {}, "an iterator of samples, or Pipeline(tuple"),
        ([torch.ones(4, 2), torch.ones(4)], {}, "a list of 2 tensors of 4 samples and different shapes"),
        ((torch.ones(0),), {"batch_size": None, "global_batch": 2}, "0 samples, which is not one batch. Give more"),
        ((i for i in range(3)), {}, "a generator, which can be read only once. Give the function that makes it"),
        ((torch.ones(2), "label"), {}, "a tuple that holds str"),
        ((torch.ones(2), torch.ones(3)), {}, "tensors with 2, 3 samples"),
        (Numbers(0), {}, "Numbers is empty: it has 0 samples"),
        (Numbers(3), {"batch_size": None}, "No batch size was given"),
        (Numbers(3), {"global_batch": 4}, "batch_size=2 per rank and global_batch=4. Give one"),
        (Numbers(3), {"batch_size": 0}, "Asked for batch_size=0. Give at least 1"),
        (Numbers(3), {"batch_size": 2.5}, "Asked for batch_size=2.5, found a value of type float. Give a whole number"),
        (Numbers(3), {"batch_size": True}, "Asked for batch_size=True, found a value of type bool"),
        (Numbers(3), {"batch_size": None, "global_batch": "64"}, "global_batch='64', found a value of type str"),
        (Numbers(3), {"batch_size": None, "global_batch": 4}, "global_batch=4, but Numbers has 3 samples"),
        (Numbers(3), {"shuffel": True}, "no argument 'shuffel'. Did you mean 'shuffle'"),
        (Numbers(3), {"shard": (2, 2)}, "Asked for shard 2 of 2"),
        (Stream(), {"shuffle": True}, "Asked to shuffle a stream"),
        (Stream(), {"stream": "mine"}, "Asked for stream='mine'. Give 'shared' or 'own'"),
        (DataLoader(Numbers(3), batch_size=None), {}, "The DataLoader has batch_size=None"),
        (DataLoader(Numbers(3), sampler=Unsized()), {}, "Unsized has no length"),
        (DataLoader(Numbers(3), sampler=Fixed()), {"shuffle": True}, "the DataLoader's Fixed decides the order"),
        (DataLoader(Numbers(6), batch_sampler=Pairs()), {}, "Pairs makes the batches, and a batch size was given"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused_at_once(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(".", r"\.")):
        ShardedLoader(data, **{"batch_size": 2, **options})


def test_a_batch_size_may_be_any_whole_number() -> None:
    assert len(ShardedLoader(Numbers(9), global_batch=np.int64(3))) == 3


def test_dropping_the_only_batch_is_refused() -> None:
    loader = ShardedLoader(Numbers(9), batch_size=5, drop_last=True, shard=(0, 2))
    with pytest.raises(ConfigError, match="9 samples are not one global batch of 10: no batch is left"):
        list(loader)


def test_a_sampler_that_shards_already_is_refused() -> None:
    sampler = Fixed()
    sampler.num_replicas = 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Fixed already shards its samples over ranks"):
        ShardedLoader(DataLoader(Numbers(3), sampler=sampler))


def test_a_sampler_with_a_wrong_length_is_refused() -> None:
    loader = ShardedLoader(DataLoader(Numbers(3), sampler=Liar()))
    with pytest.raises(ConfigError, match="Liar says its length is 4 but listed 3 entries"):
        list(loader)


def test_a_state_of_another_seed_is_refused() -> None:
    state = ShardedLoader(Numbers(3), batch_size=1, seed=1).state_dict()
    with pytest.raises(ConfigError, match="saved with seed 1, this loader has seed 0"):
        ShardedLoader(Numbers(3), batch_size=1, seed=0).load_state_dict(state)


def _loader_seeded(how: str, seed: int) -> ShardedLoader:
    generator = torch.Generator().manual_seed(seed)
    rows = Numbers(40)
    weighted = WeightedRandomSampler([1.0] * 40, 40, generator=generator)
    loaders: dict[str, Any] = {
        "torch.manual_seed": rows,
        "DataLoader": DataLoader(rows, batch_size=8, shuffle=True, generator=generator),
        "RandomSampler": DataLoader(rows, batch_size=8, sampler=RandomSampler(rows, generator=generator)),
        "drawn again": DataLoader(rows, batch_size=8, sampler=RandomSampler(rows, True, 40, generator=generator)),
        "SubsetRandomSampler": DataLoader(rows, batch_size=8, sampler=SubsetRandomSampler(range(40), generator)),
        "WeightedRandomSampler": DataLoader(rows, batch_size=8, sampler=weighted),
        "of no generator": DataLoader(rows, batch_size=8, sampler=WeightedRandomSampler([1.0] * 40, 40)),
        "BatchSampler": DataLoader(rows, batch_sampler=BatchSampler(weighted, 8, False)),
    }
    return ShardedLoader(loaders[how], batch_size=8 if how == "torch.manual_seed" else None)


@pytest.mark.parametrize(
    "how",
    [
        "torch.manual_seed", "DataLoader", "RandomSampler", "drawn again", "SubsetRandomSampler",
        "WeightedRandomSampler", "of no generator", "BatchSampler",
    ],
)  # fmt: skip
def test_the_seed_the_user_gave_decides_the_order(how: str) -> None:
    orders = []
    for seed in (1, 2, 1):
        if how in ("torch.manual_seed", "of no generator"):
            torch.manual_seed(seed)
        loader = _loader_seeded(how, seed)
        orders.append([rows_of(loader), rows_of(loader)])
    assert orders[0] == orders[2]
    assert orders[0][0] != orders[1][0]
    assert orders[0][0] != orders[0][1]


def test_a_generator_of_the_users_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    sampler = WeightedRandomSampler([1.0] * 9, 9, generator=generator)
    for loader in (
        DataLoader(Numbers(9), batch_size=3, sampler=sampler),
        DataLoader(Numbers(9), batch_size=3, shuffle=True, generator=generator),
    ):
        rows_of(ShardedLoader(loader))
    assert torch.equal(generator.get_state(), state)
    assert generator.initial_seed() == 5


def test_a_seed_that_the_loader_was_given_wins_over_those_of_generators() -> None:
    torch_loader = DataLoader(Numbers(9), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5))
    assert ShardedLoader(torch_loader, seed=7).seed == 7


def test_data_that_is_not_trained_on_is_read_alike_whatever_the_seed() -> None:
    torch.manual_seed(4)
    assert ShardedLoader(Numbers(9), batch_size=3, training=False).seed == 0


def test_a_run_seeded_otherwise_goes_on_in_the_saved_order(caplog: pytest.LogCaptureFixture) -> None:
    def loader(seed: int) -> ShardedLoader:
        torch.manual_seed(seed)
        return ShardedLoader(Numbers(20), batch_size=4)

    before = loader(1)
    passing = iter(before)
    first = next(passing).tolist()
    state = before.state_dict()
    after = loader(2)
    after.load_state_dict(state)
    assert first + rows_of(after) == rows_of(loader(1))
    generator = torch.Generator().manual_seed(3)
    of_generator = ShardedLoader(DataLoader(Numbers(20), batch_size=4, shuffle=True, generator=generator))
    with caplog.at_level(logging.WARNING, "phalanx"):
        of_generator.load_state_dict(state)
    assert first + rows_of(of_generator) == rows_of(loader(1))
    assert "continues in the order of seed 1, with which it was saved, and not in that of the generator's seed 3" in (
        caplog.text
    )


class Growing(Sampler[int]):
    def __init__(self) -> None:
        self.rows = 6

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows))


def test_a_sampler_or_a_dataset_may_have_another_length_in_each_epoch() -> None:
    growing, rows = Growing(), Numbers(6)
    loaders = [
        ShardedLoader(DataLoader(Numbers(20), batch_size=4, sampler=growing)),
        ShardedLoader(DataLoader(Numbers(20), batch_sampler=BatchSampler(growing, 4, False))),
        ShardedLoader(rows, batch_size=4),
        ShardedLoader(Pipeline(rows, columns="row").batch(4)),
    ]
    for now in (6, 12, 3):
        growing.rows = rows.rows = now
        for loader in loaders:
            assert len(loader) == -(-now // 4)
            seen = [row for batch in loader for row in (batch[0] if isinstance(batch, list) else batch).tolist()]
            assert sorted(seen) == list(range(now))


def test_a_batch_sampler_of_torch_is_cut_by_rows() -> None:
    torch_loader = DataLoader(Numbers(20), batch_sampler=BatchSampler(range(10), 4, drop_last=True))  # type: ignore[arg-type]
    assert global_batches(2, torch_loader) == [list(range(8))]
    assert (ShardedLoader(torch_loader).global_batch, len(ShardedLoader(torch_loader))) == (4, 2)


def test_who_changes_a_batch_does_not_change_the_data() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), np.arange(6)
    for data in ((x, y), DataLoader(TensorDataset(x, torch.from_numpy(y)), batch_size=4), Pipeline((x, y)).batch(4)):
        size = 4 if isinstance(data, tuple) else None
        batches = list(ShardedLoader(data, batch_size=size, shuffle=False))
        assert len({part.untyped_storage().data_ptr() for batch in batches for part in batch}) == 4
        for batch in batches:
            batch[0].zero_()
            batch[1].zero_()
    assert x.tolist() == torch.arange(12.0).reshape(6, 2).tolist()
    assert y.tolist() == list(range(6))


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 1 with epoch, position and seed is known"):
        ShardedLoader(Numbers(3), batch_size=1).load_state_dict({"epoch": 1})


def test_a_stream_that_splits_itself_resumes_only_between_epochs() -> None:
    loader = ShardedLoader(Stream(), batch_size=2, stream="own")
    with pytest.raises(ConfigError, match="cannot be resumed inside an epoch"):
        loader.load_state_dict({"version": 1, "epoch": 0, "position": 4, "seed": 0})


def test_disagreeing_streams_are_found_on_every_rank() -> None:
    from phalanx.data.stream.stream_batches import check_answers, check_beginnings

    with pytest.raises(DataError, match=r"different streams: at batch 3 they found \[4, 2\] samples"):
        check_answers([[2, 4, 1, 0], [1, 2, 1, 0]], 3, is_shared=True)
    with pytest.raises(DataError, match="the stream of rank 1 is empty"):
        check_answers([[2, 2, 1, 9], [0, 0, 0, 0]], 0, is_shared=False)
    with pytest.raises(DataError, match="ranks 0 and 2 began with the same batch"):
        check_beginnings([[2, 2, 1, 9], [2, 2, 1, 8], [2, 2, 1, 9]], 0, {})
    begun: dict[int, tuple[int, int]] = {}
    check_beginnings([[2, 2, 1, 9], [2, 2, 1, 8]], 0, begun)
    with pytest.raises(DataError, match="workers 0 and 1 of rank 1 began with the same batch"):
        check_beginnings([[2, 2, 1, 7], [2, 2, 1, 8]], 1, begun)


def test_loops_of_older_scripts_are_told_what_to_write() -> None:
    loader = ShardedLoader(Numbers(3), batch_size=1)
    for word, instead in (
        ("start", "for x, y in loader"),
        ("reset", "for x, y in loader"),
        ("set_sample_generator", "px.data.GeneratorDataset"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{word}'.*Write instead: {instead}"):
            getattr(loader, word)
    assert not hasattr(loader, "step_per_epoch")
    assert copy.copy(loader).seed == loader.seed

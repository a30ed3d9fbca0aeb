"""Pipelines: what map, shuffle, batch and repeat do, in any order, on any number of ranks, with data of either kind."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from phalanx.comm import context
from phalanx.data import GeneratorDataset, Pipeline, QueueDataset, ShardedLoader, vision
from phalanx.data.pipeline.pipeline import PipelineMethods
from phalanx.data.sampling.windows import shuffle_stream_windows, shuffle_windows
from phalanx.errors import ConfigError, DataError


def numbers(rows: int) -> Pipeline:
    return Pipeline((torch.arange(rows), torch.arange(rows) * 10), columns=("x", "y"))


def streamed(rows: int) -> GeneratorDataset:
    return GeneratorDataset(lambda: ((i, i * 10) for i in range(rows)), ("x", "y"), capacity=0)


def said(pipeline: Pipeline, verbs: list[tuple[str, int]]) -> Pipeline:
    for verb, value in verbs:
        pipeline = pipeline.map(lambda x: x + 1000, "x") if verb == "map" else getattr(pipeline, verb)(value)
    return pipeline


def rows_of(loader: ShardedLoader, column: int = 0) -> list[int]:
    seen: list[int] = []
    for batch in loader:
        assert loader.share is not None
        seen += batch[column].tolist()[: loader.share.rows]
    return seen


def side_by_side(pipeline: Pipeline, count: int, **options: Any) -> list[list[int]]:
    """The batches of `count` ranks, laid side by side step by step."""
    loaders = [ShardedLoader(pipeline, shard=(index, count), **options) for index in range(count)]
    steps = []
    for batches in zip(*loaders, strict=True):
        shares = [loader.share for loader in loaders]
        steps.append([x for b, s in zip(batches, shares, strict=True) for x in b[0].tolist()[: s.rows]])  # type: ignore[union-attr]
    return steps


# -- windows ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
def test_a_window_holds_every_element_and_lets_none_leave_early(n: int, buffer: int, seed: int) -> None:
    order = shuffle_windows(n, buffer, seed, np.arange(n))
    assert sorted(order) == list(range(n))
    assert max(order - np.arange(n)) <= buffer - 1
    assert list(shuffle_stream_windows(range(n), buffer, seed)) == order.tolist()
    some = np.random.default_rng(seed).integers(0, n, 7)
    assert shuffle_windows(n, buffer, seed, some).tolist() == order[some].tolist()


def test_windows_begin_elsewhere_in_every_pass() -> None:
    # An element that stays with the same nine others for ever would hardly be shuffled.
    last_of_first = {int(shuffle_windows(100, 10, seed, np.arange(100))[:10].max()) for seed in range(20)}
    assert len(last_of_first) > 5


def test_a_stream_is_read_no_further_ahead_than_its_window() -> None:
    read = []
    items = shuffle_stream_windows((read.append(i) or i for i in range(1000)), 10, 0)
    for taken in range(1, 100):
        next(items)
        assert len(read) <= taken + 10


# -- chains ----------------------------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("map"), st.just(0)),
    st.tuples(st.just("shuffle"), st.integers(1, 30)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
)


@settings(max_examples=40)
@given(st.integers(1, 25), st.lists(STEPS, max_size=3), st.integers(1, 9), st.lists(STEPS, max_size=3))
def test_any_chain_hands_out_every_row_once_a_pass(
    rows: int, before: list[tuple[str, int]], size: int, after: list[tuple[str, int]]
) -> None:
    verbs = [*before, ("batch", size), *after]
    pipeline = said(numbers(rows), verbs)
    joined = int(np.prod([value for verb, value in before if verb == "repeat"]))
    spans = int(np.prod([value for verb, value in after if verb == "repeat"]))
    loader = ShardedLoader(pipeline, training=False)
    sizes = [len(batch[0]) for batch in loader]
    # Each span is cut on its own; a span is the passes joined before the batches.
    per_span = [size] * (rows * joined // size) + [rows * joined % size] * (rows * joined % size > 0)
    assert sizes == per_span * spans
    assert len(loader) == len(sizes)
    assert pipeline.get_dataset_size() == -(-rows // size)
    loader.set_epoch(0)
    seen = rows_of(loader, 1)
    # Batches may hold the end of one pass and the start of the next; shuffled, they are whole spans only.
    passes = joined if any(verb == "shuffle" for verb, _ in after) else 1
    for start in range(0, len(seen), rows * passes):
        assert Counter(seen[start : start + rows * passes]) == dict.fromkeys((10 * i for i in range(rows)), passes)
    shift = 1000 * sum(verb == "map" for verb, _ in verbs)
    loader.set_epoch(0)
    assert rows_of(loader) == [y // 10 + shift for y in seen]
    # A stream gives the same, and so do several ranks side by side.
    assert rows_of(ShardedLoader(said(streamed(rows).pipeline(), verbs), training=False), 1) == seen
    together = side_by_side(pipeline, 3, training=False, global_batch=min(size, rows))
    if size <= rows:
        assert [x for step in together for x in step] == [y // 10 + shift for y in seen]


@settings(max_examples=60)
@given(
    st.integers(2, 25), st.lists(STEPS, max_size=2), st.integers(1, 6), st.lists(STEPS, max_size=2), st.data()
)  # fmt: skip
def test_an_epoch_goes_on_at_another_number_of_ranks_with_the_rows_that_are_left(
    rows: int, before: list[tuple[str, int]], size: int, after: list[tuple[str, int]], data: st.DataObject
) -> None:
    verbs = [*before, ("batch", size), *after]
    stream = data.draw(st.booleans())
    pipeline = said(streamed(rows).pipeline() if stream else numbers(rows), verbs)
    pair = [ShardedLoader(pipeline, shard=(index, 2)) for index in range(2)]
    steps = data.draw(st.integers(0, len(ShardedLoader(said(numbers(rows), verbs), shard=(0, 2)))))
    done: list[int] = []
    for _, *batches in zip(range(steps), *pair, strict=False):
        for loader, batch in zip(pair, batches, strict=True):
            assert loader.share is not None
            done += batch[1].tolist()[: loader.share.rows]
    state = pair[0].state_dict()
    three = [ShardedLoader(pipeline, shard=(index, 3)) for index in range(3)]
    for loader in three:
        loader.load_state_dict(state)
        done += rows_of(loader, 1)
    passes = int(np.prod([value for verb, value in verbs if verb == "repeat"]))
    assert Counter(done) == dict.fromkeys((10 * i for i in range(rows)), passes)


def test_the_seeds_chain_has_the_counts_it_says() -> None:
    # 50,000 rows on 8 ranks in batches of 32: 195 a pass, whatever repeat says.
    pipeline = (
        Pipeline(TensorRows(50_000), num_shards=8, shard_id=3)
        .map(lambda label: label, "label")
        .shuffle(buffer_size=10)
        .batch(batch_size=32, drop_remainder=True)
        .repeat(2)
    )
    assert pipeline.get_dataset_size() == 195
    loader = ShardedLoader(pipeline)
    assert (len(loader), loader.global_batch, len(next(iter(loader))[0])) == (390, 256, 32)
    assert pipeline.num_classes == 7


class TensorRows(Dataset[Any]):
    """A reader of many rows at once."""

    column_names = ("image", "label")
    num_classes = 7

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read_columns reads many rows at once")

    def read_columns(self, rows: Any) -> dict[str, Tensor]:
        return {"image": torch.zeros(len(rows), 4, 4, 3, dtype=torch.uint8), "label": torch.as_tensor(rows)}


def test_shards_are_disjoint_and_complete() -> None:
    shards = [
        rows_of(ShardedLoader(Pipeline(TensorRows(103), num_shards=4, shard_id=i).shuffle(10).batch(5)), 1)
        for i in range(4)
    ]
    assert sorted(chain.from_iterable(shards)) == list(range(103))


class Reader(PipelineMethods, TensorRows):
    """A reader that is told its shard, and may be loaded as it is."""

    def __init__(self, rows: int, shard: tuple[int, int]) -> None:
        super().__init__(rows)
        self.shard = shard

    def __getitem__(self, index: int) -> Any:
        return index


def test_a_reader_keeps_its_shard_in_and_out_of_a_pipeline() -> None:
    reader = Reader(12, (1, 3))
    assert [batch.tolist() for batch in ShardedLoader(reader, batch_size=2, shuffle=False)] == [[2, 3], [8, 9]]
    assert [batch.tolist() for batch in ShardedLoader(DataLoader(reader, batch_size=2))] == [[2, 3], [8, 9]]
    assert rows_of(ShardedLoader(reader.batch(2), shuffle=False), 1) == [2, 3, 8, 9]


def test_a_pipeline_says_who_iterates_it() -> None:
    with pytest.raises(TypeError, match=r"Iterate over ShardedLoader\(dataset\)"):
        next(iter(numbers(3).batch(2)))


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("create_dict_iterator", r"ShardedLoader\(dataset\.as_dicts\(\)\)"),
        ("create_tuple_iterator", r"ShardedLoader\(dataset\)"),
        ("device_que", "nothing: px.data.ShardedLoader"),
        ("get_col_names", r"dataset\.columns"),
        ("take", r"Subset\(data, range\(n\)\)"),
        ("skip", r"Subset\(data, range\(n, len"),
    ],
)
def test_verbs_of_older_frameworks_say_what_to_write(word: str, instead: str) -> None:
    for dataset in (numbers(3), numbers(3).batch(2), Reader(3, (0, 1))):
        with pytest.raises(AttributeError, match=f"'{word}' belongs to an older framework. Write instead: .*{instead}"):
            getattr(dataset, word)


def test_arguments_of_older_frameworks_say_what_to_write() -> None:
    told = r"has no argument 'num_parallel_workers'\. .* Write instead: num_workers=4 in px\.data\.ShardedLoader"
    for verb, asked in (("map", {"operations": abs}), ("batch", {"batch_size": 2}), ("shuffle", {"buffer_size": 2})):
        with pytest.raises(ConfigError, match=f"{verb} {told}"):
            getattr(numbers(3), verb)(**asked, num_parallel_workers=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        numbers(3).batch(batchsize=4)  # type: ignore[call-arg]
    first = Pipeline(Subset(TensorDataset(torch.arange(9)), range(3)), ["number"])
    assert rows_of(ShardedLoader(first.batch(2), shuffle=False)) == [0, 1, 2]


def test_every_pass_is_another_order_and_repeats_are_passes() -> None:
    loader = ShardedLoader(numbers(40).shuffle(40).batch(8))
    passes = [rows_of(loader) for _ in range(3)]
    assert all(sorted(one) == list(range(40)) for one in passes)
    assert all(a != b for a, b in pairwise(passes))
    assert rows_of(ShardedLoader(numbers(40).shuffle(40).batch(8).repeat(3))) == list(chain.from_iterable(passes))
    assert rows_of(ShardedLoader(numbers(40).repeat(3).shuffle(40).batch(8))) == list(chain.from_iterable(passes))
    assert rows_of(ShardedLoader(numbers(40).shuffle(40).batch(8).repeat(3).one_pass())) == passes[0]


def test_a_run_and_a_shuffle_have_a_seed() -> None:
    def order(run: int, own: int) -> list[int]:
        return rows_of(ShardedLoader(numbers(40).shuffle(40, seed=own).batch(8), seed=run))

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(*seeds)) for seeds in ((0, 0), (0, 1), (1, 0))}) == 3


def test_maps_do_not_change_the_order() -> None:
    plain = rows_of(ShardedLoader(numbers(40).shuffle(7).batch(8)))
    assert rows_of(ShardedLoader(numbers(40).map(int, "y").shuffle(7).map(int, "x").batch(8))) == plain


def test_training_shuffles_a_pipeline_that_does_not_say_and_shuffle_false_puts_any_in_order() -> None:
    assert rows_of(ShardedLoader(numbers(40).batch(8))) != list(range(40))
    assert rows_of(ShardedLoader(numbers(40).batch(8), training=False)) == list(range(40))
    assert rows_of(ShardedLoader(numbers(40).shuffle(40).batch(8).shuffle(3), shuffle=False)) == list(range(40))


def test_shuffled_batches_stay_whole() -> None:
    steps = [batch[0].tolist() for batch in ShardedLoader(numbers(22).batch(5).shuffle(3))]
    assert sorted(steps) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21]]
    assert steps[-1] == [20, 21]


def test_a_loader_may_cut_other_batches_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        loader = ShardedLoader(numbers(40).batch(8, drop_remainder=True), global_batch=12, drop_last=False)
        ShardedLoader(numbers(40).batch(8), batch_size=8)
        ShardedLoader(numbers(40), batch_size=8)
    assert [record.getMessage() for record in caplog.records] == [
        "batches have global_batch=12, as passed to the loader, not the pipeline's batch(batch_size=8)"
    ]
    assert [len(batch[0]) for batch in loader] == [12, 12, 12, 4]


def test_a_map_that_gives_nothing_is_named() -> None:
    with pytest.raises(DataError, match="column 'x' of a batch holds values of type NoneType, which make no"):
        next(iter(ShardedLoader(numbers(8).map(lambda number: None, "x").batch(4))))


def test_a_global_batch_is_the_same_on_any_number_of_ranks() -> None:
    pipeline = numbers(50).shuffle(9).batch(global_batch=8).shuffle(3)
    assert side_by_side(pipeline, 3) == side_by_side(pipeline, 1)


# -- maps ------------------------------------------------------------------------------------------------------


class Flip(vision.Transform):
    """Draws a number for each row."""

    def batched(self, samples: Tensor, draws: Any) -> Tensor:
        return torch.stack([samples.double(), draws.uniform()], dim=1)


def three_draws(x: Any) -> Tensor:
    return torch.tensor([float(x), random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def draws_by_row(pipeline: Pipeline, count: int, epochs: int = 1, **options: Any) -> dict[tuple[int, int], Any]:
    found = {}
    for index in range(count):
        loader = ShardedLoader(pipeline, shard=(index, count), **options)
        for epoch in range(epochs):
            for (drawn,) in loader:
                assert loader.share is not None
                found.update({(epoch, int(one[0])): one.tolist() for one in drawn[: loader.share.rows]})
    return found


@pytest.mark.parametrize("operation", [three_draws, Flip()])
def test_what_a_row_draws_depends_on_the_run_the_pass_and_the_row_alone(operation: Callable[[Any], Any]) -> None:
    pipeline = Pipeline((torch.arange(23),)).map(operation)
    alone = draws_by_row(pipeline.shuffle(23).batch(23), 1, epochs=2)
    assert draws_by_row(pipeline.batch(4), 3, epochs=2) == alone
    assert draws_by_row(pipeline.batch(5), 1, epochs=2, num_workers=2) == alone
    stream = GeneratorDataset(lambda: range(23), "x").map(operation).shuffle(5).batch(3)
    assert draws_by_row(stream, 2, epochs=2) == alone
    draws = [number for row in alone.values() for number in row[1:]]
    assert len(set(draws)) == len(draws)
    assert draws_by_row(pipeline.batch(4), 1, seed=1) != draws_by_row(pipeline.batch(4), 1)


def test_the_training_keeps_its_own_random_numbers() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    list(ShardedLoader(numbers(9).map(three_draws, "x").batch(4)))
    assert torch.equal(torch.get_rng_state(), state)


def test_two_maps_draw_different_numbers() -> None:
    pipeline = numbers(9).map(Flip(), "x").map(Flip(), "y").batch(9)
    x, y = next(iter(ShardedLoader(pipeline)))
    assert not torch.equal(x[:, 1], y[:, 1])


def test_transforms_work_on_all_rows_at_once() -> None:
    calls = []

    class Counted(vision.Transform):
        def batched(self, samples: Tensor, draws: Any) -> Tensor:
            calls.append(len(samples))
            return samples

    list(ShardedLoader(numbers(9).map([Counted(), Counted()], "x").batch(5)))
    assert calls == [5, 5, 4, 4]


def test_after_batch_a_map_takes_the_batch() -> None:
    pipeline = numbers(6).batch(4).map(lambda x: x - x.float().mean(), "x")
    batches = [batch[0].tolist() for batch in ShardedLoader(pipeline, training=False)]
    assert batches == [[-1.5, -0.5, 0.5, 1.5], [-0.5, 0.5]]


def test_maps_join_split_and_name_columns() -> None:
    pipeline = numbers(4).map(lambda x, y: x + y, ["x", "y"], output_columns="sum").batch(2)
    assert pipeline.columns == ("sum",)
    assert rows_of(ShardedLoader(pipeline, training=False)) == [0, 11, 22, 33]
    pipeline = numbers(4).map(lambda x: (x, -x), "x", output_columns=["plus", "minus"]).batch(2).as_dicts()
    assert pipeline.columns == ("plus", "minus", "y")
    assert [list(b) for b in ShardedLoader(pipeline)] == [["plus", "minus", "y"]] * 2
    both = numbers(4).batch(2).map(lambda x, y: (y, x), ["x", "y"])
    assert [b[0].tolist() for b in ShardedLoader(both, training=False)] == [[0, 10], [20, 30]]


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        ((torch.arange(3), torch.arange(3)), ("column0", "column1")),
        ([{"image": i, "label": 2 * i} for i in range(3)], ("image", "label")),
        ([(i, 2 * i) for i in range(3)], ("column0", "column1")),
        ([0, 1, 2], ("column0",)),
        (TensorRows(3), ("image", "label")),
    ],
)
def test_columns_have_names(data: Any, columns: tuple[str, ...]) -> None:
    pipeline = Pipeline(data).batch(2)
    assert pipeline.columns == columns
    assert all(len(batch) == len(columns) for batch in ShardedLoader(pipeline))


def test_a_pipeline_says_what_it_does() -> None:
    pipeline = numbers(9).shuffle(5, seed=1).repeat(2).batch(4).shuffle(3).repeat(6)
    assert repr(pipeline) == (
        "Pipeline(TensorDataset: x, y; shuffle(5, seed=1), repeat(2), shuffle(3) of batches of 4, "
        "repeat(6) of batches; batches of 4 samples a rank)"
    )


# -- what cannot be --------------------------------------------------------------------------------------------


def uneven() -> Iterator[Any]:
    yield torch.zeros(3)
    yield torch.zeros(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.map(int, "images"), "Asked to map the column 'images', but the columns are x, y"),
        (lambda p: Pipeline(TensorRows(3)).map(int, "lable"), "Did you mean 'label'"),
        (lambda p: p.map([], "x"), "Asked to map x through no operation"),
        (lambda p: p.map(3, "x"), "Asked to map 3, which is not an operation"),
        (lambda p: p.map(int, "x", output_columns="y"), "Asked to map x to y beside y. Give every column a name"),
        (lambda p: p.map(Flip(), ["x", "y"]), r"through Flip\(\), which takes one column"),
        (lambda p: p.shuffle(0), "Asked for buffer_size=0. Give at least 1"),
        (lambda p: p.repeat(-1), "Asked for count=-1. Give at least 1"),
        (lambda p: p.repeat(1.5), "Asked for count=1.5, found a value of type float"),
        (lambda p: p.batch(), "Give batch a batch_size= .* or a global_batch="),
        (lambda p: p.batch(2, global_batch=4), "Give batch a batch_size= .* and not both"),
        (lambda p: p.batch(2).batch(2), "Asked to batch twice: Pipeline"),
        (lambda p: Pipeline(TensorRows(3), num_shards=2), "num_shards=2 and shard_id=None. Give both, or neither"),
        (lambda p: Pipeline(TensorRows(3), num_shards=2, shard_id=2), "shard_id=2 of num_shards=2"),
        (lambda p: Pipeline(TensorRows(3), columns=("a",)), r"the columns a of TensorRows, found image, label"),
        (lambda p: Pipeline(lambda: iter([1])), "The columns of a stream are not known before it is read"),
        (lambda p: Pipeline(DataLoader(TensorRows(3))), "Asked for a pipeline of a DataLoader"),
        (lambda p: Pipeline(object()), "Asked to load from a object"),
        (lambda p: Pipeline(lambda: iter([1]), "x").batch(2).get_dataset_size(), "is a stream without a length"),
        (lambda p: ShardedLoader(p), "No batch size was given"),
        (lambda p: ShardedLoader(p.batch(2), collate_fn=list), "a collate_fn, but a pipeline makes its batches"),
        (lambda p: list(ShardedLoader(p.batch(99, True))), "40 samples are not one global batch of 99"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_once(make: Callable[[Pipeline], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(numbers(40))


def test_datasets_of_ready_batches_are_no_pipelines(tmp_path: Any) -> None:
    from phalanx.data import criteo_schema

    (tmp_path / "a.tsv").write_text("")
    with pytest.raises(ConfigError, match="a pipeline of QueueDataset, which hands out batches"):
        Pipeline(QueueDataset(tmp_path, criteo_schema(), batch_size=2), columns="x")


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (Pipeline(uneven, "image").batch(2), r"column 'image' of a batch holds values of shapes \(3,\) and \(4,\)"),
        (Pipeline([{"x": 1}, {"y": 2}]).batch(2), "Sample 1 of list has no 'x': asked for x, found y"),
        (Pipeline([(1, 2), (1,)]).batch(2), "Sample 1 of list has no 'column1': .* found 1 value"),
        (Pipeline([(1,), (1, 2)]).batch(2), "Sample 1 of list has more: asked for column0, found 2 values"),
        (numbers(4).batch(2).map(lambda x: x[:1], "x"), "made 1 samples of a batch of 2"),
        (numbers(4).map(lambda x, y: x, ["x", "y"]).batch(2), "returned 1 values for the 2 columns x, y"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_named(pipeline: Pipeline, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(ShardedLoader(pipeline, training=False))


def test_a_long_epoch_goes_on_by_reading_one_batch() -> None:
    class Long(Dataset[Any]):
        read = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> int:
            self.read += 1
            return index

    long = Long()
    loader = ShardedLoader(Pipeline(long, "x").shuffle(10**9).shuffle(100).batch(8).shuffle(1000).repeat(3))
    state = {"version": 1, "epoch": 5, "position": 12_345_678_90, "seed": 0, "global_batch": 8}
    loader.load_state_dict({**state, "order": loader.ordering})
    assert len(set(next(iter(loader))[0].tolist())) == 8
    assert long.read == 8


def test_a_state_of_another_chain_or_length_is_refused() -> None:
    loader = ShardedLoader(numbers(40).shuffle(5).batch(8))
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"a pipeline with shuffle\(5\), this one has shuffle\(6\)"):
        ShardedLoader(numbers(40).shuffle(6).batch(8)).load_state_dict(loader.state_dict())
    other = ShardedLoader(numbers(5).shuffle(5).batch(2))
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="inside an epoch of 40 samples, and this data has 5"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "rows"})  # of an older version
    with pytest.raises(
        ConfigError, match="Asked to resume at position 8, but the epoch of this pipeline has 5 samples"
    ):
        list(other)


def test_a_shard_that_is_not_the_ranks_own_is_refused_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    here = context.init()
    monkeypatch.setattr(type(here), "world_size", property(lambda _: 4))
    monkeypatch.setattr(type(here), "rank", property(lambda _: 2))
    pipeline = Pipeline(TensorRows(8), num_shards=1, shard_id=0).batch(2)
    monkeypatch.setattr("phalanx.data.sampling.ranks.current_shard", lambda: (1, 2))
    with pytest.raises(ConfigError, match="on shard 0 of 1, but rank 2 of 4 reads shard 1 of 2"):
        len(ShardedLoader(pipeline))
    assert len(ShardedLoader(pipeline, training=False)) == 4
    # (rank, world size) means the rank's place, also where two ranks read the same rows.
    assert ShardedLoader(Pipeline(TensorRows(8), num_shards=4, shard_id=2).batch(2)).global_batch == 4


def test_sizes_are_those_of_the_job_also_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert numbers(40).batch(5).get_dataset_size() == 2

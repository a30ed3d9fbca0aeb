"""Samples from generators: named feeds, how far ahead they are read, and that each epoch begins anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.data import GeneratorDataset, ShardedLoader
from phalanx.errors import ConfigError, DataError


class Counted:
    """A function of a generator that counts what it has yielded."""

    def __init__(self, rows: int) -> None:
        self.rows, self.begun, self.yielded = rows, 0, 0

    def __call__(self) -> Iterator[Any]:
        self.begun += 1
        for row in range(self.rows):
            self.yielded += 1
            yield {"image": [float(row)] * 3, "label": row, "weight": 1.0}


def labels(loader: ShardedLoader) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": 3}, {"capacity": 8, "process": True}])
def test_every_epoch_begins_anew_and_leaves_no_thread(options: dict[str, Any]) -> None:
    reader = Counted(70)
    loader = ShardedLoader(GeneratorDataset(reader, ("image", "label"), **options), batch_size=32, drop_last=True)
    expected = [list(range(32)), list(range(32, 64))]
    assert [labels(loader) for _ in range(2)] == [expected, expected]
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx reader"]
    if "process" not in options:
        assert reader.begun == 2


@pytest.mark.parametrize("capacity", [1, 5, 32])
def test_no_more_than_the_capacity_is_read_ahead(capacity: int) -> None:
    reader, used = Counted(200), 0
    for _ in ShardedLoader(GeneratorDataset(reader, ("image", "label"), capacity=capacity), batch_size=1):
        used += 1
        assert reader.yielded <= used + capacity
    assert used == 200


def test_the_thread_reads_ahead_until_the_capacity_is_full() -> None:
    reader = Counted(200)
    full = threading.Event()

    def watched() -> Iterator[Any]:
        for number, row in enumerate(reader(), start=1):
            if number == 1 + 7:
                full.set()
            yield row

    batches = iter(ShardedLoader(GeneratorDataset(watched, ("image", "label"), capacity=7), batch_size=1))
    next(batches)
    assert full.wait(30)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx reader"]


def test_columns_come_in_the_order_they_were_named() -> None:
    named = GeneratorDataset(Counted(2), ["label", "image"])
    (batch,) = ShardedLoader(named, batch_size=2)
    assert batch[0].tolist() == [0, 1]
    (batch,) = ShardedLoader(named.batch(2).as_dicts())
    assert list(batch) == ["label", "image"]
    (batch,) = ShardedLoader(GeneratorDataset(lambda: iter([(1, 2), (3, 4)]), ("a", "b")).batch(2))
    assert [part.tolist() for part in batch] == [[1, 3], [2, 4]]


def broken(kind: str) -> Iterator[Any]:
    yield {"image": 0, "label": 0}
    yield {"missing": {"image": 1, "labels": 1}, "short": (1,), "long": (1, 2, 3)}[kind]


def missing() -> Iterator[Any]:
    return broken("missing")


def short() -> Iterator[Any]:
    return broken("short")


def long() -> Iterator[Any]:
    return broken("long")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (missing, "Sample 1 of the generator missing has no 'label': .* found image, labels. Did you mean 'labels'"),
        (short, "Sample 1 of the generator short has no 'label': asked for image, label, found 1 value"),
        (long, "Sample 1 of the generator long has more: asked for image, label, found 3 values"),
    ],
)
def test_a_missing_feed_is_named(function: Any, message: str) -> None:
    loader = ShardedLoader(GeneratorDataset(function, ("image", "label")), batch_size=2)
    with pytest.raises(DataError, match=message):
        list(loader)


def failing() -> Iterator[Any]:
    yield (1,)
    raise OSError("the camera is gone")


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": 4}])
def test_an_error_of_the_generator_is_raised_where_it_is_read(options: dict[str, Any]) -> None:
    with pytest.raises(OSError, match="the camera is gone"):
        list(ShardedLoader(GeneratorDataset(failing, "x", **options), batch_size=1))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"from a generator\. Give the function that makes"):
        GeneratorDataset(failing(), "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Asked for capacity=-1\. Give at least 1"):
        GeneratorDataset(failing, "x", capacity=-1)
    with pytest.raises(ConfigError, match="num_shards=None and shard_id=1"):
        GeneratorDataset(failing, "x", shard_id=1)

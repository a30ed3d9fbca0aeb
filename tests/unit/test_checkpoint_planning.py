"""Who writes which part of a tensor, and which parts a reader needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.tensors import write_plan
from phalanx.checkpoint.tensors.chunk import TensorChunk, covers
from phalanx.checkpoint.tensors.write_plan import ChunkDescription, TensorLayout, plan_writes
from phalanx.data.sampling.shards import even_split
from phalanx.errors import ConfigError

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def part(size: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...]) -> ChunkDescription:
    return ChunkDescription("F32", 4, TensorChunk(offset, size), shape)


def piece_of(size: tuple[int, ...], dim: int, index: int, count: int) -> ChunkDescription:
    """A whole slice that is to be lined up with others."""
    return ChunkDescription("F32", 4, TensorChunk.full(size), size, ((dim, index, count),))


def cut(shape: tuple[int, ...], ranks: int, dim: int | None) -> list[ChunkDescription]:
    """Every rank's part: all of it, or a run along one dim."""
    if dim is None or not shape:
        return [part(shape, shape, (0,) * len(shape))] * ranks
    dim %= len(shape)
    runs = [even_split(shape[dim], ranks, rank) for rank in range(ranks)]
    return [
        part((*shape[:dim], n, *shape[dim + 1 :]), shape, tuple(at if d == dim else 0 for d in range(len(shape))))
        for at, n in runs
    ]


def filled(entry: TensorLayout, whole: np.ndarray, chunk: TensorChunk) -> np.ndarray:
    """What a reader of `chunk` puts together from the pieces."""
    found = np.full(chunk.size, -1.0)
    for piece in entry.write_items:
        shared = piece.chunk.overlap(chunk)
        if shared is not None:
            saved = whole[piece.chunk.within(TensorChunk.full(entry.shape))]
            found[shared.within(chunk)] = saved[shared.within(piece.chunk)]
    return found


@given(shapes, st.integers(1, 5), st.none() | st.integers(0, 2), st.integers(1, 5), st.none() | st.integers(0, 2))
def test_any_layout_is_read_from_any_other(
    shape: tuple[int, ...], saved_ranks: int, saved_dim: int | None, ranks: int, dim: int | None
) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(float)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "PIECE_BYTES", 8)
        entry = plan_writes([{"w": p} for p in cut(shape, saved_ranks, saved_dim)])["w"]
    assert sum(piece.chunk.count for piece in entry.write_items) == whole.size  # each element is written once
    assert TensorLayout.from_json(entry.to_json()) == entry
    for wanted in cut(shape, ranks, dim):
        chunk = entry.chunk_of(wanted)
        assert (filled(entry, whole, chunk) == whole[chunk.within(TensorChunk.full(shape))]).all()


def test_a_large_tensor_of_all_ranks_is_split_over_them_and_small_ones_go_round() -> None:
    large, small = part((1 << 20,), (1 << 20,), (0,)), part((3,), (3,), (0,))
    entries = plan_writes([{"large": large, **{f"b{i}": small for i in range(60)}}] * 4)
    assert sorted(piece.rank for piece in entries["large"].write_items) == [0, 1, 2, 3]
    writers = [entries[f"b{i}"].write_items[0].rank for i in range(60)]
    assert min(writers.count(rank) for rank in range(4)) > 5


def test_what_may_differ_between_ranks_is_written_by_the_first() -> None:
    buffer = ChunkDescription("F32", 4, TensorChunk.full((1 << 20,)), (1 << 20,), split=False)
    assert [p.rank for p in plan_writes([{"b": buffer}] * 4)["b"].write_items] == [0]


def test_slices_of_unequal_size_are_lined_up() -> None:
    sizes = (3, 1, 2)
    held = [{"w": piece_of((2, n), 1, index, 3)} for index, n in enumerate(sizes)]
    entry = plan_writes(held)["w"]
    assert entry.shape == (2, 6)
    assert [entry.chunk_of(parts["w"]).offset for parts in held] == [(0, 0), (0, 3), (0, 4)]


def test_slices_that_are_cut_again_are_lined_up() -> None:
    boxes = [(0, 2), (2, 1)]  # each slice of 3 rows is sharded over two ranks
    held = [
        {"w": ChunkDescription("F32", 4, TensorChunk((at,), (n,)), (3,), ((0, index, 2),))}
        for index in range(2)
        for at, n in boxes
    ]
    entry = plan_writes(held)["w"]
    assert entry.shape == (6,)
    assert [entry.chunk_of(parts["w"]) for parts in held] == [
        TensorChunk((a,), (n,)) for a, n in ((0, 2), (2, 1), (3, 2), (5, 1))
    ]
    assert len(entry.write_items) == 4


def test_ranks_that_differ_are_named() -> None:
    with pytest.raises(ConfigError, match=r"shape of 'w' is \[2\] on rank 0 and \[3\] on rank 1"):
        plan_writes([{"w": part((2,), (2,), (0,))}, {"w": part((3,), (3,), (0,))}])
    with pytest.raises(ConfigError, match="hold 2 of the 4 elements of 'w'"):
        plan_writes([{"w": part((2,), (4,), (0,))}])
    with pytest.raises(ConfigError, match="1 of 3 slices of 'w' are held by no rank"):
        plan_writes([{"w": piece_of((2,), 0, index, 3)} for index in (0, 2)])


def test_boxes_of_a_tensor_without_dims_are_all_of_it() -> None:
    whole = TensorChunk.full(())
    assert whole.overlap(whole) == whole
    assert whole.split(4) == [whole]
    assert covers([whole], ())

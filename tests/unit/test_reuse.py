"""Memory of large batches: never handed out while anybody holds it, handed out again without new pages."""

from __future__ import annotations

import resource

import torch

from phalanx.data import vision
from phalanx.data.samples.buffer_pool import BufferPool
from phalanx.data.sampling.row_rng import Draws

SHAPE = (1024, 300)


def test_memory_is_handed_out_again_when_the_tensor_and_its_views_are_gone() -> None:
    reuse = BufferPool()
    first = reuse.empty(SHAPE)
    place, view = first.data_ptr(), first[3:5].t()
    second = reuse.empty(SHAPE)
    del first
    assert reuse.empty(SHAPE).data_ptr() not in (place, second.data_ptr())
    as_numpy = view.numpy()
    del view
    assert reuse.empty(SHAPE).data_ptr() not in (place, second.data_ptr())
    del as_numpy
    again = {reuse.empty(SHAPE).data_ptr() for _ in range(2)}
    assert second.data_ptr() not in again
    assert reuse.empty((1024, 301)).data_ptr() != place


def test_few_blocks_are_kept_and_what_is_held_stays_as_it_is() -> None:
    reuse = BufferPool()
    held = [reuse.empty(SHAPE).fill_(i) for i in range(9)]
    assert len(reuse._blocks) == 4
    for size in range(302, 312):
        reuse.empty((1024, size)).fill_(-1)
    assert [int(tensor.unique()) for tensor in held] == list(range(9))
    assert reuse.empty((4, 4)).shape == (4, 4)
    assert len(reuse._blocks) == 4


def test_large_batches_of_images_are_made_without_new_pages() -> None:
    images = torch.zeros(32, 224, 224, 3, dtype=torch.uint8)
    chain, draws = (
        vision.Chain([vision.ToTensor(), vision.Normalize((0.5,) * 3, (0.5,) * 3)]),
        Draws.of_rows(0, 0, range(32)),
    )
    batch = chain.batched(images, draws)
    batch = chain.batched(images, draws)  # two blocks: one in the hands of the training
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        batch = chain.batched(images, draws)
    pages = batch.numel() * 4 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 10

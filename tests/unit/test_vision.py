"""Transforms of images against NumPy and Pillow, one sample and a batch at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from phalanx.data import vision
from phalanx.data.sampling.row_rng import Draws
from phalanx.data.vision import pointwise
from phalanx.errors import ConfigError

MEAN, STD = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)
SEED = [
    vision.RandomCrop((32, 32), (4, 4, 4, 4)),
    vision.RandomHorizontalFlip(),
    vision.Resize((48, 40)),
    vision.Rescale(1 / 255, 0),
    vision.Normalize(MEAN, STD),
    vision.HWC2CHW(),
]
MAKE: dict[str, Callable[[], Any]] = {
    "crop": lambda: vision.RandomCrop(20, 3),
    "center": lambda: vision.CenterCrop((20, 10)),
    "resized": lambda: vision.RandomResizedCrop((24, 16)),
    "bicubic": lambda: vision.RandomResizedCrop(16, interpolation="bicubic"),
    "flip": vision.RandomHorizontalFlip,
    "down": lambda: vision.Resize(20),
    "up": lambda: vision.Resize((50, 70)),
    "nearest": lambda: vision.Resize((50, 7), "nearest"),
    "rescale": lambda: vision.Rescale(1 / 255, 0.25),
    "normalize": lambda: vision.Normalize(MEAN, STD),
    "cast": lambda: vision.TypeCast("float64"),
}


def pictures(n: int = 9, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Smooth pictures with noise, as bytes with channels last."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(0, 60, (n, height, width, channels), generator=generator)
    slope = torch.linspace(0, 150, height).view(1, -1, 1, 1) + torch.arange(n).view(-1, 1, 1, 1) * 4
    return (noise + slope).to(torch.uint8)


def drawn(n: int = 9, epoch: int = 0) -> Draws:
    return Draws.of_rows(1, epoch, range(n))


# -- one row and many ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind", ["bytes", "planes", "floats", "first"])
def test_a_row_alone_gives_the_bits_it_gives_in_a_batch(name: str, kind: str) -> None:
    first = pictures().permute(0, 3, 1, 2)
    planes = first.contiguous().permute(0, 2, 3, 1)
    images = {"bytes": pictures(), "planes": planes, "floats": pictures() / 255, "first": first}[kind]
    operation, before = MAKE[name](), images.clone()
    together = operation.batched(images, drawn())
    alone = [operation(image, drawn().row(i)) for i, image in enumerate(images)]
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(images, before)
    if kind == "planes":
        assert torch.equal(together, operation.batched(pictures(), drawn()))


def test_the_whole_chain_gives_the_same_bits_for_any_batch_and_epochs_differ() -> None:
    chain, images = vision.Chain(SEED), pictures()
    whole = chain.batched(images, drawn())
    parts = [
        chain.batched(images[:2], Draws.of_rows(1, 0, [0, 1])),
        chain.batched(images[2:], Draws.of_rows(1, 0, range(2, 9))),
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[4], chain(images[4], drawn().row(4)))
    assert not torch.equal(whole, chain.batched(images, drawn(epoch=1)))
    assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((9, 3, 48, 40), torch.float32, True)


def test_arrays_and_pictures_are_taken_and_calls_by_hand_follow_torchs_seed() -> None:
    array, operation = pictures(1)[0].numpy(), vision.RandomCrop(20)
    found = []
    for sample in (array, Image.fromarray(array), torch.from_numpy(array)):
        torch.manual_seed(3)
        found.append(operation(sample))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert vision.ToTensor()(Image.fromarray(array[..., 0])).shape == (1, 32, 32)
    assert vision.TypeCast(torch.int32)(7).dtype == torch.int32


def test_pictures_of_many_sizes_and_foreign_functions_go_one_by_one_with_numbers_of_their_own() -> None:
    def noisy(sample: Any) -> Tensor:
        return torch.as_tensor(sample) + torch.rand(()) + random.random() + np.random.rand()

    images = [pictures(1, 30 + i, 40 - i)[0].numpy() for i in range(4)]
    chain = vision.Chain(
        [vision.RandomResizedCrop(16), vision.RandomHorizontalFlip(), noisy, noisy, vision.RandomCrop(8)]
    )
    state = torch.get_rng_state()
    whole = chain.batched(images, drawn(4))
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(whole, Tensor)
    for i in range(4):
        assert torch.equal(whole[i], chain(images[i], drawn(4).row(i)))
    twice = vision.Chain([noisy, lambda x: x - noisy(0)])
    assert (twice.batched(torch.zeros(4), drawn(4)) != 0).all()
    assert vision.Chain(str).batched([1, 2], drawn(2)) == ["1", "2"]


# -- against NumPy and Pillow ----------------------------------------------------------------------------------


def test_a_random_crop_is_a_part_of_the_padded_image_and_every_place_comes() -> None:
    image = pictures(1, 6, 5)[0].numpy()
    padded = np.pad(image, ((2, 4), (1, 3), (0, 0)))
    places = {padded[t : t + 8, left : left + 7].tobytes(): (t, left) for t in range(5) for left in range(3)}
    found = vision.RandomCrop((8, 7), (1, 2, 3, 4)).batched(torch.from_numpy(np.stack([image] * 600)), drawn(600))
    seen = [places[crop.numpy().tobytes()] for crop in found]
    assert set(seen) == set(places.values())
    assert max(seen.count(place) for place in set(seen)) < 80
    assert vision.RandomCrop(4, (1, 2)).padding == (1, 2, 1, 2)


def test_a_flip_mirrors_left_to_right_about_as_often_as_asked() -> None:
    images = pictures(1000, 3, 4)
    found = vision.RandomHorizontalFlip(0.3).batched(images, drawn(1000)).numpy()
    is_flipped = (found == images.numpy()[:, :, ::-1]).all((1, 2, 3))
    assert ((found == images.numpy()).all((1, 2, 3)) ^ is_flipped).all()
    assert 250 < is_flipped.sum() < 350
    assert torch.equal(vision.RandomHorizontalFlip(0).batched(images, drawn(1000)), images)
    assert torch.equal(vision.RandomHorizontalFlip(1).batched(images, drawn(1000)), images.flip(2))


@pytest.mark.parametrize(
    ("name", "pillow"), [("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)]
)
@pytest.mark.parametrize("size", [(224, 224), (20, 24), (13, 90)])
def test_bytes_are_scaled_as_pillow_scales_them(name: Any, pillow: Any, size: tuple[int, int]) -> None:
    images = pictures(3, 32, 48)
    found = vision.Resize(size, name).batched(images, drawn(3)).numpy().astype(int)
    wanted = np.stack([np.asarray(Image.fromarray(i.numpy()).resize(size[::-1], pillow)) for i in images])
    assert np.abs(found - wanted).max() <= (2 if name == "bicubic" else 1)


def test_one_number_scales_the_shorter_side_and_keeps_the_shape() -> None:
    assert vision.Resize(16)(pictures(1, 40, 60)[0]).shape == (16, 24, 3)
    assert vision.Resize(80)(pictures(1, 60, 40).permute(0, 3, 1, 2)[0]).shape == (3, 120, 80)
    assert vision.Resize((32, 32)).batched(pictures(), drawn()).dtype == torch.uint8


def test_the_middle_is_cut_out() -> None:
    image = pictures(1, 9, 8)[0]
    assert torch.equal(vision.CenterCrop((3, 4))(image), image[3:6, 2:6])


def test_a_resized_crop_is_the_part_it_chose_scaled_as_pillow_scales_it() -> None:
    operation, images = vision.RandomResizedCrop((24, 16), scale=(0.2, 0.6), ratio=(0.5, 2.0)), pictures(50, 60, 40)
    boxes = operation._boxes(60, 40, drawn(50))
    found = operation.batched(images, drawn(50)).numpy().astype(int)
    for image, (top, left, height, width), result in zip(images.numpy(), boxes, found, strict=True):
        assert 0.18 < height * width / 2400 < 0.63
        assert 0.45 < width / height < 2.2
        assert top >= 0
        assert left >= 0
        part = Image.fromarray(image[top : top + height, left : left + width])
        assert part.size == (width, height)
        assert np.abs(result - np.asarray(part.resize((16, 24), Image.Resampling.BILINEAR))).max() <= 1
    assert len(np.unique(boxes[:, 0])) > 10


def test_an_image_too_narrow_for_any_part_is_cut_in_its_middle() -> None:
    boxes = vision.RandomResizedCrop(8, scale=(0.9, 1.0))._boxes(100, 4, drawn(20))
    assert (boxes == [47, 0, 5, 4]).all() or (boxes == [48, 0, 5, 4]).all()


def test_pixels_are_scaled_shifted_and_normalised_as_numpy_does_it() -> None:
    images = pictures()
    pixels = images.numpy().astype(np.float64)
    rescaled = vision.Rescale(1 / 255, 0.5).batched(images, drawn())
    assert rescaled.dtype == torch.float32
    np.testing.assert_allclose(rescaled, pixels / 255 + 0.5, rtol=3e-7)
    wanted = (pixels / 255 - MEAN) / STD
    for chain, images_in in (
        ([vision.Rescale(1 / 255, 0), vision.Normalize(MEAN, STD), vision.HWC2CHW()], images),
        ([vision.HWC2CHW(), vision.Rescale(1 / 255, 0), vision.Normalize(MEAN, STD)], images),
        ([vision.ToTensor(), vision.Normalize(MEAN, STD)], images),
        ([vision.Rescale(1 / 255, 0), vision.Normalize(MEAN, STD)], images.permute(0, 3, 1, 2)),
    ):
        whole = vision.Chain(chain)
        assert len(whole.operations) == 1
        np.testing.assert_allclose(
            whole.batched(images_in, drawn()), wanted.transpose(0, 3, 1, 2), rtol=1e-5, atol=2e-6
        )
        one = images_in[0]
        for operation in chain:
            one = operation(one)
        torch.testing.assert_close(one, whole(images_in[0]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("side", [(1, 1), (5, 7), (33, 16)])
def test_without_the_native_core_the_same_bits_come_out(
    monkeypatch: pytest.MonkeyPatch, channels: int, side: tuple[int, int]
) -> None:
    images, numbers = pictures(3, *side, channels), [0.1 * (i + 1) for i in range(channels)]
    chains = [vision.Chain([vision.ToTensor(), vision.Normalize(numbers, numbers)]), vision.Chain(vision.ToTensor())]
    native = [chain.batched(images, drawn(3)) for chain in chains]
    monkeypatch.setattr(pointwise, "HAS_NATIVE", False)
    for chain, found in zip(chains, native, strict=True):
        assert torch.equal(found, chain.batched(images, drawn(3)))


def test_channels_move_to_the_front_and_the_bytes_stay() -> None:
    images = pictures(2, 5, 6)
    moved = vision.HWC2CHW().batched(images, drawn(2))
    assert moved.is_contiguous()
    assert np.array_equal(moved.numpy(), images.numpy().transpose(0, 3, 1, 2))


def test_large_batches_are_worked_on_in_parts_without_a_difference() -> None:
    images = pictures(70, 64, 64)
    chain = vision.Chain([vision.ToTensor(), vision.Normalize(MEAN, STD)])
    assert torch.equal(chain.batched(images, drawn(70))[69], chain(images[69]))


@pytest.mark.parametrize("dtype", ["int32", np.int32, torch.int32])
def test_types_are_named_in_any_of_three_ways(dtype: Any) -> None:
    assert vision.TypeCast(dtype).batched(torch.tensor([3, 4]), drawn(2)).tolist() == [3, 4]
    assert vision.TypeCast(dtype).dtype == torch.int32


# -- the numbers -----------------------------------------------------------------------------------------------


def test_numbers_are_uniform_and_streams_of_rows_are_their_own() -> None:
    draws = Draws.of_rows(7, 2, range(20_000))
    first, second = draws.uniform(2, 4), draws.uniform()
    assert abs(first.mean() - 3) < 0.02
    assert (first.min() >= 2, first.max() < 4) == (True, True)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.03
    counts = draws.integers(5).bincount()
    assert (len(counts), int(counts.min()) > 3800) == (5, True)
    assert len(set(first.tolist())) == 20_000
    assert math.isclose(Draws.of_rows(7, 2, [11]).uniform(2, 4).item(), first[11].item())


# -- what cannot work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vision.RandomCrop((32,)), r"RandomCrop got size \(32,\). Give a side of at least 1"),
        (lambda: vision.RandomCrop(0), r"RandomCrop got size 0"),
        (lambda: vision.RandomCrop(4, (1, 2, 3)), r"RandomCrop got padding \(1, 2, 3\). Give one number of pixels"),
        (lambda: vision.RandomCrop(4, -1), "got padding -1"),
        (lambda: vision.CenterCrop("32"), "CenterCrop got size '32'"),
        (lambda: vision.RandomHorizontalFlip(2), "got prob=2. Give a number from 0 to 1"),
        (
            lambda: vision.RandomResizedCrop(8, scale=(1, 0.5)),
            r"got scale=\(1, 0.5\). Give two numbers above 0, the sm",
        ),
        (lambda: vision.RandomResizedCrop(8, ratio=3), "got ratio=3"),
        (lambda: vision.Resize(8, "bilinaer"), "got interpolation='bilinaer'. Did you mean 'bilinear'?"),  # type: ignore[arg-type]
        (lambda: vision.Rescale("1/255"), r"Rescale got \('1/255', 0.0\). Give two numbers"),  # type: ignore[arg-type]
        (lambda: vision.Normalize((0.5, 0.5), (1, 1)), r"Normalize got mean=\(0.5, 0.5\). Give one number for each"),
        (lambda: vision.Normalize(MEAN, (1,)), "got 3 means and 1 deviations"),
        (lambda: vision.Normalize(MEAN, (1, 0, 1)), r"got std=\(1, 0, 1\). Give deviations above 0"),
        (lambda: vision.TypeCast("int23"), "TypeCast got 'int23'. Did you mean 'int32'?"),
        (lambda: vision.TypeCast(object()), "TypeCast got '<object"),  # type: ignore[arg-type]
        (lambda: vision.Chain(vision.HWC2CHW), "with its brackets"),
        (lambda: vision.Chain([3]), "Asked to map 3, which is not an operation"),  # type: ignore[list-item]
    ],
)
def test_an_argument_that_cannot_work_is_told(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("operation", "sample", "message"),
    [
        (
            vision.RandomCrop(50, 4),
            pictures(1)[0],
            r"was given an image of 40 x 40, its padding included, which is sma",
        ),
        (vision.CenterCrop(33), pictures(1)[0], r"CenterCrop\(size=\(33, 33\)\) was given an image of 32 x 32, which"),
        (
            vision.RandomHorizontalFlip(),
            torch.zeros(28, 28),
            r"found a sample of shape \(28, 28\). Give a grey image its",
        ),
        (vision.HWC2CHW(), torch.zeros(3, 8, 8), r"channels of a sample of shape \(3, 8, 8\) to the front; expected"),
        (vision.Normalize(MEAN, STD), torch.zeros(8, 8, 1), "has numbers for 3 channels and was given images with 1"),
    ],
)
def test_an_image_that_does_not_fit_is_told(operation: Any, sample: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        operation(sample)

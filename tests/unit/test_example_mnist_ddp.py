"""What the plain torch.distributed example reads, how it shares rows out, and what it refuses."""

from __future__ import annotations

import gzip
import importlib
import logging
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_ddp"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("train")
    for loaded in ("mnist", "train"):
        del sys.modules[loaded]


def write_mnist(folder: Path) -> None:
    """Four images to train on and two to test, plain and gz."""
    for part, count in (("train", 4), ("t10k", 2)):
        images = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + bytes(range(196)) * 4 * count
        labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(range(count))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def test_plain_and_packed_files_are_read(tmp_path: Path, train: ModuleType) -> None:
    write_mnist(tmp_path)
    training, test = train.read_data(tmp_path)
    assert training.labels.tolist() == [0, 1, 2, 3]
    assert test.labels.tolist() == [0, 1]
    assert training.pixels[1].flatten().tolist() == list(range(196)) * 4
    assert training.batch(torch.tensor([0]))[0][0, 0, 0, 1].item() == pytest.approx((1 / 255 - 0.1307) / 0.3081)


def put(offset: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:offset] + new + raw[offset + len(new) :]


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda raw: raw[:9], "offset 9: the length of the header should be 16, found 9"),
        (IMAGES, put(0, b"\1"), "offset 0: the first two bytes should be 0, found 256"),
        (IMAGES, put(2, b"\x0d"), r"offset 2: the type of the values \(8 is bytes\) should be 8, found 13"),
        (IMAGES, put(3, b"\1"), "offset 3: the number of dimensions should be 3, found 1"),
        (IMAGES, put(4, bytes(4)), r"offset 4: the number of items \(at least 1\) should be 1, found 0"),
        (IMAGES, put(8, b"\0\0\0\x20"), "offset 8: a side of the images should be 28, found 32"),
        (IMAGES, put(12, b"\0\0\0\x20"), "offset 12: a side of the images should be 28, found 32"),
        (IMAGES, lambda raw: raw[:-1], "offset 16: the bytes of 4 items should be 3136, found 3135"),
        (IMAGES, lambda raw: raw + b"0", "offset 16: the bytes of 4 items should be 3136, found 3137"),
        (LABELS, put(8, b"\x0a"), "offset 8: label 10 of item 0 is not one of 0 to 9"),
        (LABELS, put(4, b"\0\0\0\3"), "offset 8: the bytes of 3 items should be 3, found 4"),
    ],
)
def test_a_corrupt_file_is_named_with_the_place(
    tmp_path: Path, train: ModuleType, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path)
    path = tmp_path / name
    is_packed = path.suffix == ".gz"
    raw = change(gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes())
    path.write_bytes(gzip.compress(raw) if is_packed else raw)
    with pytest.raises(train.InputError, match=f"{re.escape(str(path))}, {message}"):
        train.read_data(tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, train: ModuleType) -> None:
    write_mnist(tmp_path)
    shutil.copy(tmp_path / "t10k-labels-idx1-ubyte.gz", tmp_path / LABELS)
    with pytest.raises(train.InputError, match=r"offset 4: 2 labels, but .*train-images-idx3-ubyte has 4 images"):
        train.read_data(tmp_path)


def test_a_broken_archive_and_a_missing_file_are_named(tmp_path: Path, train: ModuleType) -> None:
    write_mnist(tmp_path)
    packed = tmp_path / LABELS
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(train.InputError, match=r"train-labels-idx1-ubyte\.gz cannot be read \(.*\)\. Fetch it again"):
        train.read_data(tmp_path)
    packed.unlink()
    with pytest.raises(train.InputError, match=r"holds neither train-labels-idx1-ubyte nor .*\.gz\. Give the folder"):
        train.read_data(tmp_path)


def test_the_default_images_say_what_they_need(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(train.InputError, match="come with scikit-learn: pip install it, or give --data DIR"):
        train.read_data(None)


@pytest.mark.parametrize(("rank", "world"), [("1", None), (None, "2"), ("2", "2"), ("-1", "2"), ("0", "{}")])
def test_half_a_role_is_refused(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if value is not None:
            monkeypatch.setenv(name, value)
    message = f"RANK={rank or 'unset'} is no rank of WORLD_SIZE={world or 'unset'}. Set both, or neither"
    with pytest.raises(train.InputError, match=re.escape(message)):
        train.rank_and_world_size()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--epochs 0", "'0' should be a whole number, at least 1"),
        ("--global-batch two", "'two' should be a whole number, at least 1"),
        ("--dropout 1", r"--dropout 1\.0 should be at least 0 and less than 1"),
        ("--epoch 1", "unrecognized arguments: --epoch 1"),
    ],
)
def test_a_wrong_flag_is_refused(
    train: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        train.parse_arguments()
    assert re.search(message, capsys.readouterr().err)


def test_gpu_without_cuda_says_so_and_trains_on(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert train.choose_device(True, 0) == torch.device("cpu")
    assert "======= CUDA INFO =======" in caplog.messages
    assert "CUDA available: False" in caplog.messages
    assert "--gpu was given, but torch finds no CUDA device: training on the CPU." in caplog.messages


def test_a_rank_without_a_card_of_its_own_is_refused(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(train.InputError, match="Local rank 1 needs its own GPU, but this node has 1"):
        train.choose_device(True, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_goes_to_one_rank_and_each_epoch_has_its_order(train: ModuleType, world: int) -> None:
    ranks = [train.GlobalBatches(300, 128, rank, world, seed=1) for rank in range(world)]
    whole = train.GlobalBatches(300, 128, 0, 1, seed=1)
    orders = []
    for epoch in range(2):
        for batches in (*ranks, whole):
            batches.set_epoch(epoch)
        together = [torch.cat([rows for rows, _ in parts]) for parts in zip(*ranks, strict=True)]
        assert [len(rows) for rows in together] == [128, 128, 44]
        assert all(torch.equal(rows, asked) for rows, (asked, _) in zip(together, whole, strict=True))
        orders.append(torch.cat(together).tolist())
        assert sorted(orders[-1]) == list(range(300))
    assert orders[0] != orders[1]
    assert len(whole) == 3

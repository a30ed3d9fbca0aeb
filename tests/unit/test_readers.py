from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import Subset, TensorDataset

from phalanx.data.cifar import RECORD_BYTES, Cifar10Dataset
from phalanx.data.digits import TEST_IMAGES, DigitsDataset
from phalanx.data.flowers import FlowersDataset
from phalanx.data.idx import IdxDataset, read_idx
from phalanx.data.labels import check_labels
from phalanx.errors import ConfigError, DataError


def idx_bytes(array: np.ndarray[Any, Any], kind: int = 0x08) -> bytes:
    header = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Six training and two test images of 5 x 4 pixels."""
    for stem, rows in (("train", 6), ("t10k", 2)):
        pixels = np.arange(rows * 20, dtype=np.uint8).reshape(rows, 5, 4)
        (tmp_path / f"{stem}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        labels = gzip.compress(idx_bytes(np.arange(rows, dtype=np.uint8)))
        (tmp_path / f"{stem}-labels-idx1-ubyte.gz").write_bytes(labels)
    return tmp_path


# -- digits ----------------------------------------------------------------------------------------------------


def test_digits_are_real_images_split_once_and_for_all() -> None:
    train, test = DigitsDataset(), DigitsDataset(train=False)
    assert (len(train), len(test)) == (1797 - TEST_IMAGES, TEST_IMAGES)
    together = torch.cat([train.images, test.images])
    assert abs(together.mean()) < 1e-3
    assert abs(together.std() - 1) < 1e-3
    assert len(torch.unique(torch.cat([train.images, test.images]).flatten(1), dim=0)) == 1797
    assert sorted(set(test.labels.tolist())) == list(range(10))


def test_digits_come_in_the_size_and_channels_a_model_wants() -> None:
    image, label = DigitsDataset(image_size=32, channels=3)[5]
    assert (image.shape, image.dtype, type(label)) == ((3, 32, 32), torch.float32, int)
    assert torch.equal(image[0], image[2])


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r'scikit-learn, which is not installed. Run: pip install "phalanx\['):
        DigitsDataset()


# -- IDX -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"), [(0x08, ">u1"), (0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_every_element_type_of_the_format_is_read(tmp_path: Path, kind: int, dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "x").write_bytes(idx_bytes(array, kind))
    found = read_idx(tmp_path / "x")
    assert found.dtype.isnative
    assert np.array_equal(found, array)


def test_images_are_normalised_and_labels_are_whole_numbers(mnist: Path) -> None:
    train = IdxDataset(mnist, mean=0.5, std=0.25, channels=3)
    assert (len(train), len(IdxDataset(mnist, train=False))) == (6, 2)
    image, label = train[1]
    assert (image.shape, image.dtype, label) == ((3, 5, 4), torch.float32, 1)
    assert image[2, 0, 0] == pytest.approx((20 / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08", "needs 4 bytes from byte 0 on, but ends after 3"),
        (b"\x89PNG....", r"at byte 0 found 89 50 4e 47, where 00 00, an element type"),
        (b"\0\0\x0a\x01\0\0\0\x01\x05", "at byte 0 found 00 00 0a 01"),
        (b"\0\0\x08\x02\0\0\0\x01\0\0\0\x01\x05", "at byte 3 it says it has 2 dimensions, expected 1"),
        (b"\0\0\x08\x01\0\0", "needs 4 bytes from byte 4 on, but ends after 2"),
        (b"\0\0\x08\x01\0\0\0\x09abc", "needs 9 bytes from byte 8 on, but ends after 3"),
        (b"\0\0\x08\x01\xff\xff\xff\xffabc", "needs 4294967295 bytes from byte 8 on, but ends after 3"),
        (b"\0\0\x08\x01\0\0\0\x02abc", "2 bytes of 2 elements end at byte 10, but the file goes on"),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_a_corrupt_idx_file_is_named_with_the_byte(
    tmp_path: Path, content: bytes, message: str, compress: bool
) -> None:
    path = tmp_path / ("labels.gz" if compress else "labels")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DataError, match=rf"{path}: .*{message}"):
        read_idx(path, dims=1)


def test_broken_gzip_data_is_named(mnist: Path) -> None:
    path = mnist / "train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for broken in (whole[:-12], b"plain", whole[:-6] + b"\xff" + whole[-5:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"{path}: the gzip data is broken"):
            IdxDataset(mnist)


def test_a_label_outside_the_classes_names_file_and_sample(mnist: Path) -> None:
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz: The label of sample 4 is 4, outside .* 4 cla"):
        IdxDataset(mnist, class_dim=4)


def test_files_of_different_sets_are_told(mnist: Path) -> None:
    (mnist / "train-images-idx3-ubyte").write_bytes((mnist / "t10k-images-idx3-ubyte").read_bytes())
    with pytest.raises(DataError, match=r"has 2 images at byte 4, .* has 6 labels at byte 4"):
        IdxDataset(mnist)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with pytest.raises(DataError, match=r"holds neither train-images-idx3-ubyte nor .*\.gz; found other"):
        IdxDataset(tmp_path)
    with pytest.raises(ConfigError, match="nowhere, which is not a folder"):
        IdxDataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "nothing")


# -- CIFAR-10 --------------------------------------------------------------------------------------------------


def cifar_record(label: int, red: int) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes(2048)


def test_cifar_is_read_from_its_five_files(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(cifar_record(number, 51) + cifar_record(0, 255))
    (folder / "test_batch.bin").write_bytes(cifar_record(9, 0))
    train = Cifar10Dataset(tmp_path)
    assert train.labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    image, label = train[2]
    assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.float32, 2)
    assert image[0, 0, 0] == pytest.approx((0.2 - 0.4914) / 0.2470)
    assert image[1, 31, 31] == pytest.approx((0.0 - 0.4822) / 0.2435)
    assert Cifar10Dataset(folder, train=False)[0][1] == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cifar_record(1, 1) + b"abc", "the last record begins at byte 3073 and has 3"),
        (b"", "do not divide its 0 bytes"),
        (cifar_record(1, 1) + cifar_record(10, 1), f"record 1, at byte {RECORD_BYTES}, has label 10"),
    ],
)
def test_a_corrupt_cifar_file_is_named_with_the_byte(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"test_batch.bin: .*{message}"):
        Cifar10Dataset(tmp_path, train=False)


# -- flowers ---------------------------------------------------------------------------------------------------


def photograph(path: Path, width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.fromarray(np.full((height, width, 3), 128, np.uint8)).save(path)


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    for number in range(1, 5):
        photograph(tmp_path / "jpg" / f"image_{number:05d}.jpg")
    savemat(tmp_path / "imagelabels.mat", {"labels": [[77, 1, 102, 5]]})
    savemat(tmp_path / "setid.mat", {"trnid": [[3, 1]], "valid": [[2]], "tstid": [[4]]})
    return tmp_path


def test_flowers_are_read_as_published(flowers: Path) -> None:
    train = FlowersDataset(flowers)
    assert (train.labels.tolist(), train.labels.dtype) == ([101, 76], torch.int64)
    image, label = train[0]
    assert (image.shape, image.dtype, label) == ((3, 224, 224), torch.float32, 101)
    assert image[0, 100, 100] == pytest.approx((128 / 255 - 0.485) / 0.229, abs=0.02)
    assert FlowersDataset(flowers, train=False, image_size=32)[0][0].shape == (3, 32, 32)


def test_images_in_folders_by_class_are_read_too(tmp_path: Path) -> None:
    for name in ("rose", "daisy"):
        photograph(tmp_path / "train" / name / "a.png", 20, 60)
    train = FlowersDataset(tmp_path, image_size=28)
    assert [path.parent.name for path in train.paths] == ["daisy", "rose"]
    assert train[1][0].shape == (3, 28, 28)
    assert train[1][1] == 1


def test_a_flower_outside_the_classes_is_named(flowers: Path) -> None:
    with pytest.raises(DataError, match=r"image_00003.jpg: its label is 101, outside the 101 classes \(0 to 100\)"):
        FlowersDataset(flowers, class_dim=101)


def test_a_missing_flower_is_named(flowers: Path) -> None:
    (flowers / "jpg" / "image_00001.jpg").unlink()
    with pytest.raises(DataError, match=r"image_00001.jpg is missing, with 0 others"):
        FlowersDataset(flowers)


def test_a_broken_flower_is_named(flowers: Path) -> None:
    (flowers / "jpg" / "image_00003.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"image_00003.jpg: cannot be decoded"):
        FlowersDataset(flowers)[0]


def test_sets_and_labels_that_do_not_fit_are_told(flowers: Path) -> None:
    savemat(flowers / "setid.mat", {"trnid": [[9]]})
    with pytest.raises(DataError, match=r"setid.mat: names image 9, but imagelabels.mat has labels for 1 to 4"):
        FlowersDataset(flowers)
    with pytest.raises(DataError, match=r"setid.mat: holds no readable 'tstid'"):
        FlowersDataset(flowers, train=False)


def test_a_folder_without_flowers_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found neither imagelabels.mat nor train/<class>/ folders"):
        FlowersDataset(tmp_path)


@pytest.mark.parametrize(("module", "name"), [("PIL", "Pillow"), ("scipy.io", "SciPy")])
def test_flowers_without_their_readers_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, flowers: Path, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf'{name}, which is not installed. Run: pip install "phalanx\['):
        FlowersDataset(flowers)


# -- labels ----------------------------------------------------------------------------------------------------


def test_labels_that_do_not_fit_the_model_are_named_before_training() -> None:
    images, labels = torch.zeros(4, 1), torch.tensor([[3], [9], [10], [12]])
    message = r"The label of sample 2 is 10, outside the model's 10 classes \(0 to 9\); 2 of 4 labels are. .*=13"
    for data in (labels, labels.tolist(), TensorDataset(images, labels)):
        with pytest.raises(DataError, match=message):
            check_labels(data, 10)
    check_labels(Subset(TensorDataset(images, labels), [1, 0]), 10)
    check_labels(DigitsDataset(), 10)
    with pytest.raises(DataError, match="of 1437 labels are"):
        check_labels(DigitsDataset(), 9)


def test_labels_that_cannot_be_found_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="a object, which has neither `labels` nor `targets`"):
        check_labels(object(), 3)

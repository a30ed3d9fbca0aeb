from __future__ import annotations

import gzip
import pickle
import re
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import Subset, TensorDataset

from phalanx.data import vision
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.readers import image_decode
from phalanx.data.readers.cifar import RECORD_BYTES, Cifar10Dataset
from phalanx.data.readers.digits import TEST_IMAGES, DigitsDataset
from phalanx.data.readers.flowers import FlowersDataset
from phalanx.data.readers.idx import FashionMnistDataset, IdxDataset, MnistDataset, read_idx
from phalanx.data.samples.bad_records import BadRecords
from phalanx.data.samples.labels import check_labels
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
    monkeypatch.setattr("phalanx.data.readers.digits.find_spec", lambda _: None)
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
        (b"\0\0\x08\x01\0\0\0\x02abc", "2 bytes of 2 elements end at byte 10, but the file is longer"),
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


def test_a_cut_off_idx_file_is_read_as_far_as_it_goes_when_asked(mnist: Path) -> None:
    path = mnist / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-25])
    message = (
        r"train-images-idx3-ubyte: record 4 of 6, at byte 96, is cut off: the file has 111 bytes. .*on_corrupt=\"skip"
    )
    with pytest.raises(DataError, match=message):
        IdxDataset(mnist)
    found = IdxDataset(mnist, on_corrupt="skip")
    assert (len(found), found.labels.tolist(), found.corrupt.count) == (4, [0, 1, 2, 3], 2)
    assert "record 4 of 6" in found.corrupt.first
    assert repr(found.corrupt) == f"2 broken records left out; the first: {found.corrupt.first}"
    path.write_bytes(path.read_bytes() + bytes(26))
    with pytest.raises(DataError, match="its 6 records end at byte 136, but the file is longer"):
        IdxDataset(mnist, on_corrupt="skip")


def test_a_pipeline_reads_the_bytes_of_grey_images_with_a_channel(mnist: Path) -> None:
    for dataset in (MnistDataset(mnist), IdxDataset(mnist, train=False)):
        columns = dataset.read_columns(np.array([1, 0]))
        assert (columns["image"].shape, columns["image"].dtype) == ((2, 5, 4, 1), torch.uint8)
        assert columns["image"][0, 0, :, 0].tolist() == [20, 21, 22, 23]
        assert columns["label"].tolist() == [1, 0]


def test_classes_have_names(mnist: Path) -> None:
    fashion = FashionMnistDataset(mnist)
    assert (fashion.class_names[9], fashion.num_classes, MnistDataset(mnist).class_names[3]) == ("ankle boot", 10, "3")
    assert fashion[0][0][0, 0, 0] == pytest.approx((0 - 0.2860) / 0.3530)
    assert BadRecords().on_corrupt == "stop"
    with pytest.raises(ConfigError, match=r"Asked for on_corrupt='skpi'. Did you mean 'skip'"):
        FashionMnistDataset(mnist, on_corrupt="skpi")  # type: ignore[arg-type]


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


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Ten records of known pixels in five files."""
    pixels = np.random.default_rng(2).integers(0, 256, (10, RECORD_BYTES), np.uint8)
    pixels[:, 0] = np.arange(10)
    for number in range(5):
        (tmp_path / f"data_batch_{number + 1}.bin").write_bytes(pixels[2 * number : 2 * number + 2].tobytes())
    return tmp_path


def test_broken_records_of_cifar_are_left_out_and_counted_when_asked(cifar: Path) -> None:
    whole = Cifar10Dataset(cifar)
    path = cifar / "data_batch_2.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:] + b"rest")
    with pytest.raises(DataError, match=r'data_batch_2.bin: .* begins at byte 6146 and has 4. .*on_corrupt="skip"'):
        Cifar10Dataset(cifar)
    found = Cifar10Dataset(cifar, on_corrupt="skip")
    assert (found.corrupt.count, found.labels.tolist()) == (2, [0, 1, 3, 4, 5, 6, 7, 8, 9])
    assert torch.equal(found[2][0], whole[3][0])
    assert torch.equal(found[8][0], whole[9][0])
    for number in range(1, 6):
        (cifar / f"data_batch_{number}.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"no record is complete; the first: .*data_batch_1.bin"):
        Cifar10Dataset(cifar, on_corrupt="skip")


def test_a_pipeline_reads_the_bytes_of_cifar_with_channels_last(cifar: Path) -> None:
    dataset = Cifar10Dataset(cifar, num_shards=4, shard_id=3)
    columns = dataset.read_columns(np.array([7, 0]))
    record = (cifar / "data_batch_4.bin").read_bytes()[RECORD_BYTES:]
    assert columns["image"][0].numpy().transpose(2, 0, 1).tobytes() == record[1:]
    assert (dataset.shard, dataset.class_names[7], dataset.num_classes) == ((3, 4), "horse", 10)
    ready = vision.Chain([vision.ToTensor(), vision.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))])
    assert torch.equal(ready(columns["image"][0]), dataset[7][0])
    with pytest.raises(ConfigError, match="Asked for shard_id=4 of num_shards=4"):
        Cifar10Dataset(cifar, num_shards=4, shard_id=4)


def test_a_dataset_travels_to_another_process_without_its_pixels(cifar: Path, mnist: Path) -> None:
    for dataset in (Cifar10Dataset(cifar), IdxDataset(mnist)):
        sent = pickle.dumps(dataset)
        assert len(sent) < 5_000
        assert torch.equal(pickle.loads(sent)[3][0], dataset[3][0])


def test_a_missing_file_of_cifar_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no test_batch.bin; found nothing. Put the file there"):
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
    assert (train.class_names[:3], train.num_classes) == (("daisy", "rose", "2"), 102)
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


def test_broken_flowers_are_left_out_and_counted_when_asked(flowers: Path) -> None:
    whole = (flowers / "jpg" / "image_00003.jpg").read_bytes()
    for broken in (whole[:-40], b"", b"not an image"):
        (flowers / "jpg" / "image_00003.jpg").write_bytes(broken)
        found = FlowersDataset(flowers, on_corrupt="skip")
        assert (found.corrupt.count, found.labels.tolist(), len(found)) == (1, [76], 1)
        assert "image_00003.jpg: cannot be decoded" in found.corrupt.first
        assert found[0][1] == 76
    (flowers / "jpg" / "image_00001.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"None of the 2 images can be decoded; the first: .*image_00003.jpg"):
        FlowersDataset(flowers, on_corrupt="skip")


def test_a_pipeline_reads_flowers_as_large_as_they_are(flowers: Path) -> None:
    dataset = FlowersDataset(flowers)
    images = dataset.read_columns(np.array([1, 0, 1]))["image"]
    assert [image.shape for image in images] == [(30, 40, 3)] * 3
    assert (dataset.num_classes, dataset.class_names[101]) == (102, "102")


def test_several_threads_decode_a_batch_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shade in range(4):
        Image.fromarray(np.full((9, 9, 3), 60 * shade, np.uint8)).save(tmp_path / f"{shade}.png")
    paths = [tmp_path / f"{shade}.png" for shade in (3, 0, 2, 1)]
    met, decoded = threading.Barrier(2, timeout=30), image_decode._decode

    def both(path: Path, side: int | None) -> Any:
        met.wait()  # returns only if two threads decode at once
        return decoded(path, side)

    monkeypatch.setattr(image_decode, "_decode", both)
    images = image_decode.decode_all(paths, side=3, threads=2)
    assert [int(image[0, 0, 0]) for image in images] == [180, 0, 120, 60]
    assert images[0].shape == (3, 3, 3)


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


# -- downloads -------------------------------------------------------------------------------------------------


def test_nothing_but_download_asks_the_network_for_files() -> None:
    source = Path(image_decode.__file__).parents[2]
    asks = re.compile(r"urlopen|OpenerDirector|import requests|import httpx|torch\.hub|load_state_dict_from_url")
    found = {p.relative_to(source).as_posix() for p in source.rglob("*.py") if asks.search(p.read_text())}
    # Jobs ask a server for jobs, and how large and new what a dataset names is; its files come by data/download too.
    assert found == {"data/readers/download.py", "jobs/client.py", "jobs/sources/egress.py", "jobs/sources/remote.py"}


# -- pipelines -------------------------------------------------------------------------------------------------


def create_dataset(folder: Path, repeat_num: int = 1, batch_size: int = 32, **shard: int) -> Any:
    data_set = Cifar10Dataset(folder, **shard)
    data_set = data_set.map(input_columns="label", operations=vision.TypeCast(torch.int32))
    operations = [
        vision.RandomCrop((32, 32), (4, 4, 4, 4)),
        vision.RandomHorizontalFlip(),
        vision.Resize((224, 224)),
        vision.Rescale(1.0 / 255.0, 0.0),
        vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)),
        vision.HWC2CHW(),
    ]
    data_set = data_set.map(input_columns="image", operations=operations)
    return data_set.shuffle(buffer_size=10).batch(batch_size=batch_size, drop_remainder=True).repeat(repeat_num)


def test_the_pipeline_of_a_tutorial_gives_its_batches(cifar: Path) -> None:
    batches = list(ShardedLoader(create_dataset(cifar, repeat_num=3, batch_size=4)))
    assert len(batches) == 6
    assert all(image.shape == (4, 3, 224, 224) and image.dtype == torch.float32 for image, _ in batches)
    assert all(label.dtype == torch.int32 for _, label in batches)
    assert not torch.equal(batches[0][0], batches[2][0])


def test_a_shard_of_eight_of_cifar_has_195_batches_of_32(tmp_path: Path) -> None:
    for number in range(1, 6):
        with (tmp_path / f"data_batch_{number}.bin").open("wb") as file:
            file.truncate(10_000 * RECORD_BYTES)  # zeros, which take no space
    assert create_dataset(tmp_path, num_shards=8, shard_id=7).get_dataset_size() == 195
    assert create_dataset(tmp_path).num_classes == 10


def test_photographs_of_many_sizes_go_through_a_pipeline(flowers: Path) -> None:
    photograph(flowers / "jpg" / "image_00003.jpg", 50, 60)
    sizes = [vision.RandomResizedCrop(24), vision.RandomHorizontalFlip(), vision.ToTensor()]
    ((image, label),) = ShardedLoader(FlowersDataset(flowers).map(sizes, "image").batch(2), shuffle=False)
    assert (image.shape, image.dtype, label.tolist()) == ((2, 3, 24, 24), torch.float32, [101, 76])
    assert abs(image.mean() - 128 / 255) < 0.01


def test_digits_begin_a_pipeline() -> None:
    digits = DigitsDataset(train=False)
    images, labels = next(iter(ShardedLoader(digits.map(lambda label: label + 1, "label").batch(5), shuffle=False)))
    assert torch.equal(images, digits.images[:5])
    assert torch.equal(labels, digits.labels[:5] + 1)

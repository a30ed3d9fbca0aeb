"""The IDX reader on a real set: Fashion-MNIST, as Debian packages it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from phalanx.data.readers.idx import FashionMnistDataset

INSTALLED = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="module")
def fashion_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed set, or one unpacked from the package without installing it."""
    if INSTALLED.is_dir():
        return INSTALLED
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip("Fashion-MNIST is not installed and there is no apt-get to fetch it with")
    folder = tmp_path_factory.mktemp("fashion-mnist")
    folder.chmod(0o755)
    got = subprocess.run(
        ["apt-get", "download", "-q", "dataset-fashion-mnist"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    package = next(folder.glob("*.deb"), None)
    if package is None:
        pytest.skip(f"apt-get could not fetch dataset-fashion-mnist: {got.stderr.strip()[-200:]}")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=60)
    package.unlink()
    return folder / INSTALLED.relative_to("/")


@pytest.mark.dist
def test_fashion_mnist_is_read_whole(fashion_mnist: Path) -> None:
    train, test = FashionMnistDataset(fashion_mnist), FashionMnistDataset(fashion_mnist, train=False)
    assert (len(train), len(test), train.class_names[0]) == (60_000, 10_000, "T-shirt/top")
    assert torch.bincount(train.labels).tolist() == [6000] * 10
    images = torch.stack([image for image, _ in train.__getitems__(range(0, 60_000, 60))])
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02

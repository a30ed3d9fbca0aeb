"""The plain torch.distributed example: the same numbers on any number of ranks, under any launcher."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from launching import WARM, Launch, launch
from ranks import run_ranks

pytestmark = pytest.mark.dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_ddp"
TRAIN = str(EXAMPLE / "train.py")
FASHION_PACKAGE = "dataset-fashion-mnist"
FASHION = Path("usr/share/datasets/fashion-mnist")
SHORT = ("--epochs", "2", "--dropout", "0")
WHEN = r"INFO\|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
LINE = rf"{WHEN}\|{re.escape(TRAIN)}\|\d+\| "


def start(folder: Path, ranks: int, *arguments: str) -> Launch:
    return launch(folder, "-n", str(ranks), "--log-dir", "log", TRAIN, *arguments, program=WARM)


def result(text: str) -> dict[str, Any]:
    """What the RESULT line says, speed aside; exactly one is wanted."""
    (line,) = re.findall(r"^RESULT (\{.*\})$", text, re.MULTILINE)
    found: dict[str, Any] = json.loads(line)
    assert found.pop("samples_per_s") > 0
    return found


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread: the machine is shared with whatever else is tested.
    # Torchrun leaves folders where temporary files are.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """The same training on 1, 2 and 3 ranks."""
    done = [start(tmp_path_factory.mktemp("run"), ranks, *SHORT) for ranks in (1, 2, 3)]
    assert [run.code for run in done] == [0, 0, 0], "".join(run.out + run.err for run in done)
    return done


def test_one_two_and_three_ranks_train_alike(runs: list[Launch]) -> None:
    results = [result(run.log("workerlog.0")) for run in runs]
    assert [found.pop("world_size") for found in results] == [1, 2, 3]
    assert [found.pop("loss") for found in results] == [pytest.approx(result(runs[0].out)["loss"], rel=1e-5)] * 3
    assert results == [results[0]] * 3
    assert results[0]["steps"] == 24


def test_the_log_says_what_the_job_does(runs: list[Launch]) -> None:
    for ranks, run in enumerate(runs, start=1):
        for text in (run.log("workerlog.0"), run.log(f"workerlog.{ranks - 1}")):
            data = "data = scikit-learn's digits, 8x8 pixels enlarged 3 times and padded by 2 to 28x28 (1438 "
            assert re.search(rf"^{WHEN}\|.*\|\d+\| {re.escape(data)}", text, re.M)
            assert re.search(rf"^{LINE}num_batches = {math.ceil(1438 / 128)}$", text, re.M)
            assert re.search(rf"^{LINE}first broadcast start\n{LINE}first broadcast done$", text, re.M)
            epoch = rf"^{LINE}Epoch (\d+) Loss (\d+\.\d{{6}}) Global batch size 128 on {ranks} ranks$"
            lines = re.findall(epoch, text, re.M)
            assert [number for number, _ in lines] == ["0", "1"]
            assert float(lines[1][1]) < float(lines[0][1])
            assert lines[1][1] == f"{result(run.log('workerlog.0'))['loss']:.6f}"
            assert re.search(rf"^{LINE}CPU training time= \d:\d\d:\d\d\.\d+$", text, re.M)


def test_the_end_is_quiet_and_the_result_the_last_word(runs: list[Launch]) -> None:
    for run in runs:
        assert run.log("workerlog.0").splitlines()[-1].startswith("RESULT ")
        assert "destroy" not in run.out + run.err
        assert "WARNING" not in run.log("workerlog.0")


def test_two_runs_on_two_ranks_are_equal_to_the_bit(tmp_path: Path) -> None:
    def train(log: str) -> dict[str, Any]:
        return result(launch(tmp_path, "-n", "2", "--log-dir", log, TRAIN, "--epochs", "1", program=WARM).out)

    with ThreadPoolExecutor() as both:
        first, second = both.map(train, ("first", "second"))
    assert first == second


def test_without_any_launcher_it_is_one_process(tmp_path: Path, runs: list[Launch]) -> None:
    done = python(tmp_path, TRAIN, *SHORT)
    assert done.returncode == 0, done.stderr
    assert result(done.stdout) == pytest.approx(result(runs[0].out), rel=1e-5)
    assert done.stdout.startswith("RESULT ")


def test_torchrun_starts_it_too(tmp_path: Path, runs: list[Launch]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = python(tmp_path, *torchrun, TRAIN, *SHORT)
    assert done.returncode == 0, done.stderr
    assert "nanobind" not in done.stderr  # which tells of objects that outlived the interpreter
    assert result(done.stdout) == pytest.approx(result(runs[1].out), rel=1e-5)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images in MNIST's format: those installed, or Debian's package unpacked for this test alone."""
    if (Path("/") / FASHION).is_dir():
        return Path("/") / FASHION
    folder = tmp_path_factory.mktemp("fashion")
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"{FASHION_PACKAGE} is not installed, and there is no apt-get to fetch it with")
    fetch = ["apt-get", "-q", "-o", "Acquire::http::Timeout=10", "download", FASHION_PACKAGE]
    fetched = subprocess.run(fetch, cwd=folder, capture_output=True, text=True)
    packages = list(folder.glob("*.deb"))
    if fetched.returncode or not packages:
        pytest.skip(f"{FASHION_PACKAGE} is not installed and cannot be fetched: {fetched.stderr.strip()[-200:]}")
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(folder)], check=True)
    return folder / FASHION


def test_it_learns_real_images_from_idx_files(tmp_path: Path, fashion: Path) -> None:
    run = start(tmp_path, 2, "--data", str(fashion), "--steps", "50", "--dropout", "0", "--lr", "0.1")
    assert run.code == 0, run.out + run.err
    assert f"data = {fashion} (60000 images to train on, 10000 to test)" in run.log("workerlog.1")
    found = result(run.out)
    assert found["steps"] == 50
    assert found["loss"] < 0.8 * math.log(10)  # the mean over all steps; a guess among ten costs log(10)
    assert found["test_acc"] > 0.5


def test_a_corrupt_file_is_one_error_of_the_job(tmp_path: Path) -> None:
    images = tmp_path / "train-images-idx3-ubyte"
    images.write_bytes(b"no images")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"no labels")
    run = start(tmp_path, 2, "--data", str(tmp_path))
    assert run.code == 1
    assert f"error: {images}, offset 9: the length of the header" in run.out + run.err
    assert "Traceback" not in run.out + run.err
    assert "broadcast" not in run.log("workerlog.0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_flag_reaches_the_training(tmp_path: Path) -> None:
    run = start(tmp_path, 1, "--gpu", "--smoke")
    assert run.code == 0, run.out + run.err
    assert re.search(r"\| CUDA device name: .+$", run.log("workerlog.0"), re.M)
    assert re.search(r"\| GPU training time= \d:\d\d:\d\d\.\d+$", run.log("workerlog.0"), re.M)


# The averaging, held against one process and against torch's own wrapper.


@contextlib.contextmanager
def example_module(name: str) -> Iterator[ModuleType]:
    """A file of the example as a module, gone again afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))
        for loaded in ("mnist", "train"):
            sys.modules.pop(loaded, None)


def average_one_batch(rows: int) -> dict[str, Any]:
    """On each rank: the gradient of one global batch through the example's wrapper, and through torch's."""
    with example_module("train") as train:
        rank, world = int(train.os.environ["RANK"]), int(train.os.environ["WORLD_SIZE"])
        train.join_ranks(torch.device("cpu"), rank, world)
        train.torch.manual_seed(rank)  # different weights everywhere until the first broadcast
        net = train.Net(dropout=0.0)
        pixels, labels = (
            torch.randn(rows, 1, 28, 28, generator=torch.Generator().manual_seed(7)),
            torch.arange(rows) % 10,
        )
        mine = torch.arange(rows).tensor_split(world)[rank]
        sizes: list[int] = []
        all_reduce = train.dist.all_reduce

        def counted(tensor: torch.Tensor) -> None:
            sizes.append(tensor.numel())
            all_reduce(tensor)

        train.dist.all_reduce = counted
        ours = gradients(train.DistributedDataParallel(net), pixels[mine], labels[mine], rows / world)
        train.dist.all_reduce = all_reduce
        theirs = gradients(torch.nn.parallel.DistributedDataParallel(net), pixels[mine], labels[mine], rows / world)
        alone = gradients(net, pixels, labels, rows)
        return {"rows": len(mine), "sizes": sizes, "ours": ours, "theirs": theirs, "alone": alone}


def gradients(model: torch.nn.Module, pixels: torch.Tensor, labels: torch.Tensor, rows: float) -> list[Any]:
    model.zero_grad()
    (torch.nn.functional.nll_loss(model(pixels), labels, reduction="sum") / rows).backward()
    return [parameter.grad.numpy().copy() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("rows", "shares"), [(128, [43, 43, 42]), (2, [1, 1, 0])])
def test_an_uneven_batch_is_averaged_exactly_in_one_message(rows: int, shares: list[int]) -> None:
    ranks = run_ranks(average_one_batch, 3, rows)
    assert [rank["rows"] for rank in ranks] == shares
    for rank in ranks:
        assert rank["sizes"] == [21840]
        for ours, theirs, alone in zip(rank["ours"], rank["theirs"], ranks[0]["alone"], strict=True):
            assert abs(ours - theirs).max() <= 1e-6
            assert abs(ours - alone).max() <= 1e-6

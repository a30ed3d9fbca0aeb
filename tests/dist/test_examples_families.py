"""The examples written with `px.Model`, each on one process and two ranks: losses fall, and agree."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import launch_warm, result_of
from phalanx.data.readers.cifar import RECORD_BYTES, TEST_FILES, TRAIN_FILES
from phalanx.parallel.session import session
from ranks import run_ranks

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILIES = ("graph", "biology", "detection")

# A network of 50 layers makes differences in the last bit 1,000 times larger in three steps, whoever computes them; at
# a large learning rate one of 18 does, too.
CIFAR = ("--smoke", "--layers", "18", "--norm", "group", "--lr", "0.0005")
ALONE = {
    **{family: (f"families/{family}.py", "--smoke") for family in FAMILIES},
    "text": ("text_transformer/train.py", "--smoke"),
    "cifar": ("cifar_auto_parallel/train.py", *CIFAR, "--parallel_mode", "STAND_ALONE"),
}
BESIDE = {
    **{name: ALONE[name] for name in (*FAMILIES, "text")},
    "text tensor": (*ALONE["text"], "--parallel", "tensor"),
    "text pipeline": (*ALONE["text"], "--parallel", "pipeline"),
    "text auto": (*ALONE["text"], "--parallel", "auto"),
    "cifar": (ALONE["cifar"][0], *CIFAR, "--parallel_mode", "DATA_PARALLEL"),
    "cifar hybrid": (ALONE["cifar"][0], *CIFAR, "--parallel_mode", "HYBRID_PARALLEL"),
}

SCORES, ONE_ANSWER = {"test_acc1", "test_auc", "test_f1", "test_right"}, 0.01
"""What counts answers, and by how much one more that is right may change it: outputs may lie near a threshold."""


def results_of(runs: dict[str, tuple[str, ...]]) -> dict[str, dict[str, float]]:
    """Run one example after the other in this rank."""
    found = {}
    for number, (name, (path, *arguments)) in enumerate(runs.items()):
        spec = importlib.util.spec_from_file_location(f"example{number}", EXAMPLES / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = module.main(arguments)
        session.reset()
        gc.collect()  # the next trains under another strategy
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(results_of, 1, ALONE, timeout_s=90)[0]


@pytest.fixture(scope="module")
def beside() -> list[dict[str, Any]]:
    return run_ranks(results_of, 2, BESIDE, timeout_s=90)


@pytest.mark.parametrize("name", BESIDE)
def test_two_ranks_give_what_one_process_gives(name: str, alone: dict[str, Any], beside: list[dict[str, Any]]) -> None:
    wanted = alone[name.split()[0]]
    for found in (dict(rank[name]) for rank in beside):
        assert found.pop("world_size") == 2
        assert found.pop("samples_per_s") > 0
        assert found["steps"] == wanted["steps"]
        for key, value in found.items():
            assert value == pytest.approx(wanted[key], abs=ONE_ANSWER if key in SCORES else 1e-4), key


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_falls(name: str, alone: dict[str, Any]) -> None:
    assert alone[name]["loss"] < 0.75 * alone[name]["loss_before"]


def test_held_out_text_costs_fewer_bits(alone: dict[str, Any]) -> None:
    before, after = alone["text"]["bits_per_byte_before"], alone["text"]["bits_per_byte"]
    assert after < before - 1.5
    assert alone["text"]["perplexity"] == pytest.approx(2**after, rel=1e-4)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_examples_under_pytest_print_what_they_did_and_pass(tmp_path: Path) -> None:
    scripts = [str(EXAMPLES / name / "train.py") for name in ("cifar_auto_parallel", "text_transformer")]
    done = python(tmp_path, "-m", "pytest", "-s", "-v", "-p", "no:cacheprovider", *scripts)
    assert done.returncode == 0, done.stdout + done.stderr
    cifar = r"train.py::test_train_cifar ===============ds_num 44\nglobal_step: 43, loss: \d\.\d{3}\nend training\n"
    text = r"train.py::test_train_text global_step: 9, loss: \d\.\d{3}\nglobal_step: 19, loss: \d\.\d{3}\nsample: .*\n"
    for seen in (cifar, text):
        assert re.search(seen + r"RESULT .*\nPASSED$", done.stdout, re.MULTILINE), done.stdout


def test_the_whole_of_cifar_is_195_batches_of_8_times_32_and_the_mode_must_fit(tmp_path: Path) -> None:
    for name in (*TRAIN_FILES, *TEST_FILES):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10_000 * RECORD_BYTES)  # black aeroplanes
    done = launch_warm(tmp_path, "-n", "2", str(EXAMPLES / "cifar_auto_parallel" / "train.py"), "--data", str(tmp_path),
                  "--parallel_mode", "STAND_ALONE")  # fmt: skip
    assert done.code == 1
    assert "===============ds_num 195\n" in done.log("workerlog.0")
    assert "parallel_mode STAND_ALONE is for one process, and 2 ranks were launched" in done.out + done.err


def test_the_same_file_runs_with_the_launcher(tmp_path: Path, alone: dict[str, Any]) -> None:
    done = launch_warm(tmp_path, "-n", "2", str(EXAMPLES / "families" / "graph.py"), "--smoke")
    assert done.code == 0, done.out + done.err
    found = result_of(done.log("workerlog.0"))
    assert found["loss"] == pytest.approx(alone["graph"]["loss"], abs=1e-4)
    assert found["world_size"] == 2


def test_the_planner_finds_how_to_train_the_network(tmp_path: Path) -> None:
    train = str(EXAMPLES / "cifar_auto_parallel" / "train.py")
    # Later losses differ by 1e-2 between one process with one thread and one with two.
    said = ("--smoke", "--steps", "3", "--norm", "group", "--lr", "0.001", "--parallel_mode")
    done = launch_warm(tmp_path, "-n", "2", train, *said, "AUTO_PARALLEL")
    assert done.code == 0, done.out + done.err
    assert re.search(r"AUTO_PARALLEL trains with data=\d model=\d .* predicted .* ms a step", done.log("workerlog.0"))
    alone = python(tmp_path, train, *said, "STAND_ALONE")
    losses = [re.findall(r"loss: (\d\.\d+)", seen) for seen in (done.log("workerlog.0"), alone.stdout)]
    assert len(losses[0]) == 3
    assert [float(loss) for loss in losses[0]] == pytest.approx([float(loss) for loss in losses[1]], abs=2e-3)

"""The ResNet example: one file, real images, the same result at any number of ranks, eager and compiled."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import launch_warm

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "resnet" / "train.py"
EPOCH_LINE = re.compile(r"\[Epoch (\d+), batch (\d+)\] loss: (\d+\.\d{5}), acc1: [01]\.\d{5}, acc5: [01]\.\d{5}")


def train(folder: Path, ranks: int, *arguments: str, timeout: float = 100, **variables: str):
    folder.mkdir(exist_ok=True)
    done = launch_warm(folder, "-n", str(ranks), str(SCRIPT), *arguments, timeout_s=timeout, environment=variables)
    assert done.code == 0, done.out + done.err
    log = done.log("workerlog.0")
    result = json.loads(log.splitlines()[-1].removeprefix("RESULT "))
    losses = {(int(e), int(b)): float(loss) for e, b, loss in EPOCH_LINE.findall(log)}
    return result, losses, log


# A small learning rate: at a large one, differences in the last bit grow from step to step, whoever computes them.
SHORT = ("--smoke", "--norm", "group", "--steps", "12", "--lr", "0.005")


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return {n: train(tmp_path_factory.mktemp(f"eager{n}"), n, *SHORT) for n in (1, 2, 3)}


def test_the_result_does_not_depend_on_the_number_of_ranks(eager):
    for n in (2, 3):
        for name in ("loss", "test_acc1", "test_acc5", "steps"):
            assert eager[n][0][name] == pytest.approx(eager[1][0][name], abs=2e-3)
        assert eager[n][0]["world_size"] == n
        assert eager[n][1] == pytest.approx(eager[1][1], abs=1e-4)


def test_a_line_every_5_batches_and_the_contract_at_the_start(eager):
    _, losses, log = eager[2]
    assert list(losses) == [(0, 0), (0, 5), (0, 10)]
    assert "global batch 64 = 32 per rank x 2; 23 steps per epoch" in log
    assert re.search(r"Find all_reduce operators: 62\. After fusion: 62 -> \d", log)
    lines = ("Start collective training example:", "Run on cpu.", "Execute startup program.", "Start training:")
    assert sorted(lines, key=log.index) == list(lines)


def test_the_loss_falls_at_the_published_learning_rate(tmp_path):
    result, losses, _ = train(tmp_path, 2, "--width", "16", "--epochs", "2", "--lr", "0.1")
    assert losses[(1, 20)] < losses[(0, 0)] / 2
    assert result["test_acc1"] > 0.6


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_compiled_losses_equal_eager_ones(tmp_path):
    """Of the smallest network: nearly all of the time goes into compiling, half a second a kernel."""
    small = (*SHORT, "--layers", "4")
    _, eager, _ = train(tmp_path / "eager", 2, *small)
    cache = str(tmp_path / "cache")  # a compilation that was killed elsewhere leaves half a file
    _, losses, log = train(tmp_path / "compiled", 2, *small, "--graph", timeout=400, TORCHINDUCTOR_CACHE_DIR=cache)
    assert losses == pytest.approx(eager, abs=1e-4)
    assert re.search(r"compiling \d+\.\d s \(1 forward and \d optimizer graphs", log)


def test_labels_outside_the_classes_are_named_before_the_first_step(tmp_path):
    command = [sys.executable, "-m", "phalanx.launch", "-n", "2", "--log-dir", tmp_path / "log", SCRIPT, "--smoke"]
    done = subprocess.run([*command, "--class-dim", "7"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "The label of sample 5 is 9, outside the model's 7 classes" in done.stdout + done.stderr
    assert "[Epoch 0" not in done.stdout


def test_it_runs_without_a_launcher():
    done = subprocess.run([sys.executable, SCRIPT, "--smoke"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))["world_size"] == 1

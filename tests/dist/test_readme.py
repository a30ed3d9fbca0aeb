"""What the README shows is run: its diff, its commands, its Fleet block, its printed output."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent

PRELUDE = """
import sys
sys.path.insert(0, {examples!r})
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from model import ResNet

torch.manual_seed(0)
images = TensorDataset(torch.randn(128, 3, 8, 8), torch.randint(10, (128,)))
"""
CLOSING = '\nprint("LAST", loss.item())\n'


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(b for b in blocks if containing in b)


def sides_of_the_diff() -> tuple[list[str], list[str]]:
    lines = block("diff", "px.distribute").splitlines()
    plain = [line[1:] for line in lines if line[0] in " -"]
    ours = [line[1:] for line in lines if line[0] in " +"]
    return plain, ours


def run(*command: object, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_diff_changes_at_most_four_lines():
    lines = block("diff", "px.distribute").splitlines()
    assert sum(line.startswith("+") for line in lines) <= 4
    assert sum(line.startswith("-") for line in lines) <= 4


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    prelude = PRELUDE.format(examples=str(ROOT / "examples" / "resnet"))
    for name, lines in zip(("plain.py", "train.py"), sides_of_the_diff(), strict=True):
        (folder / name).write_text(prelude + "\n".join(lines) + CLOSING)
    return folder


def test_both_sides_of_the_diff_run_alone_and_ours_on_two_ranks(scripts):
    run(sys.executable, "plain.py", cwd=scripts)
    assert "LAST" in run(sys.executable, "train.py", cwd=scripts).stdout
    assert "LAST" in run(BIN / "phalanx", "run", "-n", "2", "train.py", cwd=scripts).stdout
    assert "phalanx run -n 2 train.py" in README


def test_the_fleet_block_runs(tmp_path):
    script = block("python", "from phalanx import fleet")
    prelude = "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    ending = "\nmodel(torch.ones(4, 2)).sum().backward()\noptimizer.step()\nprint('DONE', fleet.worker_num())\n"
    (tmp_path / "fleet_script.py").write_text(prelude + script + ending)
    assert "DONE 2" in run(BIN / "fleetrun", "-n", "2", "fleet_script.py", cwd=tmp_path).stdout


def test_the_five_steps_of_the_guide_to_parameter_servers_train_with_a_server(tmp_path):
    guide = (ROOT / "docs" / "parameter-server.md").read_text()
    script = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
    (tmp_path / "train.py").write_text(script + "    print('DONE', fleet.worker_num(), loss.item())\n")
    command = "phalanx run --server-num 1 --worker-num 2 train.py"
    assert command in guide
    name, *arguments = command.split()
    done = run(BIN / name, *arguments, cwd=tmp_path)
    assert "DONE 2" in done.stdout
    assert "same rows" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["phalanx run --help", "phalanx ps", "phalanx doctor", "phalanx env --list"])
def test_every_other_command_answers(command, tmp_path):
    assert command in README
    name, *arguments = command.split()
    assert run(BIN / name, *arguments, cwd=tmp_path).stdout


def test_quickstart_prints_what_the_readme_shows(tmp_path):
    recipe = run("make", "-n", "quickstart", cwd=ROOT).stdout.splitlines()
    command = next(line for line in recipe if "examples/resnet/train.py" in line).split()
    script = command.index("examples/resnet/train.py")
    launcher = [str(ROOT / command[0]), *command[1:script], "--log-dir", str(tmp_path / "log")]
    printed = run(*launcher, *command[script:], "--steps", "6", cwd=ROOT).stdout
    shown = block("text", "[Epoch 0, batch 5]")
    for text in (printed, shown):
        assert re.search(r"\[Epoch 0, batch 5\] loss: \d+\.\d{5}, acc1: \d\.\d{5}, acc5: \d\.\d{5}", text)
        assert re.search(r'^RESULT \{.*"test_acc1": [\d.]+', text, re.MULTILINE)
    for line in shown.splitlines()[:2]:
        assert line.replace(" log/", f" {tmp_path}/log/") in printed


def test_the_failure_shown_is_the_failure_printed(tmp_path):
    shown = block("text", "failed first")
    (tmp_path / "train.py").write_text(
        "import phalanx as px\ncontext = px.init()\nif context.rank == 1:\n"
        "    raise ValueError('label 12 outside classes')\n"
        "px.comm.all_reduce(__import__('torch').ones(1))\n"
    )
    done = subprocess.run(
        [BIN / "phalanx", "run", "-n", "2", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    ending = (done.stdout + done.stderr).split("failed first", 1)[1]
    for line in ("rank 1 raised ValueError: label 12 outside classes", "log file: log/workerlog.1"):
        assert line in shown
        assert line in ending

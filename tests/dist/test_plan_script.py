"""`phalanx plan` of a script: what it would train, planned for a cluster that is not there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from phalanx.plan.files import load_plan

pytestmark = pytest.mark.dist

DISTRIBUTED = """
import sys, torch
import phalanx as px
print("options", sys.argv[1:])
net = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
net, optimizer, loader = px.distribute(net, optimizer, rows, global_batch=32)
raise SystemExit("it went on to train")
"""

MODEL = """
import torch
import phalanx as px
net = torch.nn.Linear(64, 8)
model = px.Model(net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1))
rows = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
model.eval(rows)
model.train(1, rows, global_batch=16)
raise SystemExit("it went on to train")
"""

NEITHER = """
import torch
print(torch.ones(1))
"""


def planned(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "plan", script, *flags], capture_output=True, text=True, timeout=120
    )


def test_scripts_are_planned_without_training(tmp_path):
    (tmp_path / "distributed.py").write_text(DISTRIBUTED)
    (tmp_path / "model.py").write_text(MODEL)
    saved = tmp_path / "plan.json"
    flags = ("--cluster", "a100x2", "--json", "--optimizer", "sgd", "--why-not", "tp=2", "--save", str(saved))
    done = planned(str(tmp_path / "distributed.py"), "--lr", "0.1", *flags)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["where"].startswith("1 x (2 A100")
    assert told["why_not"][0].startswith("With tp=2 the best is data=1 model=2")
    assert "options ['--lr', '0.1']" in done.stderr
    assert load_plan(saved).world_size == 2

    done = planned(str(tmp_path / "model.py"), "--cluster", "a100x2", "--limit", "dp=2")
    assert done.returncode == 0, done.stderr
    assert "Fastest of each arrangement" in done.stdout


def test_a_script_that_trains_nothing_says_so(tmp_path):
    (tmp_path / "neither.py").write_text(NEITHER)
    done = planned(str(tmp_path / "neither.py"), "--cluster", "a100x2")
    assert done.returncode != 0
    assert "ran to its end and distributed no model with data" in done.stderr
    assert "Traceback" not in done.stderr

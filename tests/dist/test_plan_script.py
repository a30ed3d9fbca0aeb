"""`phalanx plan` of a script: what it would train, planned for a cluster that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rich.cells import cell_len

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


def planned(script: str, *flags: str, language: str = "en") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "plan", script, *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PHALANX_LANG": language, "COLUMNS": "80"},
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

    trace, timeline, picture = (tmp_path / name for name in ("step.json", "step.svg", "model.svg"))
    drawn = ("--trace", str(trace), "--timeline", str(timeline), "--picture", str(picture))
    done = planned(str(tmp_path / "model.py"), "--cluster", "a100x2", "--limit", "dp=2", *drawn, language="zh")
    assert done.returncode == 0, done.stderr
    assert "各种排布中最快的方案" in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert any(event["name"] == "optimizer" for event in json.loads(trace.read_text())["traceEvents"])
    assert "每个进程" in timeline.read_text()
    assert picture.read_text().startswith("<svg")
    assert f"{trace}：每步" in done.stderr


def test_where_an_answer_cannot_be_written_is_said_before_the_search(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    done = planned(str(tmp_path / "model.py"), "--cluster", "a100x2", "--save", str(tmp_path / "no" / "plan.json"))
    assert done.returncode != 0
    assert "there is no folder" in done.stderr
    assert "planning Linear" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_trains_nothing_says_so(tmp_path):
    (tmp_path / "neither.py").write_text(NEITHER)
    done = planned(str(tmp_path / "neither.py"), "--cluster", "a100x2")
    assert done.returncode != 0
    assert "ran to its end and distributed no model with data" in done.stderr
    assert "Traceback" not in done.stderr

"""`phalanx plan` of a script: what it would train, planned for a cluster that is not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from phalanx.cli.plan import command
from phalanx.errors import ConfigError, PlanError
from phalanx.plan.files import load_plan, save_plan
from phalanx.plan.value import Average, ParamRule
from phalanx.train.model.plan_script import plan_script, simulate_script

pytestmark = pytest.mark.dist

DISTRIBUTED = """
import sys, torch
import phalanx as px
print("options", sys.argv[1:])
net = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rows = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
net, optimizer, loader = px.distribute(net, optimizer, rows, global_batch=32)
raise SystemExit("it continued to train")
"""

REFUSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr")
parser.parse_args()
"""

MODEL = """
import torch
import phalanx as px
net = torch.nn.Linear(64, 8)
model = px.Model(net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1))
rows = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
model.eval(rows)
model.train(1, rows, global_batch=16)
raise SystemExit("it continued to train")
"""


VERBS = """
import torch
from phalanx import fleet
strategy = fleet.DistributedStrategy()
strategy.amp, strategy.tensor_parallel = True, True
strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
net = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
net = fleet.distributed_model(net)
net.eval()(torch.randn(2, 64))
for rows in torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16):
    net.train()(rows)
    raise SystemExit("it continued to train")
"""

TABLES = """
import torch
from phalanx import fleet, ps
fleet.init()
net = torch.nn.Sequential(ps.SparseEmbedding(4), torch.nn.Flatten(), torch.nn.Linear(8, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
net = fleet.distributed_model(net)
net(torch.zeros(4, 2, dtype=torch.long)).sum().backward()
raise SystemExit("it continued to train")
"""

NAMED = """
import torch
import phalanx as px
from phalanx import fleet

class Net(torch.nn.Linear):
    def forward(self, rows, **named):
        return super().forward(rows) * named["scale"]

fleet.init(is_collective=True)
kept = []
for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adam):
    net = Net(64, 8)
    kept.append((fleet.distributed_optimizer(kind(net.parameters(), 0.1)), fleet.distributed_model(net)))
net = kept[1][1]
with torch.no_grad():
    net(torch.zeros(1, 64), scale=2)
for (rows,) in px.data.ShardedLoader((torch.randn(64, 64),), batch_size=16):
    net(rows, scale=2)
"""

SEVERAL = """
import torch
from phalanx import fleet

class Net(torch.nn.Linear):
    def forward(self, *several, **named):
        return super().forward(several[0])

net = fleet.distributed_model(Net(64, 8))
net(torch.zeros(16, 64){named})
"""


def planned(script: str, *flags: str, language: str = "en") -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(command, [script, *flags], env={"PHALANX_LANG": language, "COLUMNS": "80"})


def test_scripts_are_planned_without_training(tmp_path):
    (tmp_path / "distributed.py").write_text(DISTRIBUTED)
    (tmp_path / "model.py").write_text(MODEL)
    saved = tmp_path / "plan.json"
    flags = ("--cluster", "a100x2", "--json", "--optimizer", "sgd", "--save", str(saved))
    flags += ("--why-not", "tp=1", "--why-not", "tp=2")
    plan = (sys.executable, "-m", "phalanx", "plan", str(tmp_path / "distributed.py"), "--lr", "0.1")
    done = subprocess.run([*plan, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["where"].startswith("1 x (2 A100")
    assert told["why_not"][0].startswith("With tp=1 the best is data=2 model=1")
    assert told["why_not"][1].startswith("The answer keeps to tp=2 already: data=1 model=2")
    assert "options ['--lr', '0.1']" in done.stderr
    assert load_plan(saved).world_size == 2

    trace, timeline, picture = (tmp_path / name for name in ("step.json", "step.svg", "model.svg"))
    drawn = ("--trace", str(trace), "--timeline", str(timeline), "--picture", str(picture))
    done = planned(str(tmp_path / "model.py"), "--cluster", "a100x2", "--limit", "dp=2", *drawn, language="zh")
    assert done.exit_code == 0, done.stderr
    assert "各种排布中最快的方案" in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert any(event["name"] == "optimizer" for event in json.loads(trace.read_text())["traceEvents"])
    assert "每个进程" in timeline.read_text()
    assert picture.read_text().startswith("<svg")
    assert f"{trace}：每步" in done.stderr


def test_the_plan_of_a_script_is_simulated_also_when_it_was_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(DISTRIBUTED)
    flags = ("train.py", "--cluster", "a100x2,usd=3.6", "--json")
    answer = json.loads(planned(*flags, "--limit", "dp=2", "--limit", "zero=0", "--save", "plan.json").stdout)
    done = planned(*flags, "--plan", "plan.json", "--trace", "step.json")
    assert done.exit_code == 0, done.stderr
    step = json.loads(done.stdout)
    assert step["step_time_s"] == pytest.approx(answer["step_time_s"])
    assert step["usd_per_step"] == pytest.approx(2 * 3.6 / 3600 * step["step_time_s"])
    assert step["ranks"][0]["peak_bytes"] == pytest.approx(answer["memory_bytes"])
    assert step["rows_per_s"] == pytest.approx(32 / step["step_time_s"])
    assert re.search(r"step.json: .* a step, idle 0.0%, peak rank", done.stderr)
    assert json.loads(Path("step.json").read_text())["otherData"]["step_time_s"] == step["step_time_s"]

    plan = load_plan("plan.json")
    save_plan(plan.model_copy(update={"params": (ParamRule(match="*", update=Average(every=8)),)}), "plan.json")
    with pytest.raises(PlanError, match=r"for 2 ranks, and the cluster .* has 4 devices"):
        simulate_script(tmp_path / "missing.py", (), load_plan("plan.json"), cluster="a100x4")
    done = planned("train.py", "--cluster", "a100x2", "--plan", "plan.json")
    assert re.search(r"update=average: .* a step\n", done.stdout)
    assert "each rank" in done.stdout
    assert "all 2 ranks do the same" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("train.py", "--plan", "plan.json", "--limit", "tp=1", "--save", "other.json"), "Leave out --limit, --save"),
        (("run.json", "--plan", "plan.json"), "--plan, --save and --picture are for a script"),
    ],
)
def test_a_plan_is_simulated_and_nothing_searched(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run.json"):
        Path(name).touch()
    done = CliRunner().invoke(command, flags)
    assert done.exit_code == 2
    assert message in done.output


def test_a_script_of_verbs_is_planned_at_its_first_training_step(tmp_path, caplog):
    (tmp_path / "verbs.py").write_text(VERBS)
    with caplog.at_level("INFO", "phalanx.train"):
        answer = plan_script(tmp_path / "verbs.py", (), cluster="a100x4")
    assert "for a global batch of 64 samples" in caplog.text  # 16 of every device
    assert "ignored settings of the script's strategy, which the planner decides: tensor_parallel" in caplog.text
    assert answer.layers.optimizer == "sgd"  # as the script has it
    assert any(rule.dtype == "bfloat16" for rule in answer.plan.modules)


def test_a_loop_of_ones_own_is_planned_as_it_calls_its_model(tmp_path, caplog):
    script = tmp_path / "s.py"
    script.write_text(NAMED)
    with caplog.at_level("INFO", "phalanx.train"):
        assert plan_script(script, (), cluster="a100x4").layers.optimizer == "sgd"  # that of this model
    assert "for a global batch of 64 samples" in caplog.text  # 16 of every device, as the loader says
    assert "for adam" not in caplog.text
    script.write_text(SEVERAL.replace("{named}", ""))
    with caplog.at_level("INFO", "phalanx.train"):
        assert plan_script(script, (), cluster="a100x2").layers.optimizer == "adam"
    assert "passes no optimizer, so the plan is for adam" in caplog.text
    script.write_text(SEVERAL.replace("{named}", ", scale=2"))
    with pytest.raises(ConfigError, match="beside several, which takes inputs by position alone"):
        plan_script(script, (), cluster="a100x2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cluster", "a100x2", "--save", "no/plan.json"), "there is no folder"),
        (("--cluster", "a100x2", "--trace", "no/step.json"), "there is no folder"),
        (("--cluster", "a100y2"), "Asked for the cluster 'a100y2'"),
        (("--cluster", "a100x2", "--why-not", "tp=many"), "the value is not an integer"),
    ],
)
def test_mistakes_in_the_command_are_said_before_the_script_runs(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stops.py").write_text("raise SystemExit('it ran')")
    done = CliRunner().invoke(command, ["stops.py", *flags])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import torch", r"finished without training a distributed model\. Give a script that calls px"),
        ("raise SystemExit(3)", r"ended \(3\) before it trained a model"),
        (
            "def f():\n    raise ValueError('mine')\nf()",
            r"Make `python .*s\.py` work first:\nTraceback.*\n  File .*s\.py.*3",
        ),
        ("def f(:", r"work first:\n +File .*s\.py.*, line 1\n"),
    ],
)
def test_a_script_that_trains_nothing_says_so(tmp_path, script, message):
    (tmp_path / "s.py").write_text(script)
    with pytest.raises(ConfigError, match=message) as raised:
        plan_script(tmp_path / "s.py", (), cluster="a100x2")
    assert "runpy" not in str(raised.value)


def test_a_script_finds_its_neighbours_by_its_own_path(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text("raise SystemExit(__file__)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "s.py"))):
        plan_script(Path("s.py"), (), cluster="a100x2")


def test_a_model_is_planned_with_what_it_adds_to_its_strategy(tmp_path):
    script = MODEL.replace("model.eval(rows)\n", "").replace("0.1))\n", "0.1), compiled=True)\n")
    said = "px.set_auto_parallel_context(gradients_mean=False)\nnet ="
    (tmp_path / "model.py").write_text(script.replace("net =", said, 1))
    base = plan_script(tmp_path / "model.py", (), cluster="a100x2").base
    assert base.graph
    assert base.gradient_scale_configs["scale_strategy"] == "sum"


def test_a_cluster_that_cannot_be_read_is_refused_before_the_script_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where `phalanx calibrate` leaves what `here` means
    (tmp_path / "train.py").write_text("print('the script ran')")
    for options in ({}, {"cluster": "a100y2"}):
        with pytest.raises(ConfigError):
            plan_script(tmp_path / "train.py", (), **options)
    assert "the script ran" not in "".join(capfd.readouterr())


def test_a_model_with_tables_is_not_planned(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TABLES)
    for cluster in ("a100x1", "a100x2"):
        with pytest.raises(PlanError, match=r"whose parameter '0\..*' stands for a table .* --server-num 1"):
            plan_script(tmp_path / "train.py", (), cluster=cluster)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--limt"], "If --limt was meant for `phalanx plan`: did you mean '--limit'?"),
        (["--nothing-like-it"], None),
        (["--", "--limit"], None),
    ],
)
def test_a_flag_that_the_script_refuses_names_the_nearest_of_the_command(
    tmp_path: Path, flags: list[str], hint: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(REFUSES)
    result = CliRunner().invoke(command, [str(script), "--cluster", "cpux2", "--lr", "0.1", *flags, "tp<=8"])
    assert isinstance(result.exception, ConfigError)
    assert "ended (2) before it trained a model" in str(result.exception)
    assert str(result.exception).endswith(hint or "px.Model(...).train(...).")


def test_outputs_count_unless_the_scripts_loop_lets_them_go(tmp_path):
    for name, script in (("model.py", MODEL), ("distributed.py", DISTRIBUTED)):
        (tmp_path / name).write_text(script)
    own_loop = plan_script(tmp_path / "distributed.py", (), cluster="a100x1")
    of_model = plan_script(tmp_path / "model.py", (), cluster="a100x1")
    assert (own_loop.layers.return_outputs, of_model.layers.return_outputs) == (True, False)
    kept, released = (
        json.loads(planned(str(tmp_path / "distributed.py"), "--json", "--cluster", "a100x1", *flags).stdout)
        for flags in ((), ("--no-return-outputs",))
    )
    outputs = 32 * 8 * 4
    assert 0 < kept["memory_bytes"] - released["memory_bytes"] <= outputs

"""Under our launcher a script is told, once, that its ranks train the same rows or do not train together."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import launch_warm
from phalanx.launch.rank.isolated_ranks import watch_steps
from ranks import run_ranks

pytestmark = pytest.mark.dist

START = """
import os
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import phalanx as px

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = """
for x, y in loader:
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
"""
SAME_ROWS = "ranks 0 and 1 train on the same rows: the loader is not shared out over the ranks. Give it to"
OWN_ORDERS = "each rank draws its batches from a DataLoader of its own, RandomSampler over 64 rows"
NEVER_MET = "the 2 ranks train side by side, each a model of its own: the script never joins them. Call model"
NOT_GIVEN = "each a model of its own: it calls init, but gives no model to be distributed"

DISTRIBUTED = "model, optimizer, _ = px.distribute(model, optimizer)\n"
PLAIN = "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
SHARDED = "px.init()\nloader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))\n"
HANDED_OVER = "model, optimizer, loader = px.distribute(model, optimizer, DataLoader(data, batch_size=8))\n"
SEEDS = "torch.manual_seed(int(os.environ['RANK']))\n"
FOUR_LINES = (
    "from phalanx import fleet\nfleet.init(is_collective=True)\n"
    "optimizer = fleet.distributed_optimizer(optimizer)\nmodel = fleet.distributed_model(model)\n"
)
OWN_ROWS = "data = torch.utils.data.Subset(data, range(int(os.environ['RANK']), 63, 2))\n"
DDP = "torch.distributed.init_process_group('gloo')\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n"


def launched(folder: Path, script: str) -> str:
    """Return what a job prints that the launcher has started."""
    (folder / "train.py").write_text(START + script + LOOP)
    done = launch_warm(folder, "-n", "2", "train.py")
    assert done.code == 0, done.err
    assert "trained" in done.out
    return done.out + done.err


def execute(script: str) -> None:
    """Run a script, watched as the launcher has it."""
    watch_steps(2)
    exec(compile(START + script + LOOP, "train.py", "exec"), {"__name__": "__main__"})


def executed(script: str) -> str:
    """Return what two ranks print that are not started anew."""
    outcomes = run_ranks(execute, 2, script, expect_failure=True)
    assert not any(outcome.failed for outcome in outcomes), outcomes
    assert all("trained" in outcome.output for outcome in outcomes)
    return "".join(outcome.output for outcome in outcomes)


def assert_said_once(text: str, warning: str) -> None:
    assert text.count(warning) == 1
    assert sum(known in text for known in (SAME_ROWS, OWN_ORDERS, NEVER_MET, NOT_GIVEN)) == 1


@pytest.mark.parametrize(
    ("script", "warning"),
    [(DISTRIBUTED + PLAIN, SAME_ROWS), (SEEDS + FOUR_LINES + PLAIN, OWN_ORDERS)],
    ids=["loader", "loader, with seeds of its own on each rank"],
)
def test_a_loader_that_was_forgotten_is_said_once(script: str, warning: str) -> None:
    assert_said_once(executed(script), warning)


@pytest.mark.parametrize(
    ("script", "warning"),
    [(PLAIN, NEVER_MET), ("px.init()\n" + PLAIN, NOT_GIVEN)],
    ids=["everything", "all but init"],
)
def test_what_was_forgotten_is_said_once(tmp_path: Path, script: str, warning: str) -> None:
    assert_said_once(launched(tmp_path, script), warning)


def assert_nothing_said(text: str) -> None:
    assert not any(known in text for known in (SAME_ROWS, OWN_ORDERS, NEVER_MET, "side by side"))


@pytest.mark.parametrize(
    "script",
    [DISTRIBUTED + SHARDED, HANDED_OVER, SEEDS + OWN_ROWS + DISTRIBUTED + PLAIN],
    ids=["sampler", "distribute", "rows of its own"],
)
def test_loaders_that_are_meant_are_not_remarked_upon(script: str) -> None:
    assert_nothing_said(executed(script))


@pytest.mark.parametrize(
    "script",
    [DDP + PLAIN, "px.init()\n" + DDP.splitlines()[1] + "\n" + SHARDED],
    ids=["torch alone", "DDP after init"],
)
def test_what_is_meant_is_not_remarked_upon(tmp_path: Path, script: str) -> None:
    assert_nothing_said(launched(tmp_path, script))

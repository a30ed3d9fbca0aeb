"""Under our launcher a script is told, once, that its ranks train the same rows or do not train together."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import launch

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


def said(folder: Path, script: str) -> str:
    (folder / "train.py").write_text(START + script + LOOP)
    done = launch(folder, "-n", "2", "train.py")
    assert done.code == 0, done.err
    assert "trained" in done.out
    return done.out + done.err


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        (DISTRIBUTED + PLAIN, SAME_ROWS),
        (SEEDS + FOUR_LINES + PLAIN, OWN_ORDERS),
        (PLAIN, NEVER_MET),
        ("px.init()\n" + PLAIN, NOT_GIVEN),
    ],
    ids=["loader", "loader, with seeds of its own on each rank", "everything", "all but init"],
)
def test_what_was_forgotten_is_said_once(tmp_path: Path, script: str, warning: str) -> None:
    text = said(tmp_path, script)
    assert text.count(warning) == 1
    assert sum(told in text for told in (SAME_ROWS, OWN_ORDERS, NEVER_MET, NOT_GIVEN)) == 1


@pytest.mark.parametrize(
    "script",
    [DISTRIBUTED + SHARDED, HANDED_OVER, SEEDS + OWN_ROWS + DISTRIBUTED + PLAIN, DDP + PLAIN, "px.init()\n" + DDP.splitlines()[1] + "\n" + SHARDED],
    ids=["sampler", "distribute", "rows of its own", "torch alone", "DDP after init"],
)
def test_what_is_meant_is_not_remarked_upon(tmp_path: Path, script: str) -> None:
    text = said(tmp_path, script)
    assert not any(told in text for told in (SAME_ROWS, OWN_ORDERS, NEVER_MET, "side by side"))

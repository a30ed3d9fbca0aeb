"""Scripts for Accelerate and Lightning run as they are under `phalanx run`."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launching import launch_warm

pytestmark = pytest.mark.dist

DATA = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
rows = TensorDataset(x, x.sum(1, keepdim=True))
net = nn.Linear(4, 1)
"""

ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows, batch_size=8))
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(net(x), y))
    optimizer.step()
ranks, weight = accelerator.num_processes, accelerator.unwrap_model(net).weight
accelerator.end_training()
"""
)

LIGHTNING = (
    DATA
    + """
import lightning
import torch.distributed as dist

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
class Own(torch.utils.data.Sampler):
    # The rows of this rank, of batches of 16.
    def __iter__(self):
        return (16 * batch + row for batch in range(2) for row in range(16) if row % 2 == trainer.global_rank)

    def __len__(self):
        return 16

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, use_distributed_sampler=False, **quiet
)
trainer.fit(Module(), DataLoader(rows, batch_size=8, sampler=Own()))
ranks, weight = trainer.world_size, net.weight
"""
)

SAVED = """
import json, os
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump([ranks, *weight.flatten().tolist()], file)
"""


def by_hand() -> list[float]:
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        exec(DATA, names)
    net, (x, y) = names["net"], names["rows"].tensors
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for at in (0, 16):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[at : at + 16]), y[at : at + 16]).backward()
        optimizer.step()
    weights: list[float] = net.weight.flatten().tolist()
    return weights


@pytest.mark.parametrize(("package", "script"), [("accelerate", ACCELERATE), ("lightning", LIGHTNING)])
def test_two_ranks_train_as_one_process(package: str, script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make setup")
    (tmp_path / "train.py").write_text(script + SAVED)
    run = launch_warm(tmp_path, "-n", "2", "train.py", timeout_s=110.0)
    assert run.code == 0, run.out + run.err
    expected = [2, *(pytest.approx(weight, rel=1e-5) for weight in by_hand())]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == expected

"""Training on a device with memory of its own (`simulated_device`) gives what the CPU gives, and mixes are errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
import simulated_device
from phalanx import fleet
from phalanx.data.samples import batch
from ps_servers import SECRET, servers
from ranks import run_ranks

pytestmark = pytest.mark.dist


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(26, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def body() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def parts(strategy: Any = None) -> tuple[Any, Any, Any]:
    model = body()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return px.distribute(model, optimizer, rows(), global_batch=8, shuffle=True, strategy=strategy)


def loop(model: Any, optimizer: Any, loader: Any, epochs: int = 2) -> list[float]:
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(px.global_mean(loss).item())
    return losses


def own_loop(_: Path) -> Any:
    return loop(*parts())


def accumulated(_: Path) -> Any:
    strategy = px.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2, "avg": True}
    return loop(*parts(strategy))


def stepped(_: Path) -> Any:
    model, optimizer, loader = parts()
    step = px.train_step(model, nn.functional.cross_entropy, optimizer)
    return [step(x, y).loss.item() for x, y in loader]


def float16(_: Path) -> Any:
    strategy = px.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "float16"}
    model, optimizer, loader = parts(strategy)
    step = px.train_step(model, nn.functional.cross_entropy, optimizer)
    return [step(x, y).loss.item() for _ in range(2) for x, y in loader]


def recomputed(_: Path) -> Any:
    strategy = px.DistributedStrategy()
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": ["0", "3"], "enable_offload": True}
    return loop(*parts(strategy))


def evaluated(_: Path) -> Any:
    model, optimizer, loader = parts()
    loop(model, optimizer, loader)
    return px.evaluate(model, rows(), ["acc1", "auc", "f1"], loss_fn=nn.functional.cross_entropy, batch_size=4)


def resumed(folder: Path) -> Any:
    model, optimizer, loader = parts()
    checkpointer = px.Checkpointer(folder, model, optimizer, loader, every=3)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        checkpointer.step()
    px.save(folder / "end", model, optimizer, background=True)
    px.checkpoint.wait()
    other, its_optimizer, its_loader = parts()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    px.load(folder / "end", other, its_optimizer)
    return losses + loop(other, its_optimizer, its_loader, 1)


def high_level(folder: Path) -> Any:
    net = body()
    model = px.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), 0.1), metrics={"acc1"})
    model.train(2, rows(), [px.LossMonitor()], batch_size=8)
    return [*(param.sum().item() for param in net.parameters()), *model.eval(rows(), batch_size=8).values()]


class Tabled(nn.Module):
    """A table of embeddings before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = px.ps.SparseEmbedding(4, name="item")
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.items(ids)).squeeze(1)


def tabled(_: Path) -> Any:
    fleet.init(strategy=fleet.DistributedStrategy())
    torch.manual_seed(2)
    ids = torch.randint(9, (24,))
    data = torch.utils.data.TensorDataset(ids, (ids % 2).float())
    model: Any = Tabled()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = px.distribute(model, optimizer, data, global_batch=8)
    fleet.init_worker()
    losses = []
    for i, y in loader:
        loss = F.binary_cross_entropy_with_logits(model(i), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    fleet.barrier_worker()
    fleet.stop_worker()
    return losses


def on_device(scenario: Callable[[Path], Any], folder: Path) -> Any:
    """Run a scenario where the device is; return what it returned, and whether the device computed anything."""
    simulated_device.install()
    simulated_device.calls.clear()
    result = scenario(folder)
    assert px.init().device.type == "sim"
    return result, len(simulated_device.calls)


SCENARIOS = [own_loop, accumulated, stepped, float16, recomputed, evaluated, resumed, high_level]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_device_with_memory_of_its_own_gives_what_the_cpu_gives(
    scenario: Callable[[Path], Any], tmp_path: Path
) -> None:
    (expected,) = run_ranks(scenario, 1, tmp_path / "cpu")
    ((result, calls),) = run_ranks(on_device, 1, scenario, tmp_path / "device")
    assert calls > 100
    assert result == pytest.approx(expected, rel=1e-5)


def test_tables_on_cpu_servers_serve_a_worker_on_a_device(tmp_path: Path) -> None:
    results = []
    for scenario in ((tabled,), (on_device, tabled)):
        with servers(1) as running:
            listed = ",".join(server.endpoint for server in running)
            env = {
                "PHALANX_SERVER_ENDPOINTS": listed,
                "PADDLE_PSERVERS_IP_PORT_LIST": listed,
                "PHALANX_JOB_SECRET": SECRET.hex(),
            }
            results += run_ranks(scenario[0], 1, *scenario[1:], tmp_path, env=env)
    expected, (losses, calls) = results
    assert calls > 10
    assert losses == pytest.approx(expected, rel=1e-5)


def batches_left_on_the_host(folder: Path) -> Any:
    batch.move_to_device = lambda value, device: value  # type: ignore[assignment]
    return own_loop(folder)


@pytest.mark.parametrize("mistake", [batches_left_on_the_host], ids=lambda mistake: mistake.__name__)
def test_a_mix_of_host_and_device_is_an_error(mistake: Callable[[Path], Any], tmp_path: Path) -> None:
    (outcome,) = run_ranks(on_device, 1, mistake, tmp_path, expect_failure=True)
    assert "found at least two devices, sim:0 and cpu!" in outcome.message

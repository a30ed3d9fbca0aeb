"""A Plan of single operators that was made elsewhere trains through `px.distribute`, which captures the step itself."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px
from phalanx import fleet
from phalanx.errors import ConfigError
from phalanx.parallel.session import session
from phalanx.plan.value import ModuleRule, Plan
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS, STEPS = 8, 3


class Net(nn.Module):
    """A layer with a style and a module with none."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU())
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(ROWS * STEPS, 3, 4, 4, generator=generator), torch.arange(ROWS * STEPS) % 5)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1)


def losses(rows: Any, **settings: Any) -> list[float]:
    """Train through `px.distribute` with a loop of one's own."""
    net, optimizer = made()
    net, optimizer, loader = px.distribute(net, optimizer, rows, shuffle=False, **settings)
    found = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        found.append(px.global_mean(loss).item())
    forget()
    return found


def forget() -> None:
    session.reset()
    gc.collect()


def refused(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    forget()
    return str(caught.value)


def of_ranks(plan: Plan | None) -> dict[str, Any]:
    px.init()
    a_rank = DataLoader(data(), batch_size=ROWS // px.current().world_size)  # before ranks read the same rows
    found: dict[str, Any] = {"a size per rank": losses(a_rank, plan=plan)}
    if plan is None:
        return found
    found["rows"] = losses(data(), global_batch=ROWS, plan=plan)
    wide = TensorDataset(torch.randn(ROWS, 3, 4, 5), torch.arange(ROWS))
    net, optimizer = made()
    model = px.Model(net, F.cross_entropy, optimizer, plan=plan)
    a_rank = [DataLoader(data(), batch_size=ROWS // px.current().world_size) for _ in range(2)]
    found["trained again"] = [model.train(1, rows).loader.global_batch for rows in a_rank]
    del model, net, optimizer
    forget()
    mine = plan if px.current().rank == 0 else plan.model_copy(update={"ops": ()})
    found["other plan"] = refused(lambda: px.distribute(*made(), data(), global_batch=ROWS, plan=mine))
    found["other batch"] = refused(lambda: px.distribute(*made(), data(), global_batch=2 * ROWS, plan=plan))
    found["other data"] = refused(lambda: px.distribute(*made(), wide, global_batch=ROWS, plan=plan))
    misspelt = plan.model_copy(update={"modules": (*plan.modules, ModuleRule(match="haed", unit=True))})
    found["no such layer"] = refused(lambda: px.distribute(*made(), data(), global_batch=ROWS, plan=misspelt))
    found["no data"] = refused(lambda: fleet.distributed_model(made()[0], plan=plan))
    return found


def test_distribute_captures_the_step_that_a_plan_of_operators_is_of() -> None:
    torch.manual_seed(0)
    sample = tuple(column[:ROWS] for column in data().tensors)
    limits = ["tp=2", "features.*=parts"]
    plan = px.auto_parallel(Net(), sample, F.cross_entropy, cluster="cpux2", limits=limits).plan
    assert plan.ops
    (alone,) = run_ranks(of_ranks, 1, None)
    for rank, found in enumerate(run_ranks(of_ranks, 2, plan)):
        assert found["rows"] == pytest.approx(alone["a size per rank"], abs=1e-5)
        assert found["a size per rank"] == pytest.approx(alone["a size per rank"], abs=1e-5)
        assert found["trained again"] == [ROWS, ROWS]
        assert re.search(r"plan\.ops.* must be the same on all ranks", found["other plan"])
        assert "code or batch differ. Train with the global batch that was planned for" in found["other batch"]
        assert "could not be captured from the data" in found["other data"]
        assert "mat1 and mat2" in found["other data"]
        assert ("on rank 0:" in found["other data"]) == (rank > 0)
        assert "modules[haed], which matches no module" in found["no such layer"]
        assert "Give the data beside the Plan, px.distribute(model, optimizer, data, plan=plan), or" in found["no data"]

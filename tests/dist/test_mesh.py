"""A mesh on which several ranks read the same rows trains as one process does: gradients compared."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx.parallel.mesh import Mesh
from phalanx.plan import Plan
from phalanx.plan.value import Axis, Step
from ranks import run_ranks

pytestmark = pytest.mark.dist

ROWS = 10


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator).double(), torch.arange(ROWS) % 3


def train() -> dict:
    context = px.init()
    plan = Plan(mesh=(Axis(name="data", size=2), Axis(name="model", size=2)), step=Step(batch_axes=("data",)))
    mesh = Mesh.of(plan, context)
    model = net()
    # Nine rows in two shares: the ranks that read five weigh more.
    model, _, loader = px.distribute(
        model, None, torch.utils.data.TensorDataset(*rows()), global_batch=9, plan=plan, drop_last=True, shuffle=False
    )
    inputs, target = next(iter(loader))
    loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    return {
        "along data": mesh.position.ranks_along(["data"]),
        "sums": [px.comm.all_reduce(torch.tensor(context.rank), axis=axis).item() for axis in ("data", "model")],
        "rows": len(inputs),
        "loss": px.global_mean(loss).item(),
        "gradients": {name: param.grad.clone() for name, param in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def test_ranks_along_a_model_axis_read_the_same_rows_and_count_once() -> None:
    ranks = run_ranks(train, 4)
    assert [r["along data"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["sums"] for r in ranks] == [[2, 1], [4, 1], [2, 5], [4, 5]]
    assert [r["rows"] for r in ranks] == [5, 5, 4, 4]
    model = net()
    inputs, target = rows()
    losses = []
    for share in (slice(0, 5), slice(5, 9)):
        losses.append(F.cross_entropy(model(inputs[share]), target[share]) * len(inputs[share]) / 9)
        losses[-1].backward()
    for rank in ranks:
        assert rank["loss"] == pytest.approx(sum(losses).item(), rel=1e-12)
        for name, param in model.named_parameters():
            torch.testing.assert_close(rank["gradients"][name], param.grad, rtol=1e-12, atol=1e-14)
        for name, buffer in rank["buffers"].items():
            torch.testing.assert_close(buffer, ranks[0]["buffers"][name], rtol=0, atol=0)

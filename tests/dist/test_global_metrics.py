"""Every worker gets the metric of all rows."""

from __future__ import annotations

import pytest
import torch

import phalanx as px
from phalanx.train.metrics import fleet
from phalanx.train.metrics.fleet import Auc
from ranks import run_ranks

pytestmark = pytest.mark.dist


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    label = torch.rand(3001, generator=generator) < 0.3
    return (torch.randn(3001, generator=generator) + label).sigmoid(), label


def measure() -> dict[str, float]:
    here = px.init()
    score, label = (part[here.rank :: here.world_size] for part in rows())
    auc, error = Auc(), score - label.float()
    auc.update(score, label)
    return {
        "auc": auc.compute(),
        "acc": fleet.acc((score > 0.5) == label, len(label)),
        "mae": fleet.mae(error.abs(), len(label)),
        "mse": fleet.mse(error.square(), len(label)),
        "rmse": fleet.rmse(error.square(), len(label)),
        "sum": fleet.sum(score.double()[:1000]).sum().item(),
        "max": fleet.max(here.rank).item(),
        "min": fleet.min(score.min()).item(),
    }


def test_two_workers_measure_what_numpy_measures_on_all_rows():
    from sklearn.metrics import roc_auc_score

    first, second = run_ranks(measure, 2)
    assert first == second
    score, label = rows()
    error = score.double() - label.double()
    assert first == pytest.approx(
        {
            "auc": roc_auc_score(label.numpy(), score.numpy()),
            "acc": ((score > 0.5) == label).double().mean().item(),
            "mae": error.abs().mean().item(),
            "mse": error.square().mean().item(),
            "rmse": error.square().mean().sqrt().item(),
            "sum": score[:2000].double().sum().item(),
            "max": 1,
            "min": score.min().item(),
        },
        abs=1e-5,
    )

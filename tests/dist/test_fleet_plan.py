"""A Fleet loop that trains with the Plan of `px.auto_parallel`, as docs/coming-from.md writes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx as px
from phalanx import fleet
from phalanx.cluster.spec.cluster import Cluster
from phalanx.errors import ConfigError
from phalanx.train.job_cluster import job_cluster
from ranks import run_ranks

pytestmark = pytest.mark.dist

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
ROWS, STEPS = 8, 3


def line() -> str:
    (found,) = re.findall(r"^\| `strategy\.auto = True` \| `(.*?)`", PAGE.read_text(), re.MULTILINE)
    return found


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(3)), torch.arange(ROWS) % 5


def trained(call: str, **names: Any) -> list[float]:
    """Return the losses of a Fleet loop over rows of which each rank reads its part."""
    fleet.init(is_collective=True)
    model, sample, loss_fn = made(), batch(), F.cross_entropy
    model = eval(call, {"fleet": fleet, "px": px, "model": model, "sample": sample, "loss_fn": loss_fn, **names})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    found = []
    for _ in range(STEPS):
        for rows, labels in px.data.ShardedLoader(sample, global_batch=ROWS):
            loss = loss_fn(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(px.global_mean(loss).item())
    return found


def in_stages() -> str:
    plan = px.auto_parallel(made(), batch(), F.cross_entropy, limits=["pp=2"]).plan
    with pytest.raises(ConfigError) as caught:
        trained("fleet.distributed_model(model, plan=plan)", plan=plan)
    return str(caught.value)


def clusters() -> tuple[Cluster | None, Cluster | None]:
    early = job_cluster()
    px.init()
    return early, job_cluster()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_line_of_the_page_trains_on_the_ranks_of_the_job(ranks: int, tmp_path: Path) -> None:
    (alone,) = run_ranks(trained, 1, "model")
    unmeasured = {"XDG_CACHE_HOME": str(tmp_path)}
    for found in run_ranks(trained, ranks, line(), env=unmeasured):
        assert found == pytest.approx(alone, abs=1e-5)


def test_a_loop_cannot_train_stages_and_is_told_which_limit_leaves_them_out(tmp_path: Path) -> None:
    for message in run_ranks(in_stages, 2, env={"XDG_CACHE_HOME": str(tmp_path)}):
        assert re.search(r'split into stages, needs px\.train_step: .*limits=\["pp=1"\]', message)


def test_a_job_is_as_many_devices_as_it_has_ranks_before_init_and_after(tmp_path: Path) -> None:
    for early, late in run_ranks(clusters, 2, env={"XDG_CACHE_HOME": str(tmp_path)}):
        assert early is not None
        assert early == late
        assert early.devices == 2


def test_a_process_that_nobody_launched_is_in_no_job() -> None:
    assert job_cluster() is None

"""What rank 0 plans with: a batch of the loader, which stays where it is, and the ranks that were launched."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import phalanx as px
from phalanx.cluster.role.role import Role
from phalanx.data import Pipeline
from phalanx.data.loader.loader import ShardedLoader
from phalanx.data.sampling.ranks import DataShard
from phalanx.errors import ConfigError, PlanError
from phalanx.train.job_cluster import cluster_of
from phalanx.train.model.planning import global_batch

ROWS = TensorDataset(torch.arange(60.0).reshape(10, 6), torch.arange(10))
CPU = torch.device("cpu")


def numbers(count: int):
    for value in range(count):
        yield torch.full((3,), float(value)), value


LOADERS = {
    "rows": lambda: ShardedLoader(ROWS, global_batch=6, seed=3, shard=(0, 2)),
    "sampler": lambda: ShardedLoader(DataLoader(ROWS, batch_size=3, sampler=RandomSampler(ROWS)), shard=(0, 1)),
    "workers": lambda: ShardedLoader(ROWS, global_batch=6, num_workers=2, shard=(0, 2)),
    "stream": lambda: ShardedLoader(lambda: numbers(10), global_batch=6, shard=(0, 1)),
    "pipeline": lambda: ShardedLoader(Pipeline(ROWS.tensors).shuffle(10), global_batch=6, shard=(0, 1)),
}


@pytest.mark.parametrize("kind", ["rows", "sampler", "stream", "pipeline", "workers"])
def test_a_batch_is_looked_at_and_comes_again(kind: str) -> None:
    loader = LOADERS[kind]()
    before = loader.state_dict(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batch, share = loader.peek()
    after = loader.state_dict(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]
    assert loader.share is None
    if kind != "workers":  # which start processes
        seen = list(loader)
        assert all(map(torch.equal, batch, seen[0]))
    assert share.global_rows == (3 if kind == "sampler" else 6)


def test_columns_are_as_long_as_the_global_batch() -> None:
    (images,), named, labels = global_batch(LOADERS["rows"](), nn.Linear(6, 2), has_target=True)
    assert not named
    assert images.shape == (6, 6)
    assert images.dtype == torch.float32
    assert labels.shape == (6,)
    assert labels.dtype == torch.int64


def test_a_size_per_rank_means_the_global_batch_that_was_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardedLoader(ROWS, batch_size=2)
    monkeypatch.setattr(loader._options, "here", lambda: DataShard(0, 4))
    loader.keep_global_batch()
    monkeypatch.setattr(loader._options, "here", lambda: DataShard(0, 2))
    assert (loader.global_batch, loader.per_rank_batch) == (8, 4)
    later = ShardedLoader(ROWS, batch_size=2)  # made when a Plan has two ranks read already
    monkeypatch.setattr(later._options, "here", lambda: DataShard(0, 2))
    later.keep_global_batch(4)
    assert (later.global_batch, later.per_rank_batch) == (8, 4)
    fixed = ShardedLoader(ROWS, batch_size=2, shard=(0, 2))
    fixed.keep_global_batch(4)
    assert fixed.global_batch == 4


def test_data_without_a_row_is_named() -> None:
    with pytest.raises(ConfigError, match="first batch of data that has no sample"):
        ShardedLoader(lambda: numbers(0), global_batch=6, shard=(0, 1)).peek()


def test_ranks_that_were_not_measured_are_reckoned_with_as_they_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    role = Role(world_size=2, local_world_size=2)
    with caplog.at_level(logging.INFO, "phalanx.train"):
        found = cluster_of(role, CPU)
    assert found.devices == 2
    assert found.measured is None
    assert "Measure this machine with `phalanx calibrate`" in caplog.text
    several = replace(role, world_size=4, node_count=2)
    assert cluster_of(several, CPU).devices == 4


def test_a_model_with_tables_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(px.ps.SparseEmbedding(4), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(PlanError, match=r"'0\.\w+' stands for a table of rows, which live on parameter servers"):
        px.auto_parallel(net, torch.zeros(4, 2).long(), cluster="a100x2")
    monkeypatch.setenv("PHALANX_LANG", "zh")
    with pytest.raises(PlanError, match=r"此模型的参数 '0\.\w+' 是参数服务器上的表"):
        px.auto_parallel(model=net, sample=torch.zeros(4, 2).long(), cluster="a100x2")
    with pytest.raises(TypeError, match="missing a required argument: 'sample'"):
        px.auto_parallel(net)

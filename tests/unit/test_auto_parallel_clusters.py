"""The planner of modules on clusters of any speed: its bounds hold, and more of anything is never slower."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx as px
from phalanx.auto.captured_model import build_machine
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import HostOverhead
from phalanx.auto.cost.parallel_config import ParallelConfig
from phalanx.auto.planner.lower_bound import LowerBound
from phalanx.auto.planner.planner import PlanSearch, list_configs, search_plans
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import StrategyCatalog, build_problem
from phalanx.cluster.calibration.figures import Sharding
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.errors import PlanError
from tensor_models import Transformer, tokens, whole_loss

RANKS, ROWS = 4, 8


class Tied(Transformer):
    """Two blocks, and a last layer that shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.block = nn.Sequential(self.block, Transformer().block)


def uneven() -> nn.Module:
    """Return layers of which the last is as large as all others, and a convolution that has no style."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 512)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 64), *layers)


def partly_frozen() -> nn.Module:
    """Return blocks that are the same but for what is frozen around them, and for the units they are in."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    first, still = block(), nn.Linear(16, 16)
    for param in (*first.parameters(), *still.parameters()):
        param.requires_grad = False
    wide = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), block())
    return nn.Sequential(first, nn.Sequential(block(), still), block(), wide, block(), nn.Linear(16, 8))


def sharded_s(how: Sharding, size: float, tensors: float, layout: GroupTopology) -> float:
    """Return seconds of sharding a unit, of which large ones are slower than small ones together."""
    return tensors**2 * 1e-3 + size**2 * 1e-9


@cache
def planned(name: str) -> PlanResult:
    """Return any answer: of it what no cluster changes is used."""
    torch.manual_seed(0)
    model, sample, loss = {
        "tied": (Tied(), tokens(ROWS), whole_loss),
        "uneven": (uneven(), (torch.zeros(ROWS, 3, 8, 8), torch.zeros(ROWS).long()), F.cross_entropy),
        "partly frozen": (partly_frozen(), (torch.zeros(ROWS, 16), torch.zeros(ROWS).long()), F.cross_entropy),
    }[name]
    return px.auto_parallel(model, sample, loss, cluster=f"a100x{RANKS}", optimizer="momentum")


class OnCluster:
    """A model on a cluster of four devices."""

    def __init__(self, name: str, per_node: int, figures: dict[str, float], host: HostOverhead | None = None) -> None:
        node = {"device": "drawn", "devices": per_node, "count": RANKS // per_node, "gbps": figures["gbps"]}
        device = {
            "name": "drawn",
            "like": "A100-80GB-SXM",
            "tflops": {"fp32": figures["tflops"]},
            "bandwidth_gb_s": figures["bandwidth_gb_s"],
            "link_gb_s": figures["link_gb_s"],
        }
        answer = planned(name)
        self.layers = answer.layers
        machine = build_machine(read_cluster({"nodes": [node], "devices": [device]}), "fp32")
        machine = machine if host is None else replace(machine, host=host)
        self.work, self.catalog = LayerWork(self.layers, machine), StrategyCatalog(self.layers)
        points = self.layers.partition_points
        assert points is not None
        every = list_configs(
            RANKS,
            has_blocks=bool(self.layers.blocks),
            per_node=per_node,
            max_stages=len(points.starts),
            batch_size=ROWS,
        )
        self.space = [at for at in every if replace(at, model_inside=True) in answer.search.configs]

    def search(self, *arrangements: ParallelConfig, room: float = math.inf) -> PlanSearch | None:
        try:
            return search_plans(self.catalog, self.work, arrangements or self.space, room=room, top_k=1)
        except PlanError:
            return None


FIGURES = {"tflops": (0.003, 300), "bandwidth_gb_s": (1, 3000), "link_gb_s": (0.01, 600), "gbps": (0.01, 400)}
"""Slowest and fastest of what a cluster is described by."""


def between(least: float, most: float) -> st.SearchStrategy[float]:
    """Return numbers of all sizes."""
    return st.floats(math.log(least), math.log(most)).map(math.exp)


figures = st.fixed_dictionaries({name: between(*ends) for name, ends in FIGURES.items()})


@pytest.mark.parametrize("name", ["tied", "uneven"])
@settings(max_examples=6)
@given(
    per_node=st.sampled_from((1, 2, 4)),
    slow=figures,
    what=st.sampled_from((*FIGURES, "room")),
    factor=between(1.01, 100),
    share=st.sampled_from((math.inf, 1.0, 0.9, 0.7)),
)
def test_more_of_anything_is_never_slower(name, per_node, slow, what, factor, share):
    here = OnCluster(name, per_node, slow)
    free = here.search()
    assert free is not None
    room = free.best.memory_bytes * share
    before = here.search(room=room)
    if what == "room":
        after = here.search(room=room * factor)
    else:
        after = OnCluster(name, per_node, {**slow, what: slow[what] * factor}).search(room=room)
    assert free.bound <= free.best.step_time_s
    if before is not None:
        assert after is not None
        assert after.best.step_time_s <= before.best.step_time_s * (1 + 1e-9)
        assert free.bound <= before.bound * (1 + 1e-9)
        assert before.best.memory_bytes <= room * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "host"), [("tied", None), ("uneven", None), ("partly frozen", HostOverhead(sharded_s=sharded_s))]
)
@settings(max_examples=5)
@given(per_node=st.sampled_from((1, 2, 4)), drawn=figures, seed=st.integers(0, 2**16))
def test_no_arrangement_is_faster_than_its_first_bound(name, host, per_node, drawn, seed):
    here = OnCluster(name, per_node, drawn, host)
    whole = here.search()
    first = LowerBound(here.catalog, here.work)
    assert whole is not None
    for at in Random(seed).sample(here.space, 6):
        alone = here.search(at)
        if alone is not None:
            assert 0 < first.least_s(at) <= alone.best.step_time_s
            assert alone.bound <= alone.best.step_time_s
            assert whole.bound <= alone.best.step_time_s * (1 + 1e-9), str(at)


def test_sharding_costs_what_the_unit_of_each_block_takes():
    figures = {name: most for name, (_, most) in FIGURES.items()}
    here = OnCluster("partly frozen", RANKS, figures, HostOverhead(sharded_s=sharded_s))
    at = ParallelConfig(data=RANKS, zero=1, per_node=RANKS, batch_size=ROWS)
    nodes = build_problem(here.work, at, here.catalog.of(at)).problem.nodes
    sent = [node.options[0].comm_s for node in nodes if node.options[0].label == "whole"]
    units = {tuple(unit): unit for unit in here.work.unit_of.values()}.values()
    expected = sum(
        sharded_s("kept", sum(param.bytes for param in unit), len(unit), GroupTopology(4, 4)) for unit in units
    )
    assert sum(sent) == pytest.approx(expected)


def test_a_plan_of_a_model_costs_what_its_cluster_does() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    for words, price in (("a100x2,nodes=2,usd=1.5", 6.0), ("a100x2,nodes=2", None)):
        found = px.auto_parallel(model, torch.zeros(8, 64), cluster=words)
        simulated = found.simulate()
        if price is None:
            assert found.usd_per_step is simulated.usd_per_step is found.to_json()["usd_per_step"] is None
            assert "USD" not in str(found)
        else:
            assert found.usd_per_step == found.to_json()["usd_per_step"] == pytest.approx(price / 3600 * found.seconds)
            assert simulated.usd_per_step == pytest.approx(price / 3600 * simulated.simulation.step_time_s)
            assert "USD a step" in str(found)

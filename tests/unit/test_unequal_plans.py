"""The planner shares batches over nodes that differ by their speeds, and its bound holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx as px
from phalanx.auto.capture.layers import Layers
from phalanx.auto.planner.candidate import Candidate
from phalanx.auto.planner.strategies import StrategyCatalog
from phalanx.auto.planner.unequal import UnequalRanks
from phalanx.auto.predict.prediction import USABLE
from phalanx.cluster.spec.cluster import read_cluster
from phalanx.comm.batch.replicas import assign_replicas
from phalanx.comm.batch.sample_split import SampleSplit
from phalanx.errors import PlanError
from phalanx.strategy import DistributedStrategy

ROWS = 64


def mixed(*nodes: tuple[str, int], **more: Any) -> Any:
    """Return a cluster whose devices differ in all they compute with: `fast` is four times as fast as `slow`."""
    devices = [
        {
            "name": name,
            "like": "A100-80GB-SXM",
            "tflops": {"fp32": 10 * factor, "bf16": 10 * factor},
            "bandwidth_gb_s": 500 * factor,
            "memory_gib": gib,
        }
        for name, factor, gib in (("slow", 1, 40), ("fast", 4, 80), ("small", 4, 0.35))
    ]
    return {"nodes": [{"device": name, "devices": count, "gbps": 400} for name, count in nodes], "devices": devices}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8))


@pytest.fixture(scope="module")
def layers() -> Layers:
    layers: Layers = planned(mixed(("slow", 1), ("fast", 1)), rows=8).layers
    return layers


def planned(cluster: Any, rows: int = 4096, **more: Any) -> Any:
    sample = torch.zeros(rows, 2048), torch.zeros(rows).long()
    return px.auto_parallel(model(), sample, F.cross_entropy, cluster=read_cluster(cluster), **more)


def best_shared(answer: Any) -> Candidate:
    return next(candidate for candidate in answer.search.top_k if candidate.shares)


def test_faster_devices_get_more_and_a_step_is_shorter_than_with_the_weakest() -> None:
    answer = planned(mixed(("slow", 2), ("fast", 2)))
    shared = best_shared(answer)
    slow, _, fast, _ = shared.shares
    assert sum(shared.shares) == 4096
    assert 3 < fast / slow < 7
    weakest = planned(mixed(("slow", 2), ("slow", 2)), limits=["tp=1", "pp=1"])
    fastest = planned(mixed(("fast", 2), ("fast", 2)), limits=["tp=1", "pp=1"])
    assert fastest.seconds < shared.step_time_s < weakest.seconds
    assert answer.bound <= answer.seconds
    assert answer.seconds == min(candidate.step_time_s for candidate in answer.search.top_k)


def test_the_answer_names_the_parts_and_the_plan_trains_with_them() -> None:
    answer = planned(mixed(("slow", 1), ("fast", 1)), limits=["tp=1", "pp=1"])
    shared = answer.search.best
    slow, fast = shared.shares
    words = f"1 x slow: {slow} each, 1 x fast: {fast} each"
    assert words in " ".join(str(answer).split())
    assert answer.to_json()["top_k"][0]["shares"] == {"unit": "samples", "ranks": [slow, fast]}
    assert answer.plan.step.balance == "samples"
    assert answer.plan.step.shares == (slow, fast)
    assert any(words in reason.effect for reason in answer.plan.because)
    assert "balance=samples" in answer.explain("0")
    simulated = px.simulate_plan(
        answer.plan,
        model(),
        (torch.zeros(4096, 2048), torch.zeros(4096).long()),
        F.cross_entropy,
        cluster=read_cluster(mixed(("slow", 1), ("fast", 1))),
    )
    assert simulated.simulation.step_time_s == pytest.approx(answer.simulate().simulation.step_time_s)
    assert simulated.simulation.step_time_s == pytest.approx(answer.seconds, rel=0.2)


def test_a_plan_with_other_shares_is_simulated_with_them() -> None:
    cluster = mixed(("slow", 1), ("fast", 1))
    answer = planned(cluster, limits=["tp=1", "pp=1"])
    even = answer.plan.model_copy(update={"step": answer.plan.step.model_copy(update={"shares": (1, 1)})})
    sample = torch.zeros(4096, 2048), torch.zeros(4096).long()
    simulated = px.simulate_plan(even, model(), sample, F.cross_entropy, cluster=read_cluster(cluster))
    assert simulated.simulation.step_time_s > 1.5 * answer.simulate().simulation.step_time_s


@settings(max_examples=60)
@given(rows=st.integers(2, 300), parts=st.lists(st.integers(1, 50), min_size=2, max_size=5))
def test_a_plan_is_simulated_with_the_parts_that_ranks_train(layers: Layers, rows: int, parts: list[int]) -> None:
    cluster = read_cluster(mixed(("slow", 1), ("fast", len(parts) - 1)))
    split = SampleSplit(len(parts), parts)
    trained = [split.slice_rows(rows, rank, (0, 0, rows))[1] for rank in range(len(parts))]
    assert UnequalRanks(cluster, layers, "fp32", rows).units_of(parts) == trained
    sizes = [len(local) for local in assign_replicas(sum(parts), len(parts), parts)]
    assert UnequalRanks(cluster, layers, "fp32", rows, replicas=sum(parts)).units_of(parts) == sizes


def test_layouts_that_count_as_the_weakest_node_are_named() -> None:
    answer = planned(mixed(("slow", 2), ("fast", 2)))
    words = "planned as 2 x (2 least of slow and fast, 400 Gb/s)"
    assert any("tensor parallel" in why and why.endswith(words) for why in answer.to_json()["left_out"])
    assert words in " ".join(str(answer).split())


def test_equal_devices_in_nodes_of_other_sizes_all_train() -> None:
    shared = best_shared(planned(mixed(("fast", 1), ("fast", 3)), rows=64, top_k=20))
    assert shared.shares == (16, 16, 16, 16)


def test_replicas_are_shared_whole() -> None:
    strategy = DistributedStrategy(logical_replicas=8)
    answer = planned(mixed(("slow", 1), ("fast", 1)), limits=["tp=1", "pp=1"], strategy=strategy)
    shared = best_shared(answer)
    assert sum(shared.shares) == 8
    assert shared.share_unit == answer.plan.step.balance == "replicas"
    assert answer.plan.step.shares == shared.shares
    assert shared.shares[1] >= 6


def test_nodes_with_more_devices_use_all_of_them() -> None:
    shared = best_shared(planned(mixed(("slow", 1), ("fast", 3)), top_k=20))
    assert len(shared.shares) == 4


def test_no_other_split_is_faster() -> None:
    answer = planned(mixed(("slow", 1), ("fast", 1), ("fast", 1)), rows=24)
    ranks = UnequalRanks(read_cluster(mixed(("slow", 1), ("fast", 1), ("fast", 1))), answer.layers, "fp32", 24)
    catalog = StrategyCatalog(answer.layers)
    for config in ranks.configs(has_blocks=False):
        shared = ranks.candidate(config, catalog)
        assert shared is not None
        assert shared.bound == shared.step_time_s
        least = min(
            max(ranks._price(kind, size, config, catalog).seconds for kind, size in zip((0, 1, 1), sizes, strict=True))
            for sizes in product(range(2, 21), repeat=3)
            if sum(sizes) == 24
        )
        assert shared.step_time_s == pytest.approx(least)


@pytest.mark.parametrize("most", [10, 150, 230])
def test_no_other_split_that_memory_holds_is_faster(most: int) -> None:
    described, rows = mixed(("slow", 1), ("small", 1)), 256
    layers = planned(described).layers
    catalog = StrategyCatalog(layers)
    roomy = UnequalRanks(read_cluster(described), layers, "fp32", rows)
    memory = roomy._price(1, most, next(roomy.configs(has_blocks=False)), catalog).memory_bytes
    described["devices"][2]["memory_gib"] = memory / USABLE / 2**30
    cluster = read_cluster(described)
    ranks = UnequalRanks(cluster, layers, "fp32", rows)
    rooms = [USABLE * node.device.memory for node in cluster.nodes]
    for config in ranks.configs(has_blocks=False):
        prices = [[ranks._price(kind, size, config, catalog) for kind in range(2)] for size in range(rows + 1)]
        fitting = [
            max(prices[rows - size][0].seconds, prices[size][1].seconds)
            for size in range(2, rows - 1)
            if prices[rows - size][0].memory_bytes <= rooms[0] and prices[size][1].memory_bytes <= rooms[1]
        ]
        shared = ranks.candidate(config, catalog)
        assert (shared is not None) == bool(fitting)
        assert shared is None or shared.step_time_s == pytest.approx(min(fitting))


def test_a_device_with_little_memory_gets_what_it_holds() -> None:
    roomy = best_shared(planned(mixed(("slow", 1), ("fast", 1)), top_k=20))
    tight = best_shared(planned(mixed(("slow", 1), ("small", 1)), top_k=20))
    assert tight.shares[1] < roomy.shares[1]
    with pytest.raises(PlanError, match="No Plan fits"):
        planned(mixed(("slow", 1), ("small", 1)), memory="1MiB")


def test_what_cannot_be_shared_is_said() -> None:
    strategy = DistributedStrategy(gradient_scale_configs={"scale_strategy": "sum"})
    answer = planned(mixed(("slow", 1), ("fast", 1)), strategy=strategy)
    assert not any(candidate.shares for candidate in answer.search.top_k)
    assert "by the speed of unequal devices" in " ".join(str(answer).split())


def test_equal_nodes_are_planned_as_before() -> None:
    answer = planned(mixed(("fast", 2), ("fast", 2)))
    assert not any(candidate.shares for candidate in answer.search.top_k)
    assert answer.to_json()["top_k"][0]["shares"] is None
    assert replace(answer.search.best).work is None

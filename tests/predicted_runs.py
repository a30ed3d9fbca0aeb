"""`describe`: descriptions of runs of an 8B model, for tests of predictions, and what is predicted of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.memory_model import Footprint, compute_footprint
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.step_seconds import StepSeconds
from phalanx.auto.simulate.run import simulate_run

DENSE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True, "seq": 4096}
EXPERTS = {"experts": 8, "top_k": 2}


def describe(nodes: int = 1, per_node: int = 8, node_gbps: float = 3200, **changes: Any) -> dict[str, Any]:
    """Return an 8B model on H100 in the kernels of Megatron; `model` and `parallel` are changed key by key."""
    cluster = {"device": "H100-80GB-SXM", "per_node": per_node, "nodes": nodes, "node_gbps": node_gbps}
    run: dict[str, Any] = {
        "name": "8B",
        "model": {**DENSE, "vocab": 128256, "tied": False},
        "cluster": cluster,
        "parallel": {},
        "batch": {"global": 8 * nodes, "micro": 1},
        "precision": "bf16",
        "recompute": "none",
        "stack": "megatron-core",
        "overlap": {"dp": True},
    }
    return alter(run, **changes)


def alter(run: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a run with parts replaced; of an object, its keys."""
    run = copy.deepcopy(run)
    for name, value in changes.items():
        run[name] = {**run[name], **value} if isinstance(value, dict) else value
    return run


def pipeline(schedule: str, pp: int, vpp: int, count: int, layers: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a run of as many micro-batches and equal stages, on a node a rank."""
    run = describe(
        per_node=1,
        nodes=8,
        parallel={"pp": pp, "vpp": vpp},
        batch={"global": count, "micro": 1},
        schedule=schedule,
        model={"vocab": 1024, "layers": layers or 2 * pp * vpp},
    )
    if schedule == "interleaved" and count < pp:
        run["stack"] = "generic"  # Megatron Core refuses
    return alter(run, **changes)


def assert_simulated(run: dict[str, Any], tolerance: float) -> None:
    parts = predict(run, interval=False).breakdown
    assert min(parts.values()) >= 0
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s, rel=tolerance)


def step(run: dict[str, Any]) -> StepSeconds:
    return StepSeconds(read_run(run), DEFAULT)


def footprint(run: dict[str, Any]) -> Footprint:
    return compute_footprint(read_run(run))


def seconds(run: dict[str, Any]) -> float:
    return predict(run, interval=False).step_time_s


def states(run: dict[str, Any]) -> float:
    """Return the bytes of parameters, gradients and optimizer states of all ranks."""
    parts, ranks = footprint(run), read_run(run).parallel.ranks
    return ranks * (parts.parameters + parts.gradients + parts.optimizer)

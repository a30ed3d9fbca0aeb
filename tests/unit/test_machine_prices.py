"""What a measured machine says of the techniques of a Plan is what the planner reckons with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.auto.auto_parallel import auto_parallel
from phalanx.auto.cost.collectives import GroupTopology
from phalanx.auto.cost.layer_work import LayerWork
from phalanx.auto.cost.machine_model import HostOverhead, build_datasheet_machine, build_measured_machine
from phalanx.auto.cost.parallel_config import ParallelConfig, Zero
from phalanx.auto.planner.report.result import PlanResult
from phalanx.auto.planner.strategies import build_problem
from phalanx.auto.solver.problem import StepProblem
from phalanx.cluster.calibration.figures import LAYER_KINDS, Grid, Kind, Measured, Rates, Sharding
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.units import format_seconds


@pytest.fixture(scope="module")
def answer() -> PlanResult:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    sample = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)
    return auto_parallel(model, sample, nn.functional.cross_entropy, cluster="cpux2", optimizer="sgd")


def choices_of(answer: PlanResult, host: HostOverhead, zero: Zero = 0) -> StepProblem:
    at = ParallelConfig(data=2, zero=zero, per_node=2, batch_size=8)
    return build_problem(
        LayerWork(answer.layers, replace(answer.work.machine, host=host)), at, answer.catalog.of(at)
    ).problem


def first_layer(choices: StepProblem, label: str) -> float:
    (option,) = (one for one in choices.nodes[0].options if one.label == label)
    return option.comm_s


def test_a_cut_layer_costs_what_its_exchanges_take(answer: PlanResult) -> None:
    met: list[Kind] = []

    def layer_s(kind: Kind, size: float, layout: GroupTopology) -> float:
        assert layout.ranks == 2
        met.append(kind)
        return 1.0

    choices = choices_of(answer, HostOverhead(layer_s=layer_s))
    assert first_layer(choices, "whole") == 0
    # Rows are gathered, and outputs go home; nobody needs the gradient of the sample. Telling of rows waits for nobody
    # who would not be waited for anyway.
    assert first_layer(choices, "column") == pytest.approx(3, abs=0.01)
    assert set(met) == {"all_gather", "all_to_all"}


def test_ranks_wait_where_they_meet_after_the_work_of_a_layer(answer: PlanResult) -> None:
    found = choices_of(answer, HostOverhead(waiting_s=lambda work_s, layout: 1.0 if work_s else 0.0))
    assert first_layer(found, "whole") == 0
    assert first_layer(found, "column") == pytest.approx(3, abs=0.01), (
        "before and behind the product, and before the gradients, as nobody needs that of the sample"
    )
    inner = {one.label: one.comm_s for one in found.nodes[2].options}
    assert inner["column"] == pytest.approx(4, abs=0.01), "before and behind the products, each way"


def test_ranks_that_read_the_same_samples_meet_once_in_a_pass(answer: PlanResult) -> None:
    at = ParallelConfig(data=1, model=2, per_node=2, batch_size=8)
    host = HostOverhead(waiting_s=lambda work_s, layout: 1.0 if work_s else 0.0)
    work = LayerWork(answer.layers, replace(answer.work.machine, host=host))
    options = build_problem(work, at, answer.catalog.of(at)).problem.nodes[2].options
    waited = {one.label: one.comm_s for one in options}
    assert waited["column"] == pytest.approx(2, abs=0.01), "behind the product, and behind the gradients"
    assert waited["row"] == pytest.approx(2, abs=0.01)
    assert waited["row from cut"] == pytest.approx(1, abs=0.01), "gradients of its input stay where they are"


@pytest.mark.parametrize(("model", "data", "operators"), [(2, 1, 1), (1, 2, 3)])
def test_a_bias_of_a_row_layer_and_weights_of_gradients_are_operators_of_their_own(
    answer: PlanResult, model: int, data: int, operators: int
) -> None:
    """Terms are added up before the bias; gradients between ranks with other samples are weighted twice."""
    at = ParallelConfig(model=model, data=data, per_node=2, batch_size=8)
    machine = answer.work.machine

    class Counted:
        """Operators of which only element-wise ones take time: a second."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: 1.0 if name == "operator_s" and args[0] == "elementwise" else 0.0

    work = LayerWork(answer.layers, replace(machine, operators=Counted(), collective_s=lambda *args: 0.0))
    options = build_problem(work, at, answer.catalog.of(at)).problem.nodes[2].options
    assert {one.label: one.comm_s for one in options}["row"] == pytest.approx(operators, abs=0.01)


def test_work_of_layers_that_do_not_meet_is_waited_for_as_after_a_step(answer: PlanResult) -> None:
    def seconds(host: HostOverhead) -> float:
        choices = choices_of(answer, host)
        options = choices.list_costs({node.decision: 0 for node in choices.nodes})
        return sum(one.forward_s + one.backward_s for one in options)

    alone = seconds(HostOverhead())
    assert seconds(HostOverhead(waiting_s=lambda work_s, layout: 3.0)) == pytest.approx(alone + 3, rel=1e-6)


def test_stages_average_once_a_step() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    sample = torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64)
    answer = auto_parallel(model, sample, nn.functional.cross_entropy, cluster="cpux4", optimizer="sgd")

    def added(micro_batches: int) -> float:
        at = ParallelConfig(data=2, stages=2, micro_batches=micro_batches, per_node=4, batch_size=64)
        hosts = (HostOverhead(averaged_s=lambda layout: 1.0), HostOverhead())
        found = [
            build_problem(
                LayerWork(answer.layers, replace(answer.work.machine, host=one)), at, answer.catalog.of(at)
            ).problem
            for one in hosts
        ]
        pick = {node.decision: 0 for node in found[0].nodes}
        options = [[node.options[pick[node.decision]] for node in one.nodes] for one in found]
        assert sum(one.backward_s for one in options[0]) == pytest.approx(sum(one.backward_s for one in options[1]))
        return sum(one.grad_sync_s for one in options[0]) - sum(one.grad_sync_s for one in options[1])

    assert added(1) == pytest.approx(added(8)) == pytest.approx(8), "weights and biases"


def test_the_host_hears_of_every_gradient_that_is_averaged(answer: PlanResult) -> None:
    def backward(label: str, host: HostOverhead) -> float:
        return next(one.backward_s for one in choices_of(answer, host).nodes[0].options if one.label == label)

    averaging = HostOverhead(averaged_s=lambda layout: float(layout.ranks))
    assert backward("whole", averaging) - backward("whole", HostOverhead()) == pytest.approx(4), "a weight and a bias"
    assert backward("row", averaging) - backward("row", HostOverhead()) == pytest.approx(2), "the bias is whole"
    assert backward("column", averaging) == pytest.approx(backward("column", HostOverhead())), "each rank has its part"


@pytest.mark.parametrize("cluster", ["h100x8", "cpux2"])
def test_a_batched_product_starts_once_and_computes_all(cluster: str) -> None:
    operators = build_datasheet_machine(read_cluster(cluster)).operators
    one, many = operators.matmul_s(64, 64, 64), operators.matmul_s(64, 64, 64, batch=64)
    assert one <= many < 64 * one
    assert operators.matmul_s(256, 256, 256, batch=4096) > 2 * operators.matmul_s(256, 256, 256, batch=1024)


@pytest.mark.parametrize(("zero", "expected"), [(1, "kept"), (2, "kept"), (3, "freed")])
def test_sharding_costs_what_its_units_take(answer: PlanResult, zero: Zero, expected: Sharding) -> None:
    def sharded_s(how: Sharding, size: float, tensors: float, layout: GroupTopology) -> float:
        assert (how, layout.ranks) == (expected, 2)
        return tensors + size / 2**10

    shared = choices_of(answer, HostOverhead(), zero).list_costs(
        {node.decision: 0 for node in choices_of(answer, HostOverhead()).nodes}
    )
    options = choices_of(answer, HostOverhead(sharded_s=sharded_s), zero).list_costs(
        {node.decision: 0 for node in choices_of(answer, HostOverhead()).nodes}
    )
    whole = sum(param.bytes for param in answer.layers.captured.parameters)
    assert sum(one.comm_s for one in options) == pytest.approx(4 + whole / 2**10), "two units of two tensors each"
    assert sum(one.grad_sync_s for one in options) == 0 < sum(one.grad_sync_s for one in shared)


def test_a_machine_says_what_layers_and_units_take() -> None:
    line = Grid(axes=((1024.0, 2048.0),), seconds=(1.0, 2.0), powers=(1.0,))
    plane = Grid(axes=((1.0, 8.0), (1024.0, 2048.0)), seconds=(1.0, 2.0, 8.0, 9.0), powers=(1.0, 1.0))
    ops, one = (Grid(axes=((1.0, 8.0)[:n],), seconds=(1.0, 8.0)[:n], powers=(1.0,)) for n in (2, 1))
    rates = Rates(
        threads=1,
        launch_s=1e-6,
        backward_launch_s=1e-6,
        checkpoint_s=1e-3,
        selective_op_s=1e-5,
        grids={
            "layer all_gather 2": line,
            "sharded kept 2": plane,
            "placed 2": ops,
            "placed parameter 2": one,
            "waiting 2": line,
            "averaged 2": one,
        },
    )
    host = build_measured_machine(rates).host
    assert (host.checkpoint_s, host.selective_op_s) == (1e-3, 1e-5)
    assert host.layer_s is not None
    assert host.sharded_s is not None
    assert host.layer_s("all_gather", 2048, GroupTopology(2, 2)) == pytest.approx(2)
    assert host.layer_s("all_gather", 2048, GroupTopology(1, 1)) == 0
    assert host.sharded_s("kept", 1024, 8, GroupTopology(2, 2)) == pytest.approx(8)
    assert host.sharded_s("kept", 1024, 8, GroupTopology(1, 1)) == 0
    assert host.placed_s is not None
    assert host.placed_s(8, 3, GroupTopology(2, 2)) == pytest.approx(8 + 3)
    assert host.averaged_s is not None
    assert host.averaged_s(GroupTopology(2, 2)) == pytest.approx(1)
    assert host.averaged_s(GroupTopology(1, 1)) == 0
    assert host.waiting_s is not None
    assert host.waiting_s(2048, GroupTopology(2, 2)) == pytest.approx(2)
    assert host.waiting_s(512, GroupTopology(2, 2)) == pytest.approx(0.5), (
        "in proportion to work too short to be measured"
    )
    assert host.waiting_s(0, GroupTopology(2, 2)) == host.waiting_s(2048, GroupTopology(1, 1)) == 0


def grid(seconds: float, axes: int = 1, power: float = 1.0) -> Grid:
    return Grid(axes=((1.0,),) * axes, seconds=(seconds,), powers=(power,) * axes)


def machine(each_s: float) -> Cluster:
    """Return two ranks of a machine on which everything that they do with each other takes so long."""
    alone = {
        "matmul fp32": grid(1e-9, 3),
        "elementwise forward": grid(1e-12),
        "elementwise backward": grid(1e-12),
        "optimizer sgd": grid(1e-9),
    }
    kinds = (*LAYER_KINDS, "reduce_scatter", "send")
    names = [*(f"{kind} shm 2" for kind in kinds), *(f"layer {kind} 2" for kind in LAYER_KINDS)]
    met = dict.fromkeys((*names, "waiting 2", "averaged 2", "placed 2", "placed parameter 2"), grid(each_s, power=0.0))
    met |= dict.fromkeys(("sharded kept 2", "sharded freed 2"), grid(each_s, 2, power=0.0))
    rates = {
        ranks: Rates(
            threads=1, launch_s=1e-6, backward_launch_s=1e-6, checkpoint_s=1e-3, selective_op_s=1e-5, grids=alone | more
        )
        for ranks, more in ((1, {}), (2, met))
    }  # fmt: skip
    measured = Measured(host="h", processor="p", cores=2, memory=2**30, torch="2", date="2026", rates=rates)
    return replace(read_cluster("cpux2"), measured=measured)


def on_machine(each_s: float, **settings: Any) -> PlanResult:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    sample = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)
    loss = nn.functional.cross_entropy
    return auto_parallel(model, sample, loss, cluster=machine(each_s), optimizer="sgd", **settings)


def test_a_process_that_would_be_faster_alone_is_named(answer: PlanResult) -> None:
    slow, fast = on_machine(1.0), on_machine(1e-12)
    assert slow.alone_s is not None
    assert slow.alone_s == pytest.approx(fast.alone_s or 0.0)
    assert slow.alone_s < slow.seconds
    assert f"a single process is faster: {format_seconds(slow.alone_s)} a step" in str(slow)
    assert fast.seconds < (fast.alone_s or 0.0)
    assert "a single process" not in str(fast)
    assert slow.to_json()["one_process_s"] == slow.alone_s
    assert answer.alone_s is None, "this machine was not measured"
    assert on_machine(1.0, limits=["0=column"]).alone_s == slow.alone_s, "limits are of the ranks together"


def test_sharding_is_a_part_of_its_own_on_a_measured_machine() -> None:
    parts = on_machine(1.0, limits=["zero=1", "tp=1"]).search.best.parts
    assert max(parts, key=lambda name: parts[name]) == "sharding"
    assert parts["collectives of layers"] == parts["exchange of gradients"] == 0

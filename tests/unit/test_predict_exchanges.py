"""Exchanges of gradients and parameters of predicted runs hide behind passes as they do in the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.prediction import predict
from predicted_runs import alter, assert_simulated, describe, pipeline, step


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize(("dp", "count"), [(2, 4), (8, 4), (8, 16)])
def test_gradients_hide_behind_what_they_hide_behind_in_the_simulation(
    schedule: str, vpp: int, dp: int, count: int
) -> None:
    run = pipeline(
        schedule, 4, vpp, count, parallel={"dp": dp}, cluster={"nodes": 4 * dp}, batch={"global": dp * count}
    )
    assert_simulated(run, 0.035)


def test_the_gradient_of_the_embedding_comes_too_late_to_hide() -> None:
    run = describe(nodes=2, node_gbps=800, parallel={"dp": 16}, batch={"global": 64, "micro": 4})
    passes = step(run)
    exchanges, contention = passes.exchanges, DEFAULT.contention
    table = exchanges.reduce_of(exchanges.table)
    blocks = sum(exchanges.reduce_of(part, passes.layers) for part in exchanges.block_parameters)
    late = passes.replica_exchange.exchange(blocks, table)
    early = replace(late, last_bucket=0.0)
    assert predict(run).breakdown["gradients_s"] == late.seconds(contention)
    assert late.seconds(contention) - early.seconds(contention) == pytest.approx(table * (1 - contention))


def test_gradients_of_weights_apart_hide_their_exchange_alone() -> None:
    parallel = {"pp": 4, "dp": 8}
    run = describe(nodes=4, node_gbps=100, parallel=parallel, batch={"global": 64}, schedule="zero-bubble")
    passes, bare = step(run), predict(alter(run, overlap={"dp": False})).breakdown["gradients_s"]
    # All but what is before the first bucket: a rank has eight blocks and a table.
    hidden, contention = passes.layers * passes.weights, DEFAULT.contention
    assert predict(run).breakdown["gradients_s"] == pytest.approx(bare - (1 - contention) * hidden * 8 / 9)


def test_an_exchange_that_begins_before_the_last_pass_hides_no_less() -> None:
    run = describe(nodes=4, node_gbps=800, parallel={"pp": 4, "vpp": 2, "dp": 8}, batch={"global": 64})
    exchange = step(alter(run, schedule="interleaved")).replica_exchange.exchange(1.0, 0.1)
    ends = exchange.own + exchange.before
    times = [replace(exchange, all_buckets=ends + more).seconds(0.3) for more in (0.0, 1e-9, 2e-9)]
    assert times[1] - times[0] == pytest.approx(times[2] - times[1], abs=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("gbps", [400, 100])
def test_stages_of_fsdp_scatter_after_their_last_pass(schedule: str, gbps: float) -> None:
    parallel = {"pp": 4, "dp": 8, "zero": 3, "vpp": 2 if schedule == "interleaved" else 1}
    run = describe(4, 8, gbps, parallel=parallel, batch={"global": 64}, schedule=schedule, stack="pytorch")
    passes = step(run)
    exchanges = passes.exchanges
    scatters = passes.layers * exchanges.scatter + exchanges.scatter_of(exchanges.table)
    gathers = sum(map(passes.replica_exchange.added_to_first_pass, range(len(passes.stage_blocks))))
    assert 0 < gathers < 32 * exchanges.gather
    assert predict(run).breakdown["gradients_s"] == pytest.approx(scatters + passes.first_gathers + gathers)
    assert_simulated(run, 0.04)  # sends of 1F1B included


@pytest.mark.parametrize("pp", [1, 4])
def test_updated_parameters_are_gathered_before_or_beside_the_first_forward_pass(pp: int) -> None:
    parallel = {"pp": pp, "dp": 8, "zero": 1}
    run = describe(pp, 8, 400, parallel=parallel, batch={"global": 64}, stack="megatron-2022")
    early, core, bare = (
        step(alter(run, **changes))
        for changes in ({}, {"stack": "megatron-core"}, {"stack": "megatron-core", "overlap": {"dp": False}})
    )
    exchanges = early.exchanges
    part, table = exchanges.block_parameters[0], exchanges.table
    tables = 2 if pp == 1 else 1
    assert early.replica_exchange.opening == exchanges.gather_of(part, early.layers) + exchanges.gather_of(
        table, tables
    )
    assert early.replica_exchange.opening == bare.replica_exchange.opening
    assert early.replica_exchange.added_to_first_pass(0) == 0 < core.replica_exchange.added_to_first_pass(0)
    assert core.replica_exchange.opening == exchanges.gather + exchanges.gather_of(table)
    assert early.replica_exchange.gradients > early.replica_exchange.opening
    for stack in ("megatron-2022", "megatron-core"):
        assert_simulated(alter(run, stack=stack), 0.03)

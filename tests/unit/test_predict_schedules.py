"""Predicted schedules against their simulation: rounds, unequal ends, what ranks hold, what gradients hide behind."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.auto.predict.memory_model import compute_stage_footprint
from phalanx.auto.predict.pipeline.stage_waits import StagePasses, find_pipeline_seconds
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.simulate.run import simulate_run
from phalanx.errors import ConfigError
from predicted_runs import alter, describe, footprint, seconds, step


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
    return alter(run, **changes)


def assert_simulated(run: dict[str, Any], tolerance: float) -> None:
    parts = predict(run, interval=False).breakdown
    assert min(parts.values()) >= 0
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s, rel=tolerance)


# -- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gbps", [3200, 20])
@pytest.mark.parametrize("vocab", [1024, 128256])
@pytest.mark.parametrize(("pp", "vpp", "count"), [(8, 4, 1), (8, 2, 7), (3, 4, 5), (4, 2, 6), (4, 3, 10), (8, 3, 36)])
def test_rounds_that_are_not_as_many_micro_batches_as_stages(
    pp: int, vpp: int, count: int, vocab: int, gbps: float
) -> None:
    run = pipeline("interleaved", pp, vpp, count, model={"vocab": vocab}, cluster={"node_gbps": gbps})
    assert_simulated(run, 1e-3)


def test_a_micro_batch_by_itself_passes_all_stages_one_after_the_other() -> None:
    alone, many = step(pipeline("interleaved", 8, 4, 1)), pipeline("interleaved", 8, 4, 8)
    layers = alone.run.model.layers
    assert seconds(pipeline("interleaved", 8, 4, 1)) > layers * (alone.forward + alone.backward)
    assert seconds(pipeline("interleaved", 8, 4, 1)) < seconds(many)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_rounds_of_several_sizes_are_refused_as_software_does(schedule: str) -> None:
    with pytest.raises(ConfigError, match="9 micro-batches over 4 stages do not make rounds of one size"):
        predict(pipeline(schedule, 4, 3, 9))
    predict(pipeline(schedule, 4, 3, 10))


def test_megatron_of_2021_and_2022_takes_multiples_of_stages_alone() -> None:
    for stack in ("megatron-2021", "megatron-2022"):
        with pytest.raises(ConfigError, match="10 micro-batches over 4 stages with vpp=3: Megatron-LM refuses"):
            predict(pipeline("interleaved", 4, 3, 10, stack=stack))
        predict(pipeline("interleaved", 4, 3, 12, stack=stack))


def test_no_interval_is_of_a_run_that_cannot_be() -> None:
    run = pipeline("interleaved", 4, 2, 4, assumed=["batch.micro", "parallel.vpp"], batch={"global": 8, "micro": 2})
    low, high = predict(run).step_time_interval_s or (0.0, 0.0)
    assert low < seconds(run) < high


# -- unequal stages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("vocab", [1024, 64000, 256000])
@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3)]
)
def test_ends_of_a_pipeline_take_what_they_take_in_the_simulation(
    schedule: str, vpp: int, vocab: int, count: int
) -> None:
    if vpp == 3 and count == 9:
        count = 16
    # The rank of the V with both tables has the most to update, and is through first.
    assert_simulated(pipeline(schedule, 8, vpp, count, model={"vocab": vocab}), 0.012 if vpp == 2 else 0.005)


@pytest.mark.parametrize("vocab", [64000, 256000])
@pytest.mark.parametrize("count", [8, 64])
def test_a_whole_round_comes_by_the_embedding_of_interleaved_stages(count: int, vocab: int) -> None:
    assert_simulated(pipeline("interleaved", 8, 4, count, model={"vocab": vocab}), 0.003)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(
    ("pp", "count", "layers"), [(4, 4, 5), (8, 8, 10), (3, 3, 4), (8, 64, 14), (4, 16, 19), (2, 6, 9)]
)
def test_stages_with_a_block_more_wait_for_others_no_longer_than_these_take(
    schedule: str, pp: int, count: int, layers: int
) -> None:
    assert_simulated(pipeline(schedule, pp, 1, count, layers), 0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(("pp", "count"), [(2, 2), (2, 16), (3, 5), (8, 8), (8, 64)])
def test_sends_that_hold_ranks_up_are_those_to_each_neighbour(schedule: str, pp: int, count: int) -> None:
    run = pipeline(schedule, pp, 1, count, cluster={"node_gbps": 20}, overlap={"pp": False})
    assert_simulated(run, 5e-3)


def test_a_pipeline_of_equal_stages_waits_for_all_others_once() -> None:
    forward, backward, weights = 2.0, 3.0, 1.5
    plain = [StagePasses(forward, backward + weights)] * 4
    assert find_pipeline_seconds(plain, 8) == 11 * (forward + backward + weights)
    assert find_pipeline_seconds(plain, 8, in_turn=False) == 11 * (forward + backward + weights)
    split = [StagePasses(forward, backward, weights)] * 4
    assert find_pipeline_seconds(split, 8) == 8 * 6.5 + 3 * (forward + backward - weights)


# -- what ranks hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1024, 256000])
@pytest.mark.parametrize("count", [1, 7, 8, 16, 64])
@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)]
)
def test_the_first_and_the_last_rank_hold_what_they_hold_in_the_simulation(
    schedule: str, vpp: int, count: int, vocab: int
) -> None:
    run = read_run(pipeline(schedule, 8, vpp, count, model={"vocab": vocab}))
    memory = simulate_run(run).simulation.memory
    for last, timeline in ((False, memory[0]), (True, memory[-1])):
        peak = max(size for _, size in timeline)
        # What an allocator loses is a share of what the first rank holds in the simulation of all ranks.
        assert compute_stage_footprint(run, last=last).total == pytest.approx(peak, rel=0.04)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [1024, 256000])
def test_the_first_rank_of_a_v_has_both_ends(vocab: int, tied: bool) -> None:
    run = read_run(pipeline("zero-bubble", 4, 2, 16, model={"vocab": vocab, "tied": tied}))
    first, last = (compute_stage_footprint(run, last=last) for last in (False, True))
    assert first.logits > 0 == last.logits
    tables = (1 if tied else 2) * vocab * 4096
    assert first.parameters - last.parameters == pytest.approx(2 * tables)
    memory = [max(size for _, size in timeline) for timeline in simulate_run(run).simulation.memory]
    assert footprint(run.model_dump(by_alias=True, exclude_none=True)).total == pytest.approx(memory[0], rel=0.01)
    assert step(run.model_dump(by_alias=True, exclude_none=True)).exchanges.sum_of_tied_tables == 0


# -- gradients -----------------------------------------------------------------------------------------------


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
    run = describe(nodes=2, node_gbps=400, parallel={"dp": 16}, batch={"global": 64, "micro": 4})
    exchanges = step(run).exchanges
    assert predict(run).breakdown["gradients_s"] > exchanges.reduce_of(exchanges.table)


def test_gradients_of_weights_apart_hide_their_exchange_alone() -> None:
    parallel = {"pp": 4, "dp": 8}
    run = describe(nodes=4, node_gbps=100, parallel=parallel, batch={"global": 64}, schedule="zero-bubble")
    passes, whole = step(run), predict(alter(run, overlap={"dp": False})).breakdown["gradients_s"]
    hidden = passes.layers * passes.weights
    assert 0 < whole - hidden <= predict(run).breakdown["gradients_s"] < whole


# -- links ---------------------------------------------------------------------------------------------------


def test_collectives_inside_a_node_wait_for_shards_inside_it() -> None:
    parallel = {"tp": 2, "dp": 4, "zero": 3, "sequence_parallel": True}
    passes = step(describe(parallel=parallel, model={"seq": 512}))
    exchanges = passes.exchanges
    assert exchanges.on_links_of_shards[0] == pytest.approx(exchanges._dense_sum)
    assert passes.forward >= exchanges.gather + exchanges._dense_sum
    slow = step(describe(nodes=8, node_gbps=100, parallel={**parallel, "dp": 32}, model={"seq": 512})).exchanges
    assert 0 < slow.on_links_of_shards[0] < 0.05 * slow._dense_sum, "ports carry little of what links do"


def test_stages_send_parts_or_whole_activations() -> None:
    parallel, batch = {"tp": 8, "pp": 2}, {"global": 4, "micro": 1}
    run = describe(nodes=2, node_gbps=400, parallel=parallel, batch=batch)
    megatron, parts, pytorch = (
        step(alter(run, stack=stack, parallel={"sequence_parallel": cut}))
        for stack, cut in (("megatron-core", False), ("megatron-core", True), ("pytorch", False))
    )
    assert parts.send_once < megatron.send_once < 2 * parts.send_once
    assert pytorch.send_once > 4 * parts.send_once

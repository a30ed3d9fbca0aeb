"""Predicted schedules against their simulation: rounds, unequal ends, what ranks hold, what gradients hide behind."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.auto.predict.interval import _alternatives
from phalanx.auto.predict.memory_model import (
    block_bytes,
    compute_footprint,
    compute_stage_footprint,
    count_kept_blocks,
)
from phalanx.auto.predict.pipeline.pipeline_seconds import MOST_PASSES
from phalanx.auto.predict.pipeline.stage_waits import StagePasses, find_pipeline_seconds
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.simulate.run import simulate_run
from phalanx.errors import ConfigError
from phalanx.plan.pipeline_order import Pass, order_of
from predicted_runs import alter, assert_simulated, describe, footprint, pipeline, seconds, step

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
def test_rounds_of_several_sizes_are_refused_as_pytorch_does(schedule: str) -> None:
    message = "9 micro-batches over 4 stages do not make rounds of one size, of 4 or more: PyTorch refuses them"
    with pytest.raises(ConfigError, match=message):
        predict(pipeline(schedule, 4, 3, 9, stack="pytorch"))
    predict(pipeline(schedule, 4, 3, 10, stack="pytorch"))


@pytest.mark.parametrize(
    ("pp", "count", "size"), [(4, 9, 5), (4, 11, 6), (4, 10, 5), (4, 12, 4), (4, 7, 7), (8, 17, 9)]
)
@pytest.mark.parametrize("gbps", [3200, 20])
def test_megatron_core_ends_with_a_smaller_round(pp: int, count: int, size: int, gbps: float) -> None:
    run = pipeline("interleaved", pp, 3, count, cluster={"node_gbps": gbps}, model={"layers": 3 * pp + 1})
    assert read_run(run).round_size == size
    assert_simulated(run, 1e-3)
    orders = order_of(read_run(run).order, pp, read_run(run).order_rules)
    forward = [action.microbatch for action in orders[0] if action.kind is Pass.FORWARD]
    assert forward[: 2 * size] == [*range(size)] * 2
    if rest := count % size:
        assert forward[-3 * rest :] == [*range(size, count)] * 3


def test_megatron_core_interleaves_no_fewer_micro_batches_than_stages() -> None:
    with pytest.raises(ConfigError, match="3 micro-batches over 4 stages with vpp=2: Megatron Core refuses"):
        predict(pipeline("interleaved", 4, 2, 3, stack="megatron-core"))
    for stack in ("pytorch", "generic"):
        predict(pipeline("interleaved", 4, 2, 3, stack=stack))


def test_stages_in_a_v_take_any_number_of_micro_batches() -> None:
    for count in (1, 3, 9):
        predict(pipeline("zero-bubble", 4, 2, count, stack="pytorch"))


@pytest.mark.parametrize(("count", "vocab"), [(1, 1024), (4, 256000), (7, 256000)])
def test_1f1b_with_few_micro_batches_alternates_in_megatron_and_is_refused_by_pytorch(count: int, vocab: int) -> None:
    run = pipeline("1f1b", 8, 1, count, model={"vocab": vocab})
    assert_simulated(run, 0.005)
    assert count_kept_blocks(read_run(run), [2], at_end=True) == 2
    assert count_kept_blocks(read_run(alter(run, schedule="gpipe")), [2], at_end=True) == 2 * count
    with pytest.raises(ConfigError, match=f"{count} micro-batches over 8 stages: PyTorch's 1F1B refuses"):
        predict(alter(run, stack="pytorch"))


def test_more_micro_batches_take_no_less_memory() -> None:
    for at_end in (False, True):
        runs = [read_run(pipeline("1f1b", 8, 1, count, model={"vocab": 256000})) for count in range(1, 12)]
        totals = [compute_stage_footprint(run, at_end=at_end).total for run in runs]
        assert totals == sorted(totals)


def test_megatron_of_2022_takes_one_round_of_interleaved_stages_forward_first() -> None:
    runs = [pipeline("interleaved", 4, 2, 4, stack=stack, layers=17) for stack in ("megatron-2022", "generic")]
    blocks = (2, 2)
    early, other = (count_kept_blocks(read_run(run), blocks, at_end=True) for run in runs)
    assert early == 16 > other
    assert_simulated(runs[0], 1e-3)
    memory = simulate_run(runs[0]).simulation.peaks
    assert compute_stage_footprint(read_run(runs[0]), at_end=True).total == pytest.approx(memory[-1], rel=0.02)


def test_megatron_of_2021_and_2022_takes_multiples_of_stages_alone() -> None:
    for stack in ("megatron-2021", "megatron-2022"):
        with pytest.raises(ConfigError, match="10 micro-batches over 4 stages with vpp=3: Megatron-LM refuses"):
            predict(pipeline("interleaved", 4, 3, 10, stack=stack))
        predict(pipeline("interleaved", 4, 3, 12, stack=stack))


def test_no_interval_is_of_a_run_that_cannot_be() -> None:
    """12 micro-batches over 4 stages: with half the size there are 24, with twice the size 6, which are refused."""
    batch = {"global": 24, "micro": 2}
    run = read_run(pipeline("interleaved", 4, 2, 12, stack="megatron-2022", batch=batch, assumed=["batch.micro"]))
    assert [other.batch.micro for other in _alternatives(run, "batch.micro")] == [1]
    low, high = predict(run).step_time_interval_s or (0.0, 0.0)
    assert low < predict(run).step_time_s < high


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
    for at_end, timeline in ((False, memory[0]), (True, memory[-1])):
        peak = max(size for _, size in timeline)
        # What an allocator loses is a share of what the first rank holds in the simulation of all ranks.
        assert compute_stage_footprint(run, at_end=at_end).total == pytest.approx(peak, rel=0.04)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "count", "layers"),
    [
        ("zero-bubble", 4, 2, 16, 21),
        ("zero-bubble", 4, 2, 3, 21),
        ("interleaved", 4, 4, 16, 20),
        ("interleaved", 4, 4, 9, 21),
        ("interleaved", 8, 2, 64, 30),
        ("zero-bubble", 4, 3, 16, 20),
        ("1f1b", 4, 1, 8, 9),
    ],
)
def test_ranks_of_uneven_stages_hold_what_they_hold_in_the_simulation(
    schedule: str, pp: int, vpp: int, count: int, layers: int
) -> None:
    run = read_run(pipeline(schedule, pp, vpp, count, layers, memory_kind="allocated"))
    peaks = simulate_run(run).simulation.peaks
    for at_end, peak in ((False, peaks[0]), (True, peaks[-1])):
        assert compute_stage_footprint(run, at_end=at_end).total == pytest.approx(peak, rel=1e-6)


def test_a_smaller_micro_batch_counts_as_a_full_one() -> None:
    run = read_run(pipeline("interleaved", 2, 2, 5, batch={"global": 5, "micro": 2}))
    peak = max(simulate_run(run).simulation.peaks)
    assert compute_footprint(run).total == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("stack", ["pytorch", "generic"])
def test_what_is_computed_again_is_there_in_full(stack: str) -> None:
    run = describe(stack=stack, model={"flash": False}, recompute="selective", memory_kind="allocated")
    none = read_run(alter(run, recompute="none"))
    again = block_bytes(none) - block_bytes(read_run(run))
    assert again > 0
    assert footprint(run).activations == pytest.approx(32 * block_bytes(read_run(run)) + again)
    assert simulate_run(run).simulation.pipeline.stages[0].workspace_bytes == again


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [1024, 256000])
def test_the_first_rank_of_a_v_has_both_ends(vocab: int, tied: bool) -> None:
    run = read_run(pipeline("zero-bubble", 4, 2, 16, model={"vocab": vocab, "tied": tied}))
    first, last = (compute_stage_footprint(run, at_end=at_end) for at_end in (False, True))
    assert first.logits > 0 == last.logits
    tables = (1 if tied else 2) * vocab * 4096
    assert first.parameters - last.parameters == pytest.approx(2 * tables)
    memory = [max(size for _, size in timeline) for timeline in simulate_run(run).simulation.memory]
    assert footprint(run.model_dump(by_alias=True, exclude_none=True)).total == pytest.approx(memory[0], rel=0.01)
    assert step(run.model_dump(by_alias=True, exclude_none=True)).exchanges.sum_of_tied_tables == 0


# -- links ---------------------------------------------------------------------------------------------------


def test_collectives_inside_a_node_wait_for_shards_inside_it() -> None:
    parallel = {"tp": 2, "dp": 4, "zero": 3, "sequence_parallel": True}
    passes = step(describe(parallel=parallel, model={"seq": 512}))
    exchanges = passes.exchanges
    assert exchanges.on_links_of_shards[0] == pytest.approx(exchanges._dense_sum)
    assert exchanges.on_links_of_shards[1] == pytest.approx(1.5 * exchanges._dense_sum), "inputs are gathered again"
    pytorch = step(describe(parallel=parallel, model={"seq": 512}, stack="pytorch")).exchanges
    assert pytorch.on_links_of_shards[1] == pytest.approx(pytorch._dense_sum)
    assert passes.forward >= exchanges.gather + exchanges._dense_sum
    slow = step(describe(nodes=8, node_gbps=100, parallel={**parallel, "dp": 32}, model={"seq": 512})).exchanges
    assert 0 < slow.on_links_of_shards[0] < 0.05 * slow._dense_sum, "ports carry little of what links do"


def test_stages_send_parts_or_whole_activations() -> None:
    parallel, batch = {"tp": 8, "pp": 2}, {"global": 4, "micro": 1}
    run = describe(nodes=2, node_gbps=400, parallel=parallel, batch=batch)
    early, core, parts, pytorch = (
        step(alter(run, stack=stack, parallel={"sequence_parallel": cut}))
        for stack, cut in (
            ("megatron-2022", False),
            ("megatron-core", False),
            ("megatron-core", True),
            ("pytorch", False),
        )
    )
    assert parts.send_once < early.send_once < 2 * parts.send_once
    assert core.send_once == pytorch.send_once > 4 * parts.send_once


# -- long schedules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "count"),
    [
        ("interleaved", 256, 8, 511),
        ("interleaved", 256, 8, 100),
        ("zero-bubble", 64, 2, 10),
        ("zero-bubble", 256, 2, 999),
    ],
)
def test_a_prediction_takes_no_more_passes_than_a_limit(
    schedule: str, pp: int, vpp: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> list[Any]:
        orders = order_of(*args, **kwargs)
        passes.append(sum(map(len, orders)))
        return orders

    monkeypatch.setattr("phalanx.auto.predict.pipeline.interleaved_schedule.order_of", counted)
    run = pipeline(schedule, pp, vpp, count, cluster={"nodes": 256})
    low, high = predict(run).step_time_interval_s or (0.0, 0.0)
    assert low < seconds(run) < high
    assert sum(passes) < 4 * MOST_PASSES


@pytest.mark.parametrize(
    ("schedule", "vpp", "count", "layers"),
    [("interleaved", 2, 1, 32), ("interleaved", 4, 9, 64), ("zero-bubble", 2, 32, 32), ("zero-bubble", 3, 16, 48)],
)
def test_the_formula_of_long_schedules_is_near_their_order(schedule: str, vpp: int, count: int, layers: int) -> None:
    passes = step(pipeline(schedule, 8, vpp, count, layers, model={"vocab": 128256}))
    exact = sum(passes.breakdown().values())
    assert sum(passes.breakdown(0).values()) == pytest.approx(exact, rel=0.1)

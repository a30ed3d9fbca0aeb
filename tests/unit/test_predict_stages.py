"""Predicted pipelines against their simulation: what stages send, gather and add up, and what hides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.prediction import predict
from phalanx.auto.simulate.run import simulate_run
from predicted_runs import EXPERTS, alter, describe, seconds, step


def test_stages_with_a_copy_of_a_table_each_add_up_its_gradients() -> None:
    parallel, batch = {"pp": 8}, {"global": 8, "micro": 1}
    run = describe(per_node=1, nodes=8, node_gbps=100, parallel=parallel, batch=batch)
    tied, untied = (alter(run, model={"tied": tied}) for tied in (True, False))
    bytes_of_gradients = 4 * 128256 * 4096
    more = predict(tied).breakdown["gradients_s"] - predict(untied).breakdown["gradients_s"]
    assert more > bytes_of_gradients / (100 / 8 * 1e9)
    simulated = [simulate_run(run).simulation.step_time_s for run in (tied, untied)]
    assert simulated[0] - simulated[1] == pytest.approx(more)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("gbps", [3200, 400])
def test_stages_gather_their_first_block_with_nothing_beside_it(zero: int, gbps: float) -> None:
    parallel, batch = {"pp": 4, "dp": 16, "zero": zero}, {"global": 16 * 16, "micro": 1}
    run = describe(nodes=8, node_gbps=gbps, parallel=parallel, batch=batch)
    assert predict(run).breakdown["gradients_s"] > step(run).first_gathers > step(run).exchanges.gather
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s, rel=0.06)


@pytest.mark.parametrize(
    ("schedule", "count"), [("1f1b", 1), ("1f1b", 8), ("1f1b", 64), ("gpipe", 8), ("zero-bubble", 1)]
)
def test_sends_of_a_slow_network_show_where_nothing_hides_them(schedule: str, count: int) -> None:
    """The formula is the simulated step: of the first micro-batch through all stages, and of every one in 1F1B."""
    parallel, batch = {"tp": 1, "pp": 8}, {"global": count, "micro": 1}
    run = describe(per_node=1, nodes=8, node_gbps=100, parallel=parallel, batch=batch, schedule=schedule)
    run = alter(run, model={"vocab": 1024})
    assert step(run).send_once > 0.2 * step(run).layers * step(run).forward
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "count", "gbps"),
    [
        ("1f1b", 8, 1, 4, 100),
        ("1f1b", 8, 1, 4, 5),
        ("1f1b", 8, 1, 8, 20),
        ("1f1b", 2, 1, 8, 10),
        ("gpipe", 8, 1, 8, 10),
        ("gpipe", 8, 1, 64, 10),
        ("zero-bubble", 8, 1, 8, 100),
        ("zero-bubble", 8, 1, 16, 20),
        ("zero-bubble", 8, 1, 64, 20),
        ("interleaved", 4, 2, 4, 50),
        ("interleaved", 4, 2, 32, 10),
        ("interleaved", 8, 4, 64, 20),
    ],
)
def test_sends_are_hidden_as_they_are_in_the_simulation(
    schedule: str, pp: int, vpp: int, count: int, gbps: float
) -> None:
    """Where sends and passes do not slow each other; the simulation lets ranks that wait be slowed too."""
    parallel, batch = {"pp": pp, "vpp": vpp}, {"global": count, "micro": 1}
    run = describe(per_node=1, nodes=8, node_gbps=gbps, parallel=parallel, batch=batch, schedule=schedule)
    run, constants = alter(run, model={"vocab": 1024}), replace(DEFAULT, contention=0.0)
    predicted = predict(run, constants, interval=False).step_time_s
    assert predicted == pytest.approx(simulate_run(run, constants).simulation.step_time_s, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "tolerance"),
    [("gpipe", 2, 1, 0.04), ("gpipe", 8, 1, 0.04), ("interleaved", 2, 2, 0.02), ("interleaved", 8, 2, 0.02)],
)
@pytest.mark.parametrize("gbps", [50, 10])
@pytest.mark.parametrize("rounds", [2, 8])
def test_sends_hide_beside_the_pass_of_a_projection_too(
    schedule: str, pp: int, vpp: int, tolerance: float, gbps: float, rounds: int
) -> None:
    parallel, batch, layers = {"pp": pp, "vpp": vpp}, {"global": rounds * pp, "micro": 1}, 2 * pp * vpp
    run = describe(per_node=1, nodes=8, node_gbps=gbps, parallel=parallel, batch=batch, schedule=schedule)
    run = alter(run, model={"layers": layers})
    assert seconds(run) == pytest.approx(simulate_run(run).simulation.step_time_s, rel=tolerance)
    more = alter(run, model={"layers": layers + 1})
    assert seconds(more) > seconds(run)


@pytest.mark.parametrize("gbps", [200, 50])
def test_equal_stages_are_no_slower_than_stages_with_a_block_more(gbps: float) -> None:
    parallel, batch = {"pp": 4, "vpp": 2}, {"global": 8, "micro": 1}
    run = describe(per_node=1, nodes=4, node_gbps=gbps, parallel=parallel, batch=batch, schedule="interleaved")
    times = [seconds(alter(run, model={"layers": layers, "vocab": 1024})) for layers in (63, 64, 65)]
    assert times == sorted(times)


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(32, 4, 3), (105, 2, 3), (43, 8, 4)])
def test_many_rounds_of_uneven_stages_take_as_long_as_one_by_one(
    layers: int, pp: int, vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel, batch = {"pp": pp, "vpp": vpp}, {"global": pp * 60, "micro": 1}
    run = describe(parallel=parallel, batch=batch, schedule="interleaved", model={"layers": layers})
    exact = predict(run, interval=False)
    assert min(exact.breakdown["pipeline_send_s"], exact.breakdown["pipeline_bubble_s"]) >= 0
    monkeypatch.setattr("phalanx.auto.predict.pipeline.interleaved_schedule._MOST_PASSES", 1)
    assert seconds(run) == pytest.approx(exact.step_time_s, rel=0.02)


def test_a_long_schedule_of_many_stages_is_predicted_in_seconds() -> None:
    parallel, batch = {"pp": 100, "vpp": 3}, {"global": 10**6, "micro": 1}
    run = describe(nodes=13, parallel=parallel, batch=batch, schedule="interleaved", model={"layers": 301})
    assert seconds(run) > 10**6 * 4 * step(run).forward


def test_stages_copy_shards_once_a_step_each_by_itself() -> None:
    parallel, model = {"pp": 8, "dp": 2, "zero": 3}, {**EXPERTS, "experts": 64}
    run = describe(nodes=2, parallel=parallel, model=model, batch={"global": 2, "micro": 1})
    assert seconds(alter(run, batch={"global": 4})) >= seconds(run)


def test_the_gradient_of_the_embedding_lies_on_the_first_stage() -> None:
    parallel, batch, model = {"pp": 2}, {"global": 64, "micro": 1}, {"vocab": 256000, "layers": 3}
    run = step(describe(nodes=1, parallel=parallel, batch=batch, model=model))
    assert run.embedding_backward > run.exchanges.vocabulary_sum == 0
    # The last stage has a block less than the first.
    fewer = run.head.forward + run.head.backward - run.forward - run.backward
    assert run.head_on_top == pytest.approx(max(run.embedding_backward, fewer))
    simulated = simulate_run(run.run).simulation.pipeline.stages
    blocks = [2 * run.compute_backward, run.compute_backward]
    assert [stage.inputs.compute + stage.weights.compute for stage in simulated] == pytest.approx(
        [blocks[0] + run.embedding_backward, blocks[1] + run.head.backward]
    )

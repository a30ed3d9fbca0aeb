"""The event-level simulator: what holds for every step, its closed forms, and what it writes."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predict_fit import PUBLISHED
from phalanx.auto.predict.memory_model import compute_stage_footprint
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import read_run, read_runs
from phalanx.auto.simulate import events as simulator
from phalanx.auto.simulate.events import simulate
from phalanx.auto.simulate.gradients import GradientReduction
from phalanx.auto.simulate.run import simulate_run
from phalanx.auto.simulate.values import PassWork, PipelineSpec, Simulation, Slice, StageWork
from phalanx.cli.group import phalanx
from phalanx.errors import ConfigError, PlanError
from phalanx.plan.value import Schedule

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2)]
CLOSE = 1 + 1e-9
SECONDS = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
RUN: dict[str, Any] = {
    "name": "gpt-22B",
    "model": {"layers": 48, "hidden": 6144, "heads": 64, "seq": 2048, "vocab": 51200},
    "cluster": {"device": "A100-80GB-SXM", "per_node": 8, "nodes": 8, "node_gbps": 1600, "usd_per_device_hour": 2.0},
    "parallel": {"tp": 8, "pp": 4, "dp": 2, "zero": 1, "sequence_parallel": True},
    "batch": {"global": 32, "micro": 2},
    "precision": "bf16",
    "recompute": "none",
}


def even(kind: Any, ranks: int, microbatches: int, virtual: int = 1, **stage: Any) -> PipelineSpec:
    """Return equal stages with free sends: on each rank 1 s forward, 1 s for inputs' gradients, 1 s for weights'."""
    third = PassWork(compute=1 / virtual)
    work = replace(StageWork(forward=third, inputs=third, weights=third, activation_bytes=1 / virtual), **stage)
    return PipelineSpec(
        schedule=Schedule(kind=kind, virtual=virtual, microbatches=microbatches),
        ranks=ranks,
        stages=(work,) * (ranks * virtual),
        persistent_bytes=(0.0,) * ranks,
        optimizer=(0.0,) * ranks,
    )


@st.composite
def works(draw: st.DrawFn) -> PassWork:
    """Return a pass of any shape."""
    compute = draw(st.floats(1e-3, 10.0))
    return PassWork(compute=compute, exposed=draw(SECONDS), beside=draw(st.floats(0, 1)) * compute)


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineSpec:
    """Return a small pipeline whose stages differ."""
    kind, virtual = draw(st.sampled_from(KINDS))
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 4)) * (ranks if kind in ("interleaved", "zero_bubble") else 1)
    stages = tuple(
        StageWork(
            forward=draw(works()),
            inputs=draw(works()),
            weights=draw(works()),
            activation_bytes=draw(st.integers(0, 9)),
            workspace_bytes=draw(st.integers(0, 9)),
            send=draw(SECONDS),
            buckets=tuple(draw(st.lists(SECONDS, max_size=3))),
        )
        for _ in range(ranks * virtual)
    )
    return PipelineSpec(
        schedule=Schedule(kind=kind, virtual=virtual, microbatches=microbatches),
        ranks=ranks,
        stages=stages,
        persistent_bytes=tuple(float(draw(st.integers(0, 9))) for _ in range(ranks)),
        optimizer=tuple(draw(SECONDS) for _ in range(ranks)),
        opening=draw(SECONDS),
        closing=tuple(draw(SECONDS) for _ in range(ranks)),
        contention=draw(st.sampled_from([0.0, 0.5, 1.0])),
        overlaps_sends=draw(st.booleans()),
        overlaps_gradients=draw(st.booleans()),
    )


def longer(pipeline: PipelineSpec, place: int, name: str, more: float) -> PipelineSpec:
    """Return a pipeline in which one duration is longer."""
    if name == "optimizer":
        optimizer = list(pipeline.optimizer)
        optimizer[place % pipeline.ranks] += more
        return replace(pipeline, optimizer=tuple(optimizer))
    if name == "closing":
        closing = list(pipeline.closing)
        closing[place % pipeline.ranks] += more
        return replace(pipeline, closing=tuple(closing))
    if name == "opening":
        return replace(pipeline, opening=pipeline.opening + more)
    stages = list(pipeline.stages)
    stage = stages[place % len(stages)]
    if name in ("forward", "inputs", "weights"):
        work = getattr(stage, name)
        grown = replace(work, compute=work.compute + more) if place % 2 else replace(work, exposed=work.exposed + more)
        stage = replace(stage, **{name: grown})
    elif name == "send":
        stage = replace(stage, send=stage.send + more)
    else:
        stage = replace(stage, buckets=tuple(bucket + more for bucket in stage.buckets))
    stages[place % len(stages)] = stage
    return replace(pipeline, stages=tuple(stages))


def seconds_of(stage: StageWork) -> float:
    """Return the seconds of a micro-batch's passes through a stage, nothing beside them."""
    return sum(work.compute + work.exposed for work in (stage.forward, stage.inputs, stage.weights))


@given(pipelines())
def test_a_step_lies_between_the_busiest_rank_and_everything_in_turn(pipeline: PipelineSpec) -> None:
    found, count = simulate(pipeline), pipeline.schedule.microbatches
    holder = [pipeline.schedule.holder(stage, pipeline.ranks) for stage in range(len(pipeline.stages))]
    for rank in range(pipeline.ranks):
        work = sum(seconds_of(stage) for at, stage in zip(holder, pipeline.stages, strict=True) if at == rank)
        assert (
            found.step_time_s * CLOSE
            >= count * work + pipeline.optimizer[rank] + pipeline.opening + pipeline.closing[rank]
        )
    slower = 1 + pipeline.contention
    everything = sum(count * (seconds_of(s) + 2 * s.send) * slower + sum(s.buckets) * slower for s in pipeline.stages)
    assert (
        found.step_time_s <= (everything + sum(pipeline.optimizer) + pipeline.opening + max(pipeline.closing)) * CLOSE
    )


@given(
    pipelines(),
    st.integers(0, 20),
    st.sampled_from(["forward", "inputs", "weights", "send", "buckets", "optimizer", "opening", "closing"]),
    st.floats(1e-3, 10.0),
)
def test_nothing_that_takes_longer_makes_a_step_shorter(
    pipeline: PipelineSpec, at: int, name: str, more: float
) -> None:
    assert simulate(longer(pipeline, at, name, more)).step_time_s * CLOSE >= simulate(pipeline).step_time_s


@given(pipelines())
def test_a_stream_does_one_thing_at_a_time_and_time_adds_up(pipeline: PipelineSpec) -> None:
    found = simulate(pipeline)
    by_stream: dict[tuple[int, str], list[Slice]] = defaultdict(list)
    for one in found.slices:
        assert 0 <= one.start <= one.end * CLOSE <= found.step_time_s * CLOSE * CLOSE
        by_stream[one.rank, one.stream].append(one)
    for slices in by_stream.values():
        slices.sort(key=lambda one: (one.start, one.end))
        assert all(after.start >= before.end / CLOSE for before, after in itertools.pairwise(slices))
    for rank in found.ranks:
        assert rank.busy + rank.exposed + rank.idle == pytest.approx(found.step_time_s)
    sent = sum(sum(stage.buckets) for stage in pipeline.stages)
    travelled = sum(one.end - one.start for one in found.slices if one.stream == "gradients")
    assert sent / CLOSE - 1e-9 <= travelled <= sent * (1 + pipeline.contention) * CLOSE + 1e-9


@given(pipelines())
def test_passes_wait_for_their_inputs(pipeline: PipelineSpec) -> None:
    last = len(pipeline.stages) - 1
    begin, end = {}, {}
    for one in simulate(pipeline).slices:
        if one.stream in ("compute", "collectives") and one.stage >= 0:
            key = one.kind, one.stage, one.microbatch
            begin[key] = min(begin.get(key, one.start), one.start)
            end[key] = max(end.get(key, 0.0), one.end)
    for (kind, stage, microbatch), start in begin.items():
        needs = [("F", stage - 1)] if kind == "F" else [("I" if kind == "W" else "F", stage)]
        needs += [(kind, stage + 1)] if kind in ("B", "I") and stage < last else []
        for needed, of in needs:
            if of >= 0:
                assert end[needed, of, microbatch] <= start * CLOSE


@given(st.integers(1, 6), st.integers(1, 12))
def test_activations_are_those_that_the_schedules_promise(ranks: int, count: int) -> None:
    # Fewer than fill the pipeline all go forward before one goes back.
    in_flight = tuple(ranks - rank if count >= ranks else count for rank in range(ranks))
    assert simulate(even("1f1b", ranks, count)).peaks == in_flight
    assert simulate(even("gpipe", ranks, count)).peaks == (count,) * ranks
    first = simulate(even("interleaved", ranks, 3 * ranks, 2)).peaks[0]
    assert first == pytest.approx(ranks * (1 + (ranks - 1) / (2 * ranks)))  # Korthikanti et al. 2022, section 4.2.3
    assert max(simulate(even("zero_bubble", ranks, count * ranks)).peaks) == ranks


@pytest.mark.parametrize(("kind", "virtual"), KINDS[:4])
@given(st.integers(1, 8), st.integers(1, 4))
def test_equal_stages_and_free_sends_take_the_closed_form(kind: str, virtual: int, ranks: int, rounds: int) -> None:
    count = ranks * rounds
    found = simulate(even(kind, ranks, count, virtual))
    assert found.step_time_s == pytest.approx(3 * (count + (ranks - 1) / virtual))
    assert found.idle_share == pytest.approx((ranks - 1) / virtual / (count + (ranks - 1) / virtual))


@given(st.integers(1, 8), st.integers(1, 4))
def test_zero_bubble_fills_two_thirds_of_the_idle_time(ranks: int, rounds: int) -> None:
    found = simulate(even("zero_bubble", ranks, ranks * rounds))
    # Of the others' passes that a rank waits for, it fills as many seconds as their gradients of weights take.
    assert found.step_time_s <= 3 * ranks * rounds + 2 * (ranks - 1)
    assert found.step_time_s >= 3 * ranks * rounds + ranks - 1


@given(st.sampled_from(KINDS), st.integers(2, 5), st.integers(1, 5))
def test_more_micro_batches_of_the_same_work_idle_less(kind: tuple[str, int], ranks: int, rounds: int) -> None:
    few, many = (
        simulate(even(kind[0], ranks, ranks * by, kind[1], **{n: PassWork(compute=1 / by) for n in _PASSES}))
        for by in (rounds, rounds + 1)
    )
    assert many.idle_share < few.idle_share


_PASSES = ("forward", "inputs", "weights")


@given(pipelines(), st.integers(8, 11))
def test_a_collapsed_steady_state_is_that_of_running_every_micro_batch(pipeline: PipelineSpec, rounds: int) -> None:
    schedule = pipeline.schedule.model_copy(update={"microbatches": rounds * pipeline.ranks})
    many = replace(pipeline, schedule=schedule)
    short, whole = simulate(many), simulator._Step(many).run()
    assert short.step_time_s == pytest.approx(whole.step_time_s)
    for one, other in zip(short.ranks, whole.ranks, strict=True):
        assert one.busy == pytest.approx(other.busy)
    assert short.peaks == pytest.approx(whole.peaks)


def test_thousands_of_micro_batches_are_collapsed() -> None:
    found = simulate(even("1f1b", 8, 4096))
    assert found.left_out == 4096 - 6 * 8
    assert len(found.slices) < 1000
    assert found.step_time_s == pytest.approx(3 * (4096 + 7))


def test_gradients_beside_computation_cost_both() -> None:
    reduction = GradientReduction(0.5)
    reduction.add(0.0, 2.0)
    assert reduction.beside(0.0, 4.0) == 5.0  # the longer, and half of the 2 s they share
    assert reduction.done == [(0.0, 3.0)]
    reduction.add(5.0, 4.0)
    assert reduction.beside(5.0, 2.0) == 8.0
    assert reduction.finish(8.0) == 10.0
    assert reduction.done[1] == (5.0, 10.0)


def test_what_does_not_make_a_pipeline_is_an_error() -> None:
    for name, found in (("persistent_bytes", "4, 1, 4 and 4"), ("update_bytes", "4, 4, 4 and 1")):
        with pytest.raises(PlanError, match=f"4 ranks of 1 stages need 4 stages and 4 values of .*, found {found}"):
            replace(even("1f1b", 4, 4), **{name: (0.0,)})
    with pytest.raises(PlanError, match="9 do not make 2"):
        simulate(even("interleaved", 4, 9, 2))


# -- described runs ----------------------------------------------------------------------------------------------------


def described(**changes: Any) -> Simulation:
    """Return the simulated step of the run with parts replaced."""
    run = {k: {**v, **changes.get(k, {})} if isinstance(v, dict) else changes.get(k, v) for k, v in RUN.items()}
    return simulate_run(read_run(run | {k: v for k, v in changes.items() if k not in RUN})).simulation


def test_published_runs_take_what_the_closed_form_says_and_hold_what_the_footprint_says() -> None:
    with PUBLISHED.open() as lines:
        runs = [run for run in read_runs(lines, PUBLISHED.name) if not run.doubt and run.measured_step_time_s]
    pipelined = [run for run in runs if 1 < run.parallel.pp <= 16]
    for run in pipelined[::20] + [run for run in pipelined if run.parallel.vpp > 1] + runs[::40]:
        found = simulate_run(run).simulation
        uneven = run.model.layers % (run.parallel.pp * run.parallel.vpp) > 0
        expected = predict(run, interval=False).step_time_s
        assert found.step_time_s == pytest.approx(expected, rel=0.07 if uneven else 0.025), run.name
        assert found.peaks[0] == pytest.approx(compute_stage_footprint(run).total), run.name


@pytest.mark.parametrize("node_gbps", [1600, 50, 10, 2])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_interleaved_stages_that_differ_take_exactly_the_closed_form_without_replicas(
    overlaps: bool, rounds: int, node_gbps: float
) -> None:
    cluster = {**RUN["cluster"], "node_gbps": node_gbps}
    for layers, stages, virtual in [(22, 8, 2), (13, 4, 2), (43, 8, 4), (31, 2, 4)]:
        run = read_run(
            RUN
            | {"model": {**RUN["model"], "layers": layers}, "cluster": {**cluster, "nodes": stages}}
            | {"parallel": {**RUN["parallel"], "pp": stages, "vpp": virtual, "dp": 1}, "schedule": "interleaved"}
            | {"batch": {"global": rounds * stages, "micro": 1}, "overlap": {"pp": overlaps}}
        )
        found = predict(run, interval=False)
        assert simulate_run(run).simulation.step_time_s == pytest.approx(found.step_time_s, rel=1e-4), run.parallel
        assert min(seconds for name, seconds in found.breakdown.items() if name.endswith("_s")) >= 0


def test_one_rank_with_several_stages_waits_for_nobody() -> None:
    run = read_run(
        RUN
        | {"model": {**RUN["model"], "layers": 5}, "cluster": {**RUN["cluster"], "nodes": 1}}
        | {"parallel": {**RUN["parallel"], "pp": 1, "vpp": 2, "dp": 1}, "batch": {"global": 4, "micro": 1}}
    )
    breakdown = predict(run, interval=False).breakdown
    assert (breakdown["pipeline_send_s"], breakdown["pipeline_bubble_s"]) == (0.0, 0.0)


def test_a_run_of_which_all_is_whole_takes_exactly_the_closed_form() -> None:
    run = read_run(RUN | {"parallel": {"tp": 8}, "recompute": "full"})
    assert simulate_run(run).simulation.step_time_s == pytest.approx(predict(run).step_time_s)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 32), (8, 8)])
def test_zero_bubble_takes_the_closed_form_with_and_without_recomputation(
    recompute: str, stages: int, microbatches: int
) -> None:
    parallel, batch = {"tp": 8, "pp": stages, "dp": 8 // stages}, {"global": microbatches * 8 // stages, "micro": 1}
    cluster, model = {**RUN["cluster"], "nodes": 8}, {**RUN["model"], "layers": 32}
    run = read_run(
        RUN
        | {"parallel": parallel, "batch": batch, "cluster": cluster, "model": model}
        | {"recompute": recompute, "schedule": "zero-bubble"}
    )
    simulated, expected = simulate_run(run).simulation.step_time_s, predict(run, interval=False).step_time_s
    assert simulated == pytest.approx(expected, rel=0.035)
    plain = run.model_copy(update={"schedule": "1f1b"})
    assert expected < predict(plain, interval=False).step_time_s


def test_experts_that_get_more_tokens_hold_up_all_ranks_in_both() -> None:
    parallel = {"tp": 1, "dp": 8, "ep": 8}

    def seconds(load: float) -> tuple[float, float, float]:
        model = {**RUN["model"], "experts": 8, "top_k": 2, "layers": 4, "expert_load": load}
        run = read_run(RUN | {"parallel": parallel, "model": model, "batch": {"global": 8, "micro": 1}})
        simulated = simulate_run(run).simulation
        return predict(run, interval=False).step_time_s, simulated.step_time_s, simulated.peaks[0]

    even, busy, all_on_one, more = (seconds(load) for load in (1, 2, 8, 100))
    assert even[0] < busy[0] < all_on_one[0]
    assert all_on_one == more  # a rank gets all tokens at most
    assert even[2] < busy[2]
    for predicted, simulated, _ in (even, busy, all_on_one):
        assert simulated == pytest.approx(predicted, rel=0.03)


def test_schedules_of_a_run_differ_as_they_should() -> None:
    plain, interleaved, zero = described(), described(parallel={"vpp": 3}), described(schedule="zero-bubble")
    gpipe = described(schedule="gpipe")
    assert interleaved.idle_share < plain.idle_share
    assert zero.idle_share < plain.idle_share
    assert interleaved.peaks[0] > plain.peaks[0]
    assert gpipe.peaks[0] > plain.peaks[0]
    assert plain.peaks[0] > plain.peaks[1] > plain.peaks[2]
    with pytest.raises(ConfigError, match="schedule gpipe has one stage per rank, found vpp=2: set vpp to 1"):
        described(schedule="gpipe", parallel={"vpp": 2})


def test_a_mapping_is_simulated_as_it_is_predicted() -> None:
    assert simulate_run(RUN) == simulate_run(read_run(RUN))
    with pytest.raises(ConfigError, match=r"the run: modl is not known"):
        simulate_run({"modl": 1})


def test_tokens_and_price_follow_from_the_step() -> None:
    found = simulate_run(read_run(RUN))
    assert found.per_s == pytest.approx(32 * 2048 / found.simulation.step_time_s)
    assert found.usd_per_step == pytest.approx(2.0 / 3600 * 64 * found.simulation.step_time_s)
    without = {k: v for k, v in RUN["cluster"].items() if k != "usd_per_device_hour"}
    assert simulate_run(read_run(RUN | {"cluster": without})).usd_per_step is None


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with one run."""
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(RUN))
    return path


def test_a_trace_has_a_process_a_rank_and_its_memory(written: Path) -> None:
    trace = written.with_name("trace.json")
    done = CliRunner().invoke(phalanx, ["predict", str(written), "--json", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert f"{trace}: " in done.stderr
    json.loads(done.stdout)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(4))
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "forward 7" and event["cat"] == "compute" for event in spans) == 4
    assert all(event["dur"] >= 0 for event in spans)
    peak = max(event["args"]["GiB"] for event in events if event["ph"] == "C" and event["pid"] == 0)
    assert peak == pytest.approx(predict(RUN).memory_gib, abs=1e-3)


@pytest.mark.parametrize(
    ("language", "words"), [("en", ["forward", "idle", "stage 3"]), ("zh", ["前向", "空闲", "阶段 3"])]
)
def test_a_picture_says_what_its_colours_mean(
    written: Path, monkeypatch: pytest.MonkeyPatch, language: str, words: list[str]
) -> None:
    monkeypatch.setenv("PHALANX_LANG", language)
    picture = written.with_name("step.svg")
    done = CliRunner().invoke(phalanx, ["predict", str(written), "--timeline", str(picture)])
    assert done.exit_code == 0, done.output
    said = [element.text for element in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert set(words) <= set(said)
    assert {str(number) for number in range(8)} <= set(said)


def test_a_picture_of_many_stages_stays_small(tmp_path: Path) -> None:
    model, parallel = {"layers": 64, "hidden": 1024, "heads": 16}, {"tp": 1, "pp": 64, "dp": 1}
    run = RUN | {"model": RUN["model"] | model, "parallel": parallel, "batch": {"global": 1024, "micro": 1}}
    path, picture = tmp_path / "run.json", tmp_path / "step.svg"
    path.write_text(json.dumps(run))
    done = CliRunner().invoke(phalanx, ["predict", str(path), "--timeline", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.stat().st_size < 5e6
    assert "micro-batches of the steady state not drawn" in picture.read_text()


def test_the_picked_plan_is_drawn(written: Path) -> None:
    picture = written.with_name("plan.svg")
    words = ["plan", str(written), "--cluster", "h100x8", "--limit", "pp=2", "--top", "1", "--timeline", str(picture)]
    done = CliRunner().invoke(phalanx, words)
    assert done.exit_code == 0, done.output
    assert "stage 1" in picture.read_text()


def test_what_cannot_be_drawn_or_written_is_said(written: Path) -> None:
    done = CliRunner().invoke(phalanx, ["predict", str(written), "--trace", str(written.parent / "no" / "t.json")])
    assert done.exit_code != 0
    assert "t.json, and there is no folder" in done.output + str(done.exception)
    written.write_text(f"{json.dumps(RUN)}\n{json.dumps(RUN)}\n")
    done = CliRunner().invoke(phalanx, ["predict", str(written), "--trace", "t.json"])
    assert done.exit_code == 2
    assert "show one run, run.jsonl has 2" in done.output.replace(str(written.parent) + "/", "")

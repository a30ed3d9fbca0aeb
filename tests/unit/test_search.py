"""The search over ways to cut a described transformer: optimal, bounded, and clear about what does not fit."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.auto.predict.prediction import predict
from phalanx.auto.search.request import read_request
from phalanx.auto.search.search import SIMULATED, estimate_tensor_parallel, lower_bound, search
from phalanx.auto.search.space import list_runs
from phalanx.auto.simulate.run import simulate_run
from phalanx.cli.group import phalanx
from phalanx.errors import ConfigError, PlanError

GPT3: dict[str, Any] = {
    "name": "gpt3-175B",
    "model": {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200},
    "batch": {"global": 1536},
}


SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"layers": 8, "hidden": 1024, "heads": 8, "seq": 1024, "vocab": 1024},
    "batch": {"global": 32},
}
"""A run with few configurations."""


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """Return a small model and a small cluster."""
    heads = draw(st.sampled_from([4, 8, 16]))
    model = {
        "layers": draw(st.sampled_from([2, 3, 4, 12])),
        "hidden": heads * draw(st.sampled_from([32, 64])),
        "heads": heads,
        "seq": draw(st.sampled_from([128, 1024])),
        "vocab": 1024,
        "gated": draw(st.booleans()),
        "flash": draw(st.booleans()),
    }
    cluster = f"{draw(st.sampled_from(['a100', 'h100']))}x{draw(st.sampled_from([1, 2, 4]))}"
    cluster += f",nodes={draw(st.sampled_from([1, 2, 4]))},gbps={draw(st.sampled_from([10, 400]))}"
    job = {"model": model, "batch": {"global": draw(st.sampled_from([16, 48]))}}
    job["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble"]))
    job["precision"] = draw(st.sampled_from(["bf16", "fp8"])) if cluster.startswith("h100") else "bf16"
    job["software"] = draw(st.sampled_from(["", "Megatron-Core"]))
    job["overlap"] = {"tp": draw(st.booleans()), "dp": draw(st.booleans())}
    return job, cluster


predict_step = partial(predict, interval=False)
"""Predict a run, but not between which times its step lies, which takes 30 times as long."""


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_limit_on_the_order_takes_what_lies_alike(nodes: int) -> None:
    """Where another order puts the same ranks on each node, a limit to it leaves the same choices."""
    model = {"layers": 8, "hidden": 1024, "heads": 8, "seq": 1024, "vocab": 1024}
    job, cluster = {"model": model, "batch": {"global": 32}}, f"h100x8,nodes={nodes}"
    alike = (search(job, cluster, limits=["pp=1", f"order={order}"]) for order in ("tp-dp-pp", "tp-pp-dp"))
    assert len({(found.closed_form_s, found.choices) for found in alike}) == 1


def test_the_bound_of_wide_layers_leaves_out_what_shards_do() -> None:
    """Products are nearly all of such a step, and one of a block is not computed again where it is sharded."""
    model = {"layers": 2, "hidden": 32768, "heads": 64, "seq": 512, "vocab": 1024}
    described = {"model": model, "batch": {"global": 2048}, "precision": "fp8", "software": "Megatron-Core"}
    wide = list(list_runs(read_request(described, "b200x8,nodes=4", ["recompute=full", "micro>=8"])))
    assert any(run.parallel.zero >= 2 for run in wide)
    assert all(lower_bound(run, estimate_tensor_parallel(run)) <= predict_step(run).step_time_s for run in wide)


def test_no_choice_can_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        search(GPT3, "h100x8,nodes=16", top_k=0)


@settings(max_examples=10)
@given(jobs())
def test_the_best_is_that_of_trying_everything(job: tuple[dict[str, Any], str]) -> None:
    found = search(*job, top_k=SIMULATED)
    everything = sorted(p.step_time_s for p in map(predict_step, list_runs(read_request(*job))) if p.fits)
    assert sorted(c.prediction.step_time_s for c in found.top_k) == everything[:SIMULATED]
    assert found.closed_form_s == found.bound == everything[0]
    assert found.gap == 0
    assert found.priced <= found.choices


@settings(max_examples=8)
@given(jobs())
def test_the_fastest_are_simulated_and_in_that_order(job: tuple[dict[str, Any], str]) -> None:
    found = search(*job)
    steps = [choice.step_time_s for choice in found.top_k]
    assert steps == sorted(steps)
    assert steps == [simulate_run(choice.run).simulation.step_time_s for choice in found.top_k]
    assert search(*job, top_k=1).best == found.best


@settings(max_examples=10)
@given(jobs())
def test_the_bound_of_a_choice_is_below_its_time(job: tuple[dict[str, Any], str]) -> None:
    for run in list_runs(read_request(*job)):
        assert lower_bound(run, estimate_tensor_parallel(run)) <= predict_step(run).step_time_s * (1 + 1e-12)


@settings(max_examples=8)
@given(jobs())
def test_stopped_early_the_bound_still_holds(job: tuple[dict[str, Any], str]) -> None:
    stopped, whole = search(*job, top_k=1, time_limit=0.0), search(*job, top_k=1)
    assert stopped.bound <= whole.closed_form_s <= stopped.closed_form_s
    assert stopped.gap >= 0


@settings(max_examples=10)
@given(jobs(), st.sampled_from([2, 10]))
def test_more_of_a_network_never_makes_the_best_slower(job: tuple[dict[str, Any], str], more: int) -> None:
    described, cluster = job
    words, gbps = cluster.rsplit("=", 1)
    faster = search(described, f"{words}={int(gbps) * more}")
    assert faster.closed_form_s <= search(*job).closed_form_s * (1 + 1e-12)


def test_gpt3_on_1024_devices_is_proved_optimal() -> None:
    found = search(GPT3, "a100x8,nodes=128")
    assert found.gap == 0
    assert found.best.prediction.fits
    assert {"dp", "tp", "pp", "vpp", "zero", "micro", "recompute", "order"} == set(found.dimensions)
    assert set(found.dimensions["zero"]) == {0, 1, 2, 3}
    assert set(found.dimensions["recompute"]) == {"none", "selective", "full"}
    assert set(found.dimensions["order"]) == {"tp-dp-pp", "tp-pp-dp", "dp-tp-pp"}


def test_layers_may_be_cut_across_nodes_of_few_devices() -> None:
    assert 4 in search(GPT3, "a100x2,nodes=128").dimensions["tp"]
    on_one = search({"model": {**GPT3["model"], "layers": 2}, "batch": {"global": 16}}, "h100x8")
    assert on_one.dimensions["order"] == ("tp-dp-pp",)  # all orders are the same


def test_what_takes_long_to_simulate_is_left_at_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.auto.search.search._PASSES", 1)
    found = search(GPT3, "h100x8,nodes=16")
    assert found.simulated == 1
    assert [choice.simulated_s is None for choice in found.top_k] == [False, True, True, True, True]


def test_more_memory_never_makes_the_best_slower() -> None:
    small, large = (search(GPT3, f"{device}x8,nodes=64") for device in ("A100-40GB-SXM", "A100-80GB-SXM"))
    assert large.closed_form_s <= small.closed_form_s


def test_limits_are_kept_and_their_price_is_said() -> None:
    found = search(SMALL, "h100x8,nodes=2", limits=["tp<=2", "recompute=full"])
    assert all(c.values["tp"] <= 2 and c.values["recompute"] == "full" for c in found.top_k)  # type: ignore[operator]
    assert "With tp=2 the best is" in found.why_not("tp=2")
    assert "s a step, +" in search(SMALL, "h100x8,nodes=2").why_not("tp=2", "pp=1")
    with pytest.raises(ConfigError, match="why_not needs a limit"):
        found.why_not()


def test_a_search_cuts_what_a_prediction_does() -> None:
    """Of fewer heads of keys and values than ranks they hold copies."""
    few = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 2, "seq": 128, "vocab": 1024}
    found = search({"model": few, "batch": {"global": 4}}, "h100x4", limits=["tp=4"]).best
    assert predict(found.run, interval=False) == found.prediction
    with pytest.raises(PlanError, match="satisfies the limits"):
        search({"model": {**few, "ffn": 1026}, "batch": {"global": 4}}, "h100x4", limits=["tp=4"])


def test_what_cannot_fit_says_the_least_memory_and_what_fills_it() -> None:
    with pytest.raises(PlanError, match=r"the least that any needs is \d+\.\d GiB a device .* of which optimizer"):
        search(GPT3, "h100x8")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["tp=7"], "satisfies the limits"),
        (["tpp=7"], "Did you mean 'tp'"),
        (["tp!7"], r"Write a knob \(tp, .*, one of <=, >= and =, and a value"),
        (["zero=4"], "Write zero= and one of 0, 1, 2, 3"),
        (["tp<=-1"], "one of <=, >= and =, and a value"),
        (["recompute=half-way"], "one of none, selective, full"),
        (["recompute=half"], "one of none, selective, full"),
        (["tp=x"], "not an integer"),
        (["order=pp-tp-dp"], "one of tp-dp-pp, tp-pp-dp, dp-tp-pp"),
        (["ep=8"], "ep is not searched: every choice has ep=1"),
        (["cp<=2"], "cp is not searched"),
        (["schedule=gpipe"], "schedule is not searched: it is the file's"),
    ],
)
def test_limits_that_cannot_be_are_named(limits: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        search(GPT3, "h100x8,nodes=16", limits=limits)


def test_a_job_without_a_cluster_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Give --cluster"):
        search(GPT3)


def test_the_command_shows_choices_and_prints_json(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(SMALL))
    shown = CliRunner().invoke(phalanx, ["plan", str(file), "--cluster", "h100x8,nodes=2", "--why-not", "tp=2"])
    assert shown.exit_code == 0
    words = " ".join(shown.output.split())
    assert "priced by a formula: none is faster than" in words
    assert "within 0 % of the best by it" in words
    assert re.search("The [1-8] fastest by it were simulated event by event", words)
    assert "not searched: cp, ep and hsdp (1 in every choice); schedules other than the file's (1f1b)" in words
    assert "With tp=2" in words
    printed = CliRunner().invoke(phalanx, ["plan", str(file), "--cluster", "h100x8,nodes=2", "--json"]).output
    found = json.loads(printed)
    assert found["gap_percent"] == 0
    assert len(found["top"]) == 5
    assert found["priced"] > SIMULATED >= found["simulated"] >= 5
    steps = [one["simulated_step_time_s"] for one in found["top"]]
    assert steps == sorted(steps)
    file.write_text("[")
    assert isinstance(CliRunner().invoke(phalanx, ["plan", str(file)]).exception, ConfigError)


def test_what_is_not_searched_is_said_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LANG", "zh")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(SMALL))
    shown = CliRunner().invoke(phalanx, ["plan", str(file), "--cluster", "h100x8,nodes=2,usd=2"]).output
    assert "未搜索：cp、ep 和 hsdp" in shown
    assert "第一种每步" in shown


def test_a_run_keeps_its_price_on_another_cluster() -> None:
    own = {"device": "H100-80GB-SXM", "per_node": 8, "nodes": 2, "node_gbps": 3200, "usd_per_device_hour": 2.0}
    for described, cluster, price in [
        (own, "h100x8,nodes=16", 2.0),
        (own, "h100x8,nodes=16,usd=2.5", 2.5),
        ("h100x8,nodes=2,usd=3", "h100x8,nodes=16", 3.0),
        ("nowhere.toml", "h100x8,nodes=16", None),
    ]:
        assert read_request({**GPT3, "cluster": described}, cluster).base.cluster.usd_per_device_hour == price
    best = search({**GPT3, "cluster": own}, "h100x8,nodes=16", limits=["tp=8", "pp=16"]).best
    assert best.usd_per_step == pytest.approx(2.0 / 3600 * 128 * best.step_time_s)


def test_the_command_counts_no_collectives_as_runs(tmp_path: Path) -> None:
    file, words = tmp_path / "run.jsonl", ["--cluster", "h100x8,nodes=2", "--top", "1", "--json"]
    collective = json.dumps({"name": "a", "collective": "all_reduce", "bytes": 1})
    file.write_text(collective + "\n" + json.dumps(SMALL))
    done = CliRunner().invoke(phalanx, ["plan", str(file), *words])
    assert done.exit_code == 0
    assert "skipped single collectives, which are no runs: 1 (1 all_reduce)" in done.stderr
    json.loads(done.stdout)
    file.write_text(collective * 2)
    said = CliRunner().invoke(phalanx, ["plan", str(file), *words]).output
    assert "has no run, only single collectives: 2 (2 all_reduce). Write each run as a JSON object" in said
    file.write_text(json.dumps(SMALL) * 2)
    assert "has 2. Give one of them." in CliRunner().invoke(phalanx, ["plan", str(file), *words]).output

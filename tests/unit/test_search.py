"""The search over ways to cut a described transformer: optimal, bounded, and clear about what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.auto.job import read_job
from phalanx.auto.predict import predict
from phalanx.auto.search import choices_of, lower_bound, search
from phalanx.cli.group import phalanx
from phalanx.errors import ConfigError, PlanError

GPT3: dict[str, Any] = {
    "name": "gpt3-175B",
    "model": {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200},
    "batch": {"global": 1536},
}


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
    return {"model": model, "batch": {"global": draw(st.sampled_from([16, 48]))}}, cluster


@settings(max_examples=20, deadline=None)
@given(jobs())
def test_the_best_is_that_of_trying_everything(job: tuple[dict[str, Any], str]) -> None:
    found = search(*job, top_k=3)
    everything = sorted(p.step_time_s for p in map(predict, choices_of(read_job(*job))) if p.fits)
    assert [c.prediction.step_time_s for c in found.top_k] == everything[:3]
    assert found.gap == 0
    assert found.priced <= found.choices


@settings(max_examples=20, deadline=None)
@given(jobs())
def test_the_bound_of_a_choice_is_below_its_time(job: tuple[dict[str, Any], str]) -> None:
    for run in choices_of(read_job(*job)):
        assert lower_bound(run) <= predict(run).step_time_s


@settings(max_examples=15, deadline=None)
@given(jobs())
def test_stopped_early_the_bound_still_holds(job: tuple[dict[str, Any], str]) -> None:
    stopped, whole = search(*job, top_k=1, time_limit=0.0), search(*job, top_k=1)
    assert stopped.bound <= whole.best.prediction.step_time_s <= stopped.best.prediction.step_time_s
    assert stopped.gap >= 0


@settings(max_examples=10, deadline=None)
@given(jobs(), st.sampled_from([2, 10]))
def test_more_of_a_network_never_makes_the_best_slower(job: tuple[dict[str, Any], str], more: int) -> None:
    described, cluster = job
    words, gbps = cluster.rsplit("=", 1)
    faster = search(described, f"{words}={int(gbps) * more}")
    assert faster.best.prediction.step_time_s <= search(*job).best.prediction.step_time_s * (1 + 1e-12)


def test_gpt3_on_1024_devices_is_proved_optimal() -> None:
    found = search(GPT3, "a100x8,nodes=128")
    assert found.gap == 0
    assert found.best.prediction.fits
    assert {"dp", "tp", "pp", "vpp", "zero", "micro", "recompute"} == set(found.dimensions)
    assert set(found.dimensions["zero"]) == {0, 1, 2, 3}
    assert set(found.dimensions["recompute"]) == {"none", "selective", "full"}


def test_more_memory_never_makes_the_best_slower() -> None:
    small, large = (search(GPT3, f"{device}x8,nodes=64") for device in ("A100-40GB-SXM", "A100-80GB-SXM"))
    assert large.best.prediction.step_time_s <= small.best.prediction.step_time_s


def test_limits_are_kept_and_their_price_is_said() -> None:
    found = search(GPT3, "h100x8,nodes=16", limits=["tp<=2", "recompute=full"])
    assert all(c.values["tp"] <= 2 and c.values["recompute"] == "full" for c in found.top_k)  # type: ignore[operator]
    assert "With tp=1 the best is" in found.why_not("tp=1")
    assert "s a step, +" in search(GPT3, "h100x8,nodes=16").why_not("tp=1", "pp=1")
    with pytest.raises(ConfigError, match=r"why_not was asked for nothing\. Name a limit"):
        found.why_not()


def test_a_search_cuts_what_a_prediction_does() -> None:
    """Of fewer heads of keys and values than ranks they hold copies."""
    few = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 2, "seq": 128, "vocab": 1024}
    found = search({"model": few, "batch": {"global": 4}}, "h100x4", limits=["tp=4"]).best
    assert predict(found.run) == found.prediction
    with pytest.raises(PlanError, match="keeps to its limits"):
        search({"model": {**few, "ffn": 1026}, "batch": {"global": 4}}, "h100x4", limits=["tp=4"])


def test_what_cannot_fit_says_the_least_memory_and_what_fills_it() -> None:
    with pytest.raises(PlanError, match=r"the least that any needs is \d+\.\d GiB a device .* of which optimizer"):
        search(GPT3, "h100x8")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["tp=7"], "keeps to its limits"),
        (["tpp=7"], "Did you mean 'tp'"),
        (["tp!7"], r"Write a knob \(tp, .*, one of <=, >= and =, and a value"),
        (["zero=4"], "Write zero= and one of 0, 1, 2, 3"),
        (["tp<=-1"], "one of <=, >= and =, and a value"),
        (["recompute=half-way"], "one of none, selective, full"),
        (["recompute=half"], "one of none, selective, full"),
        (["tp=x"], "no whole number"),
    ],
)
def test_limits_that_cannot_be_are_named(limits: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        search(GPT3, "h100x8,nodes=16", limits=limits)


def test_a_job_without_a_cluster_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Give --cluster"):
        search(GPT3)


def test_the_command_shows_choices_and_prints_json(tmp_path: Path) -> None:
    file = tmp_path / "gpt3.json"
    file.write_text(json.dumps(GPT3))
    shown = CliRunner().invoke(phalanx, ["plan", str(file), "--cluster", "h100x8,nodes=16", "--why-not", "tp=1"])
    assert shown.exit_code == 0
    assert "within 0 % of the best" in " ".join(shown.output.split())
    assert "With tp=1" in shown.output
    printed = CliRunner().invoke(phalanx, ["plan", str(file), "--cluster", "h100x8,nodes=16", "--json"]).output
    found = json.loads(printed)
    assert found["gap_percent"] == 0
    assert len(found["top"]) == 5
    file.write_text("[")
    assert isinstance(CliRunner().invoke(phalanx, ["plan", str(file)]).exception, ConfigError)


def test_the_command_counts_no_collectives_as_runs(tmp_path: Path) -> None:
    file, words = tmp_path / "gpt3.jsonl", ["--cluster", "h100x8,nodes=16", "--top", "1", "--json"]
    collective = json.dumps({"name": "a", "collective": "all_reduce", "bytes": 1})
    file.write_text(collective + "\n" + json.dumps(GPT3))
    assert CliRunner().invoke(phalanx, ["plan", str(file), *words]).exit_code == 0
    file.write_text(collective)
    assert "has no run. Write each as a JSON object" in CliRunner().invoke(phalanx, ["plan", str(file), *words]).output
    file.write_text(json.dumps(GPT3) * 2)
    assert "has 2. Give one of them." in CliRunner().invoke(phalanx, ["plan", str(file), *words]).output

"""`px.predict` and `phalanx predict`: time and memory of described runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from benchmarks.bench_predict import judge_fit, memory_rows
from benchmarks.predict_fit import PUBLISHED, read_measured, read_published, shipped
from phalanx.auto.cost.collectives import ClusterLinks, GroupTopology
from phalanx.auto.cost.constants import DEFAULT, constants_of
from phalanx.auto.cost.kernels import Kernels, alignment
from phalanx.auto.cost.priors import PRIORS
from phalanx.auto.predict.memory_model import block_bytes, compute_footprint, compute_stage_footprint
from phalanx.auto.predict.prediction import predict
from phalanx.auto.predict.run_file import parse_runs, read_run, read_runs
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.auto.predict.step_seconds import StepSeconds
from phalanx.cli.group import phalanx
from phalanx.cluster.calibration.figures import Rates
from phalanx.cluster.spec.devices import DEVICES, GIB, Device
from phalanx.errors import ConfigError

RUN: dict[str, Any] = {
    "name": "gpt-22B",
    "model": {"kind": "gpt", "layers": 48, "hidden": 6144, "heads": 64, "seq": 2048, "vocab": 51200, "flash": False},
    "cluster": {"device": "A100-80GB-SXM", "per_node": 8, "nodes": 1, "node_gbps": 1600},
    "parallel": {"tp": 8, "pp": 1, "dp": 1},
    "batch": {"global": 4, "micro": 4},
    "precision": "fp16",
    "recompute": "full",
}


def described(**changes: Any) -> dict[str, Any]:
    """Return the run with parts replaced: `model={"layers": 2}` changes the layers alone."""
    run = copy.deepcopy(RUN)
    for name, value in changes.items():
        run[name] = {**run[name], **value} if isinstance(value, dict) and name in run else value
    return run


def test_a_published_run_comes_out_within_a_tenth() -> None:
    found = px.predict(RUN)
    assert found.step_time_s == pytest.approx(1.42, rel=0.1)  # Korthikanti et al. 2022, table 5
    assert found.fits
    assert sum(v for k, v in found.breakdown.items() if k.endswith("_s")) == pytest.approx(found.step_time_s)
    assert sum(v for k, v in found.breakdown.items() if k.endswith("_gib")) == pytest.approx(found.memory_gib)


def test_published_rows_stay_as_close_as_the_page_says() -> None:
    runs = read_measured()
    off = np.array([predict(run, interval=False).step_time_s / run.measured_step_time_s - 1 for run in runs])
    assert len(off) > 400
    assert np.median(np.abs(off)) < 0.05
    assert np.quantile(np.abs(off), 0.9) < 0.12


def test_published_memory_stays_as_close_as_the_page_says() -> None:
    with PUBLISHED.open() as lines:
        runs = [r for r in read_runs(lines, PUBLISHED.name) if not r.doubt and "memory_gib" in r.measured]
    off = [abs(predict(run, interval=False).memory_gib / run.measured["memory_gib"] - 1) for run in runs]
    assert len(off) > 40
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.9) < 0.05


def test_published_runs_fit_the_devices_they_ran_on() -> None:
    with PUBLISHED.open() as lines:
        runs = [r for r in read_runs(lines, PUBLISHED.name) if not r.doubt and r.measured_step_time_s]
    found = [predict(run, interval=False) for run in runs]
    assert sum(not one.fits for one in found) < 0.02 * len(runs)
    assert all(one.memory_gib * GIB < 1.05 * run.device.memory for one, run in zip(found, runs, strict=True))


def test_the_last_stage_counts_where_it_holds_more() -> None:
    wide = {"vocab": 512000, "layers": 8, "tied": False}
    run = read_run(described(model=wide, parallel={"tp": 1, "pp": 8}, batch={"global": 8, "micro": 4}))
    assert compute_footprint(run) == compute_stage_footprint(run, at_end=True)
    assert compute_footprint(run).logits > 0
    plain = read_run(described(parallel={"tp": 1, "pp": 8}, batch={"global": 64, "micro": 1}, recompute="none"))
    assert compute_footprint(plain) == compute_stage_footprint(plain)


def test_memory_is_of_the_kind_that_is_asked_for() -> None:
    kinds = (px.predict(described(memory_kind=kind)).memory_gib for kind in ("allocated", "reserved", None))
    allocated, reserved, device = kinds
    assert allocated < reserved < device


@given(st.floats(1.0, 8.0), st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 4]), st.booleans())
def test_more_of_a_network_is_never_slower(more: float, zero: int, pp: int, overlaps: bool) -> None:
    parallel = {"tp": 2, "pp": pp, "dp": 32 // pp, "zero": zero}
    slow = described(parallel=parallel, cluster={"nodes": 8}, batch={"global": 512}, overlap={"dp": overlaps})
    fast = described(**{**slow, "cluster": {**slow["cluster"], "node_gbps": 1600 * more}})
    faster, slower = (predict(run, interval=False).step_time_s for run in (fast, slow))
    assert faster <= slower * (1 + 1e-12)


@given(st.integers(1, 3), st.integers(1, 8))
def test_sharding_never_holds_more(zero: int, nodes: int) -> None:
    parallel = {"tp": 1, "dp": 8 * nodes}
    cluster = {"nodes": nodes}
    batch = {"global": 64 * nodes}
    plain = compute_footprint(read_run(described(parallel=parallel, cluster=cluster, batch=batch)))
    cut = compute_footprint(read_run(described(parallel={**parallel, "zero": zero}, cluster=cluster, batch=batch)))
    assert cut.optimizer + cut.parameters + cut.gradients <= plain.optimizer + plain.parameters + plain.gradients


def test_checkpoints_of_pytorch_stop_before_the_last_product() -> None:
    pytorch, megatron = (
        StepSeconds(read_run(described(stack=stack)), DEFAULT) for stack in ("pytorch", "megatron-2022")
    )
    assert pytorch.recompute.forward == pytorch.block.forward - pytorch.block.closing_product
    assert megatron.recompute.forward == megatron.block.forward


def test_attention_is_as_fast_as_the_kernels_that_the_software_has() -> None:
    kernels = Kernels(DEVICES["H100-80GB-SXM"], DEFAULT, "bf16")
    first, common, native = (kernels.attention(1e12, generation=g) for g in ("first", "common", "native"))
    assert native < common < first
    ampere = Kernels(DEVICES["A100-80GB-SXM"], DEFAULT, "bf16")
    assert ampere.attention(1e12, generation="native") == ampere.attention(1e12)


@pytest.mark.parametrize(
    ("software", "device", "stack"),
    [
        ("MosaicML Composer, PyTorch FSDP", "A100-80GB-SXM", "mosaicml"),
        ("torchtitan, June 2025", "A100-80GB-SXM", "pytorch"),
        ("NeMo 24.12", "A100-80GB-SXM", "megatron-core"),
        ("Megatron-LM + TE", "A100-80GB-SXM", "megatron-core"),
        ("Megatron-LM, April 2021", "A100-80GB-SXM", "megatron-2021"),
        ("Megatron-LM 2022", "A100-80GB-SXM", "megatron-2022"),
        ("Megatron-LM", "H100-80GB-SXM", "megatron-core"),
        ("Megatron-DeepSpeed", "A100-80GB-SXM", "generic"),
        ("our own", "A100-80GB-SXM", None),
    ],
)
def test_software_names_its_stack(software: str, device: str, stack: str | None) -> None:
    run = read_run(described(software=software, cluster={"device": device}))
    assert run.stack_name == stack
    assert read_run(described(software=software, stack="pytorch")).stack_name == "pytorch"


def test_sharding_more_does_not_change_kernels() -> None:
    parallel = {"tp": 1, "dp": 8}
    one, two = (
        StepSeconds(read_run(described(parallel={**parallel, "zero": zero}, batch={"global": 32})), DEFAULT)
        for zero in (1, 2)
    )
    assert one.block.forward == two.block.forward
    assert one.recompute == two.recompute


def test_heads_that_loads_and_kernels_do_not_fit_are_slower() -> None:
    def forward(heads: int, *, flash: bool) -> float:
        run = described(model={"hidden": 2560, "heads": heads, "flash": flash}, parallel={"tp": 1})
        return StepSeconds(read_run(run), DEFAULT).block.attention

    assert forward(32, flash=True) > forward(20, flash=True)  # 80 wide, computed as 96
    assert alignment(80) == 1.0
    assert alignment(81) < alignment(82) < alignment(84) < 1.0
    assert forward(25, flash=False) > forward(26, flash=False) * 24 / 26  # 102.4 and 98.5 wide: neither fits


def test_a_softmax_that_its_kernel_does_not_take_is_operators() -> None:
    one, two = (described(model={"heads": 16}, batch={"global": m, "micro": m}) for m in (1, 2))  # two heads, four
    assert read_run(one).splits_softmax
    assert not read_run(two).splits_softmax
    assert not read_run({**one, "compile": True}).splits_softmax
    split, whole = (StepSeconds(read_run(run), DEFAULT).block for run in (one, two))
    assert split.forward_launches == whole.forward_launches + 4
    assert split.attention > whole.attention / 2


def test_gradients_are_added_up_beside_products_until_2021() -> None:
    def backward(software: str, micro_batches: int) -> float:
        run = described(batch={"global": 4 * micro_batches}, software=software)
        return StepSeconds(read_run(run), DEFAULT).block.backward

    assert backward("Megatron-LM, April 2021", 1) == backward("Megatron-LM 2022", 1) == backward("Megatron-LM 2022", 8)
    added = backward("Megatron-LM, April 2021", 8) - backward("Megatron-LM 2022", 8)
    parameters = 12 * 6144**2 / 8
    assert added == pytest.approx(6 * parameters * 7 / 8 / (DEVICES["A100-80GB-SXM"].bandwidth * DEFAULT.stream))


def test_shards_cost_two_copies_of_each_parameter_in_every_micro_batch() -> None:
    def backward(zero: int, micro_batches: int) -> float:
        parallel, batch = {"zero": zero, "dp": 2}, {"global": 8 * micro_batches}
        run = described(parallel=parallel, batch=batch, cluster={"nodes": 2}, software="Megatron-LM 2022")
        return StepSeconds(read_run(run), DEFAULT).block.backward

    assert backward(2, 1) == backward(3, 8), "of each micro-batch"
    copies = 8 * 12 * 6144**2 / 8 / (DEVICES["A100-80GB-SXM"].bandwidth * DEFAULT.stream)
    assert backward(2, 1) - backward(0, 1) == pytest.approx(copies)


def test_few_heads_wait_for_the_longest_block_of_rows() -> None:
    kernels = Kernels(DEVICES["A100-80GB-SXM"], DEFAULT, "bf16")
    flops, longest = (4 * 4096 * 4096 * 128 / 2, 4 * 128 * 4096 * 128)
    few, many = (kernels.attention(heads * flops, longest=longest) / heads for heads in (4, 64))
    assert few > 1.8 * many  # SimuMax 1.2, table of A100: 0.51 and 1.19 of the peak


def machine(**changes: Any) -> Device:
    """Return a machine as measured: 50 GFLOP/s, 1 us a launch, 1 ms for an all-reduce of two ranks."""

    def line(seconds: float) -> dict[str, Any]:
        return {"axes": [[2**20]], "seconds": [seconds], "powers": [1]}

    def cube(seconds: float) -> dict[str, Any]:
        return {"axes": [[1024]] * 3, "seconds": [seconds], "powers": [1, 1, 1]}

    product = cube(2 * 1024**3 / 50e9)
    grids = {"matmul fp32": product, "matmul bf16": product, "all_reduce shm 2": line(1e-3)}
    grids |= {"attention forward": cube(0.1), "attention backward": cube(0.3)}
    said = {"threads": 1, "launch_s": 1e-6, "backward_launch_s": 1e-6, "checkpoint_s": 1e-4, "selective_op_s": 1e-5}
    rates = Rates.model_validate({"grids": grids} | {name: said[name] for name in Rates.model_fields if name in said})
    figures: dict[str, Any] = {
        "name": "measured",
        "flops": {"fp32": 50e9, "bf16": 50e9},
        "sustained": 1.0,
        "memory": 2**34,
        "bandwidth": 1e10,
        "multiprocessors": 1,
        "link": 1e9,
        "measured": rates,
    }
    return Device(**(figures | changes))


def test_a_measured_machine_takes_what_it_was_measured_to_take() -> None:
    device = machine()
    kernels = Kernels(device, constants_of(device), "fp32")
    assert kernels.matmul(2048, 1024, 1024) == pytest.approx(2 * 2 * 1024**3 / 50e9)
    assert kernels.streamed(1e10) == pytest.approx(1.0)
    assert constants_of(device).launch_s == 1e-6
    assert ClusterLinks(device, 10, constants_of(device)).all_reduce(2**20, GroupTopology(2, 2)) == pytest.approx(1e-3)
    assert constants_of(machine(measured=None)) == DEFAULT


def test_stages_gather_parameters_once_a_step() -> None:
    parallel = {"tp": 1, "pp": 2, "dp": 4, "zero": 3}
    few, many = (
        predict(described(parallel=parallel, batch={"global": 4 * count, "micro": 1})).breakdown for count in (4, 64)
    )
    assert few["exposed_communication_s"] == many["exposed_communication_s"] == 0.0
    assert few["gradients_s"] == many["gradients_s"] > 0.0


def test_recomputation_trades_time_for_memory() -> None:
    none, full = (predict(described(recompute=how)) for how in ("none", "full"))
    assert none.step_time_s < full.step_time_s
    assert none.memory_gib > full.memory_gib


def test_activations_are_those_of_the_paper() -> None:
    # Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes a layer, nothing cut, with biases and dropout.
    run = read_run(described(parallel={"tp": 1}, recompute="none"))
    s, b, h, a = 2048, 4, 6144, 64
    assert block_bytes(run) == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.05)


def test_tiles_of_a_last_wave_cost_a_whole_one() -> None:
    kernels = Kernels(DEVICES["A100-80GB-SXM"], DEFAULT, "bf16")
    full, one_more = kernels.matmul(256 * 108, 128, 8192), kernels.matmul(256 * 108 + 1, 128, 8192)
    assert one_more > full
    assert kernels.matmul(1, 1, 1) >= DEFAULT.kernel_gap_s


def test_groups_that_share_ports_take_as_much_longer() -> None:
    links = ClusterLinks(DEVICES["A100-80GB-SXM"], 400, DEFAULT)
    alone, shared = (links.all_reduce(1e9, GroupTopology(16, 4, sharing)) for sharing in (1, 2))
    assert shared == pytest.approx(2 * alone, rel=0.01)
    assert links.all_reduce(1e9, GroupTopology(8, 8)) < alone
    assert links.all_reduce(1e9, GroupTopology(1, 1)) == links.all_gather(1e9, GroupTopology(1, 1)) == 0


def test_a_gather_goes_round_all_nodes_and_a_sum_up_and_down_a_tree() -> None:
    links = ClusterLinks(DEVICES["H100-80GB-SXM"], 3200, DEFAULT)

    def added(layouts: tuple[GroupTopology, GroupTopology], which: str) -> float:
        few, many = (getattr(links, which)(1.0, layout) for layout in layouts)
        return float(many - few)

    assert added((GroupTopology(64, 8), GroupTopology(128, 8)), "all_gather") > 7 * DEFAULT.network_hop_s
    assert added((GroupTopology(64, 8), GroupTopology(128, 8)), "all_reduce") == pytest.approx(
        2 * DEFAULT.network_hop_s, rel=0.01
    )


def test_ranks_hold_copies_of_keys_and_values_where_heads_are_fewer() -> None:
    """As many heads of keys and values as ranks, and fewer, take the same; one rank alone holds each head once."""

    def of_rank(heads: int, ranks: int) -> tuple[float, float]:
        run = read_run(described(model={"kv_heads": heads}, parallel={"tp": ranks}))
        return run.block_parameters, predict(run).step_time_s

    assert of_rank(2, 8) == of_rank(8, 8)
    assert of_rank(2, 1) < of_rank(8, 1)


def test_heads_need_not_divide_the_width() -> None:
    xl = {"layers": 24, "hidden": 2048, "heads": 24}  # GPT-3 XL, as its paper has it
    near = described(model={**xl, "heads": 32}, parallel={"tp": 1})
    found, other = px.predict(described(model=xl, parallel={"tp": 1})), px.predict(near)
    assert found.step_time_s == pytest.approx(other.step_time_s, rel=0.2)


def test_a_step_takes_as_long_as_its_fullest_replica() -> None:
    def with_batch_size(rows: int) -> dict[str, Any]:
        return described(parallel={"tp": 1, "dp": 4}, batch={"global": rows, "micro": 2})

    uneven, full = px.predict(with_batch_size(10)), px.predict(with_batch_size(12))
    assert uneven.step_time_s == full.step_time_s
    assert uneven.tokens_per_s_per_device == pytest.approx(full.tokens_per_s_per_device * 10 / 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hiden": 5}}, r"model\.hiden is not known. Did you mean 'hidden'"),
        ({"parallel": {"tp": 16}}, "tp x pp x dp x cp is 16, and the cluster has 8 devices"),
        ({"precision": "fp8"}, "Asked for fp8 on A100-80GB-SXM, which computes in bf16"),
        ({"cluster": {"device": "A100-48GB"}}, "which is none of A100-80GB-SXM, A100-40GB-SXM"),
        ({"cluster": {"device": "H1000"}}, "which is not known"),
        ({"name": list(range(5_000))}, r"name: .*, found \[0, 1, 2, [^a-z]{60,70}\.\.\.$"),
        ({"batch": {"micro": 0}}, r"batch\.micro: Input should be greater than 0"),
        ({"model": {"heads": 64, "kv_heads": 7}}, "must be a multiple of kv_heads"),
        ({"model": {"layers": 1}, "parallel": {"tp": 1, "pp": 2}}, "1 layers do not make 2 x 1 stages"),
        (
            {"model": {"heads": 48}, "parallel": {"tp": 5}},
            r"the run: model\.heads \(48\) must be a multiple of parallel\.tp",
        ),
        ({"model": {"heads": 6145}}, r"model: hidden \(6144\) must be heads \(6145\) or more"),
        ({"model": {"ffn": 4095}}, r"the feed-forward width \(4095\) must be a multiple of parallel\.tp \(8\)"),
        (
            {"model": {"seq": 2044}, "parallel": {"sequence_parallel": True}},
            r"model\.seq \(2044\) must be .* of parallel\.cp \(1\), and with sequence_parallel of tp times that",
        ),
        (
            {"model": {"experts": 8, "top_k": 1}, "parallel": {"tp": 1, "pp": 8, "ep": 8}},
            r"parallel\.ep \(8\) must divide tp x cp x dp \(1\)",
        ),
        (
            {"model": {"heads": 24, "kv_heads": 6}, "parallel": {"tp": 4}},
            "one of model.kv_heads .6. and parallel.tp .4.",
        ),
        ({"parallel": {"tp": 1, "cp": 3}}, r"model\.seq \(2048\) must be a multiple of parallel\.cp \(3\)"),
        ({"parallel": {"tp": 1, "ep": 2}}, r"model\.experts \(0\) must be a multiple of parallel\.ep \(2\)"),
        ({"parallel": {"tp": 1, "dp": 8}}, r"batch\.global \(4\) must be dp \(8\) or more"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        px.predict(described(**changes))


def test_lines_that_are_no_json_are_named() -> None:
    with pytest.raises(ConfigError, match=r"runs.jsonl, line 2: not JSON"):
        read_runs([json.dumps(RUN), "{"], "runs.jsonl")


def test_an_object_left_open_is_named_by_the_line_it_begins_in() -> None:
    run, said = (
        json.dumps(RUN),
        r"r, line 2: not JSON \(Expecting ',' delimiter in line 3, column 1\). Write each run as",
    )
    with pytest.raises(ConfigError, match=said):
        read_runs([run, run[:-1], run], "r")
    with pytest.raises(ConfigError, match=r"r, line 3: not JSON \(.* in line 4, column 6\)"):
        read_runs([run, "", '{"name":', '     x, "model": 1}', run], "r")


def test_every_value_of_a_long_file_is_told_by_its_line() -> None:
    places = [place for place, _ in parse_runs(["[", "1]", ""] * 5_000, "r")[0]]
    assert places == [f"r, line {line}" for line in range(1, 15_000, 3)]


def test_what_does_not_fit_is_said() -> None:
    assert not px.predict(described(parallel={"tp": 1}, recompute="none")).fits


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    collective = {"name": "a", "collective": "all_reduce", "bytes": 1}
    file.write_text(json.dumps({**RUN, "measured": {"step_time_s": 1.42}}) + "\n\n" + json.dumps(collective) + "\n")
    shown = CliRunner().invoke(phalanx, ["predict", str(file)])
    assert shown.exit_code == 0
    assert "gpt-22B" in shown.output
    assert "compute" in shown.output
    assert "skipped single collectives, which are no runs: 1 (1 all_reduce)" in shown.stderr
    lines = CliRunner().invoke(phalanx, ["predict", str(file), "--json"]).stdout.splitlines()
    (found,) = [json.loads(line) for line in lines]
    assert found["step_time_s"] == px.predict(RUN).step_time_s
    assert found["memory_gib"] * GIB == pytest.approx(compute_footprint(read_run(RUN)).total)


def test_the_order_of_ranks_says_which_groups_cross_nodes() -> None:
    shape = {"tp": 2, "pp": 4, "dp": 8}

    def seconds(order: str) -> dict[str, float]:
        cluster = {"device": "A100-80GB-SXM", "per_node": 8, "nodes": 8, "node_gbps": 100}
        run = described(cluster=cluster, parallel={**shape, "order": order}, batch={"global": 64, "micro": 1})
        return px.predict(run).breakdown

    plain, stages_inside, copies_inside = map(seconds, ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp"))
    assert stages_inside["pipeline_send_s"] < plain["pipeline_send_s"]
    assert stages_inside["gradients_s"] > plain["gradients_s"]
    assert copies_inside["exposed_communication_s"] > plain["exposed_communication_s"]
    assert copies_inside["gradients_s"] < plain["gradients_s"]
    assert seconds("tp-dp-pp") == plain


def test_a_file_without_runs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no run" in CliRunner().invoke(phalanx, ["predict", str(tmp_path / "empty.jsonl")]).output


def test_runs_are_values() -> None:
    run = read_run(RUN)
    assert isinstance(run, RunSpec)
    assert run == read_run(RUN)


def test_a_run_names_its_cluster_in_words() -> None:
    run = {**RUN, "cluster": "a100x8"}
    assert predict(run).step_time_s == predict(RUN).step_time_s
    with pytest.raises(ConfigError, match="the device 'z9', which is not known"):
        predict({**RUN, "cluster": "z9x8"})


def test_a_run_may_take_several_lines_and_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    written = json.dumps(RUN, indent=1)
    assert len(read_runs(["\ufeff" + written, "", json.dumps(RUN)], "r")) == 2
    with pytest.raises(ConfigError, match=rf"r, line {written.count(chr(10)) + 2}: a run is a JSON object, found list"):
        read_runs([written, "[1]"], "r")
    file = tmp_path / "b.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    assert "no text in UTF-8" in str(CliRunner().invoke(phalanx, ["predict", str(file)]).exception)


def test_a_run_that_cannot_be_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    wrong = described(model={"layers": 0})
    file.write_text("\n".join(json.dumps(run) for run in (RUN, wrong, RUN)))
    shown = CliRunner().invoke(phalanx, ["predict", str(file)])
    assert shown.exit_code == 0
    assert shown.output.count("gpt-22B") == 2
    assert "line 2: model.layers" in shown.stderr
    as_json = CliRunner().invoke(phalanx, ["predict", str(file), "--json", "--strict"])
    assert as_json.exit_code == 1
    first, second, third = map(json.loads, as_json.stdout.splitlines())
    assert first == third
    assert "line 2: model.layers" in second["error"]
    file.write_text(json.dumps(wrong))
    assert CliRunner().invoke(phalanx, ["predict", str(file)]).exit_code == 1


def test_a_step_lies_in_its_interval() -> None:
    low, high = predict(RUN).step_time_interval_s or (0.0, 0.0)
    assert low < predict(RUN).step_time_s < high
    assert predict(RUN, interval=False).step_time_interval_s is None


@pytest.mark.parametrize(
    ("stated", "left_open"),
    [
        ({"software": "Megatron-LM 2022"}, {}),
        ({"overlap": {"dp": True}, "parallel": {"tp": 1, "dp": 8}, "batch": {"global": 32}}, {"overlap": None}),
        ({}, {"assumed": ["recompute"]}),
        ({"batch": {"global": 64}}, {"assumed": ["batch.micro"]}),
        ({}, {"assumed": ["model.flash"]}),
        ({"stack": "pytorch"}, {"assumed": ["compile"]}),
        (
            {"parallel": {"tp": 8, "dp": 8}, "cluster": {"nodes": 8, "node_gbps": 50}, "batch": {"global": 32}},
            {"assumed": ["cluster.node_gbps"]},
        ),
    ],
)
def test_what_a_run_leaves_open_widens_its_interval(stated: dict[str, Any], left_open: dict[str, Any]) -> None:
    known = described(**{"overlap": {"dp": True}, **stated})
    unknown = {key: value for key, value in {**known, **left_open}.items() if value is not None}
    if "software" in stated:
        del unknown["software"]
    (low, high), (lower, higher) = (predict(run).step_time_interval_s or (0.0, 0.0) for run in (known, unknown))
    assert higher / lower > high / low


def test_intervals_hold_four_of_five_published_rows() -> None:
    runs = read_measured()[::8]
    intervals = [predict(run).step_time_interval_s or (0.0, 0.0) for run in runs]
    inside = [low <= run.measured_step_time_s <= high for run, (low, high) in zip(runs, intervals, strict=True)]
    assert np.mean(inside) > 0.8


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("A100", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("a100 pcie", "A100-80GB-PCIe"),
        ("A100 40 GB", "A100-40GB-SXM"),
        ("a100-40g", "A100-40GB-SXM"),
        ("H100 PCIe", "H100-80GB-PCIe"),
        ("l40s", "L40S-48GB-PCIe"),
        ("AMD Instinct MI300X", "MI300X-192GB-OAM"),
    ],
)
def test_devices_are_matched_by_family(name: str, preset: str) -> None:
    assert read_run(described(cluster={"device": name})).device.name == preset


def test_the_busiest_experts_compute_send_and_keep_as_much_more() -> None:
    def step(load: float) -> tuple[StepSeconds, RunSpec]:
        model = {"experts": 8, "top_k": 2, "expert_load": load}
        run = read_run(described(model=model, parallel={"tp": 1, "dp": 8, "ep": 4}, batch={"global": 32}))
        return StepSeconds(run, DEFAULT), run

    (even, run), (busy, uneven) = step(1), step(3)
    h, tokens = run.model.hidden, run.micro * run.model.seq
    kernels = even.kernels
    sent = [
        kernels.matmul(rows, 4 * h, h, batch=2) + kernels.matmul(rows, h, 4 * h, batch=2)
        for rows in (tokens, 3 * tokens)
    ]
    inner = kernels.streamed(2 * 2 * tokens * 2 * 4 * h)  # activations of two choices, read and written in 16 bit
    ordered = kernels.streamed(8 * h * 4 * tokens)  # those that it receives: read and written, both ways
    assert busy.block.forward - even.block.forward == pytest.approx(sent[1] - sent[0] + 2 * inner + ordered)
    assert busy.waits_forward > 2 * even.waits_forward
    assert block_bytes(uneven.model_copy(update={"recompute": "none"})) > block_bytes(
        run.model_copy(update={"recompute": "none"})
    )
    with pytest.raises(ConfigError, match=r"expert_load \(2\) is of experts, and there are none"):
        read_run(described(model={"expert_load": 2}))


def test_devices_sustain_less_than_their_peak_and_name_their_source() -> None:
    for device in DEVICES.values():
        assert "data sheet" in device.source
        for precision in device.flops:
            assert device.rate(precision) < device.flops[precision]
    # Half the power for 114 of 132 multiprocessors, at 0.76 of the clock that the power of the others leaves.
    sxm, card = (DEVICES[name] for name in ("H100-80GB-SXM", "H100-80GB-PCIe"))
    clock = (350 / 114 / (700 / 132)) ** 0.5
    assert card.rate("bf16") == pytest.approx(sxm.rate("bf16") * clock * 114 / 132)


def test_a_step_on_other_cards_is_as_much_slower_as_their_rates_say() -> None:
    seconds = {name: predict(described(cluster={"device": name})).step_time_s for name in ("h100", "h100-pcie", "l40s")}
    assert seconds["h100"] < seconds["h100-pcie"] < seconds["l40s"]
    assert predict(described(cluster={"device": "mi300x"})).memory_gib < 192


def test_no_published_run_that_ran_is_called_infeasible_and_memory_is_right_within_5_percent() -> None:
    judged = judge_fit(read_published())
    assert len(judged["ran"]) > 400
    assert judged["ran, and is called infeasible"] == judged["ran out of memory, and is called feasible"] == []
    every = next(row for row in memory_rows(read_measured()) if row["source"] == "all")
    assert every["rows"] >= 49
    assert float(every["median"]) < 5


def test_runs_are_told_apart_that_ran_out_of_memory() -> None:
    runs = [
        described(name="small", measured={"oom": True}),
        described(name="large", model={"layers": 4000}, measured={"oom": True}),
        described(name="ran", model={"layers": 4000}, measured={"step_time_s": 1.0}),
    ]
    judged = judge_fit([read_run(run) for run in runs])
    assert judged["ran out of memory"] == ["small", "large"]
    assert judged["ran out of memory, and is called feasible"] == ["small"]
    assert judged["ran, and is called infeasible"] == ["ran"]


def test_every_constant_has_a_prior_near_its_value() -> None:
    for name, prior in PRIORS.items():
        assert abs(np.log(shipped(name) / prior.value)) <= 2.5 * prior.spread
    own = {"collective_call_s", "checkpoint_s", "selective_op_s"}  # of processors, and of no run
    assert set(DEFAULT.__dataclass_fields__) - own <= set(PRIORS)

"""Clusters from words and files."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.auto.cost.collectives import ClusterLinks, GroupTopology
from phalanx.auto.cost.constants import DEFAULT
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.search.request import read_request
from phalanx.cluster.calibration.figures import Measured, measured_file
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.rank_table.layouts import Layout as TableLayout
from phalanx.cluster.role.role import Launcher, Role
from phalanx.cluster.spec import detect
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.cluster.spec.devices import DEVICES
from phalanx.errors import ConfigError

MIXED = """
[[nodes]]
device = "h100"
devices = 8
count = 2

[[nodes]]
device = "mine"
devices = 4
gbps = 100

[[devices]]
name = "mine"
like = "a100"
memory_gib = 48
tflops = { bf16 = 150 }
"""


def test_a_name_in_full_or_a_short_one_means_one_device() -> None:
    families = {"a100": "A100-80GB-SXM", "H200": "H200-141GB-SXM", "h100_80gb_sxm": "H100-80GB-SXM"}
    for name, device in {**{d: d for d in DEVICES}, **families}.items():
        assert read_cluster(f"{name}x8").nodes[0].device.name == device


def test_words_name_a_device_a_number_and_nodes() -> None:
    cluster = read_cluster("h100x8,nodes=16")
    assert cluster.devices == 128
    assert cluster.is_uniform
    assert cluster.nodes[0].gbps == 3200
    assert str(cluster) == "16 x (8 H100-80GB-SXM, 3200 Gb/s)"
    assert read_cluster(cluster) is cluster
    assert read_cluster("A100-40GB-SXMx4, gbps=100").nodes[0].gbps == 100


def test_words_with_plus_between_them_are_nodes_that_differ() -> None:
    cluster = read_cluster("h100x8,nodes=2,usd=3 + a100x4,gbps=400,usd=1")
    assert str(cluster) == "2 x (8 H100-80GB-SXM, 3200 Gb/s) + 1 x (4 A100-80GB-SXM, 400 Gb/s)"
    assert cluster.usd_per_hour == pytest.approx(16 * 3 + 4 * 1)


def test_a_node_may_be_slower_than_its_data_sheet() -> None:
    full, half = read_cluster("a100x8+a100x8,speed=0.5").nodes
    assert half.device.name == "A100-80GB-SXM at 50 %"
    assert half.device.rate("bf16") == pytest.approx(full.device.rate("bf16") / 2)
    assert half.device.bandwidth == full.device.bandwidth / 2
    assert (half.device.memory, half.device.link, half.gbps) == (full.device.memory, full.device.link, full.gbps)
    in_file = {"nodes": [{"device": "a100", "devices": 8}, {"device": "a100", "devices": 8, "speed": 0.5}]}
    assert read_cluster(in_file).nodes == (full, half)


def test_nodes_of_one_device_with_other_links_are_planned_with_the_slowest() -> None:
    nodes = [{"device": "a100", "devices": 8, "link_gb_s": link} for link in (300, 100)]
    assert read_cluster({"nodes": nodes}).weakest().nodes[0].device.link == 100e9


def test_the_file_that_the_page_shows_describes_a_cluster(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "calibrate.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "cluster.toml").write_text(text)
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert (cluster.devices, cluster.nodes[0].gbps, cluster.nodes[0].strided) == (16 * 8 + 4, 3200, 0.5)
    assert cluster.usd_per_hour == pytest.approx(132 * 2.5)


def test_files_describe_nodes_that_differ(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    cluster = read_cluster(tmp_path / "mixed.toml")
    assert cluster.devices == 20
    assert not cluster.is_uniform
    own = cluster.nodes[2].device
    assert (own.memory, own.flops["bf16"], own.flops["fp16"]) == (48 * 2**30, 150e12, 312e12)
    (tmp_path / "same.json").write_text(json.dumps({"nodes": [{"device": "h100", "devices": 8}]}))
    assert read_cluster(str(tmp_path / "same.json")) == read_cluster("h100x8")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("h100", r"Write DEVICExCOUNT,nodes=N"),
        ("h100x0", r"Write DEVICExCOUNT,nodes=N"),
        ("cpux0", r"Write DEVICExCOUNT,nodes=N"),
        ("h100x8,device=a100", r"nodes=, gbps=, speed=, usd= are known"),
        ("h100x8,speed=0", "Asked for speed=0 of a cluster. Give a number above 0"),
        ("h100x8,usd=2+a100x8", r"1 x \(8 A100-80GB-SXM, 1600 Gb/s\) has no price and others have"),
        ("h100x8+", r"Asked for the cluster 'h100x8\+'. Write DEVICExCOUNT"),
        (
            {"nodes": [{"device": "h100", "devices": 8, "gbps": 100, "strided_gbps": 200}]},
            r"strided_gbps = 200 over gbps = 100",
        ),
        ("h100x8,node=3", r"Did you mean 'nodes'"),
        ("h100x8,nodes=-1", "Give a number above 0"),
        ("h100x8,nodes=many", "Give a number above 0"),
        ("h100x8,nodes=1.5", "Give a whole number"),
        ("z9x8", "the device 'z9', which is not known"),
        ("h30x8", "the device 'h30', which is not known. Did you mean 'h20'?"),
        ("h8x8", r"the device 'h8', which is not known\."),
        ("bx8", r"the device 'b', which is not known\..* Describe any other in a cluster file"),
        ("h100-81gbx8", "the device 'h100-81gb', which is none of H100-80GB-SXM"),
        ("nowhere.toml", "cannot be read"),
        ({"nodes": []}, "nodes: Input should have at least 1 item"),
        ({"nodes": [{"device": "h100", "devices": 8, "nic": 1}]}, r"nodes\.0\.nic: There is no such key, found 1"),
        (
            {
                "nodes": [{"device": "m", "devices": 1}],
                "devices": [{"name": "m", "like": "a100", "tflops": {"bf16": -1}}],
            },
            r"tflops\.bf16: Input should be greater than 0",
        ),
        (
            {"nodes": [{"device": "m", "devices": 1}], "devices": [{"name": "m", "like": "h100", "tflops": {"b": 1}}]},
            "Input should be 'fp32', 'fp16', 'bf16' or 'fp8', found 'b'",
        ),
        (
            {"nodes": [{"device": "h100", "devices": 8}], "devices": [{"name": "H100-80GB-SXM", "like": "h100"}]},
            "preset",
        ),
    ],
)
def test_what_cannot_be_understood_is_said(said: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(said)  # type: ignore[arg-type]


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ConfigError, match=r"c\.json: .*Correct the file"):
        read_cluster(tmp_path / "c.json")
    (tmp_path / "same.json").write_text(json.dumps({"nodes": [{"device": "h100", "devices": 8}]}))
    with pytest.raises(ConfigError, match=r"device=a100 of .*same\.json, which says itself"):
        read_cluster(f"{tmp_path / 'same.json'},device=a100")


# -- links -----------------------------------------------------------------------------------------------------------

JOB: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 256, "heads": 4, "seq": 64, "vocab": 512},
    "batch": {"global": 8},
}


def test_links_differ_by_the_layout_of_a_group() -> None:
    node = {"device": "h100", "devices": 8, "count": 2, "link_gb_s": 300, "gbps": 1600, "strided_gbps": 400}
    made = read_cluster({"nodes": [node]}).nodes[0]
    assert (made.device.link, made.gbps, made.strided) == (300e9, 1600, 0.25)
    links = ClusterLinks(made.device, made.gbps, DEFAULT, made.strided)
    assert links.bandwidth(GroupTopology(8, 8)) == 300e9 * DEFAULT.link
    assert links.bandwidth(GroupTopology(16, 8)) == pytest.approx(200e9 * DEFAULT.network)
    assert links.bandwidth(GroupTopology(2, 1, sharing=8)) == pytest.approx(50e9 * DEFAULT.network / 8)
    run = read_request(JOB, read_cluster({"nodes": [node]})).base
    assert (run.cluster.strided, run.device.link) == (0.25, 300e9)


# -- nodes that differ -----------------------------------------------------------------------------------------------


def test_nodes_that_differ_are_planned_as_their_weakest_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    with caplog.at_level(logging.WARNING, "phalanx.auto"):
        run = read_request(JOB, str(tmp_path / "mixed.toml")).base
    assert "counted as 3 x (4 least of H100-80GB-SXM and mine)" in caplog.text
    assert (run.cluster.nodes, run.cluster.per_node, run.cluster.node_gbps) == (3, 4, 100)
    assert run.device.memory == 48 * 2**30
    assert run.device.rate("bf16") == pytest.approx(150e12 * DEVICES["A100-80GB-SXM"].sustained)
    assert "fp8" not in run.device.flops


def test_figures_of_a_device_of_ones_own_reach_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(
        json.dumps(
            {"nodes": [{"device": "x", "devices": 2}], "devices": [{"name": "x", "like": "a100", "sustained": 0.5}]}
        )
    )
    described = {**JOB, "name": "j", "cluster": str(tmp_path / "own.json"), "batch": {"global": 8, "micro": 1}}
    run = read_run({**described, "parallel": {}, "precision": "bf16", "recompute": "none"})
    assert (run.device.name, run.device.sustained) == ("x", 0.5)


# -- rank tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["server", "group"])
def test_a_rank_table_is_a_cluster(tmp_path: Path, layout: TableLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "GPU_FOLDER", tmp_path / "none")
    devices = [
        rank_table.Device(rank=rank, server=f"10.0.0.{rank // 2}", device_id=rank % 2, device_ip=f"10.1.0.{rank}")
        for rank in range(4)
    ]
    table = rank_table.RankTable(source="t", layout=layout, devices=tuple(devices)).to_json(layout, "0x0000")
    (tmp_path / "t.json").write_text(table)
    named = read_cluster(f"{tmp_path / 't.json'},device=h100")
    assert named == read_cluster("h100x2,nodes=2")
    assert named.assumed == (f"h100 on every server of {tmp_path / 't.json'}",)
    here = read_cluster(tmp_path / "t.json")
    assert (here.devices, len(here.nodes)) == (4, 2)
    assert here.nodes[0].device == read_cluster("cpux2").nodes[0].device
    assert "device= says another" in here.assumed[0]


# -- this host -------------------------------------------------------------------------------------------------------


def test_this_host_is_a_cluster_by_its_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    one, two = read_cluster("cpu").nodes[0], read_cluster("cpux2,nodes=3,gbps=25")
    assert (one.devices, one.device.multiprocessors) == (1, cores)
    assert (two.devices, len(two.nodes), two.nodes[0].gbps) == (6, 3, 25)
    assert two.nodes[0].device.memory == pytest.approx(one.device.memory / 2)
    assert any("calibrate" in one for one in two.assumed)


def test_devices_that_share_cores_have_their_share_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    two, eight = read_cluster("cpux2").nodes[0].device, read_cluster("cpux8").nodes[0].device
    assert (two.name, eight.name, eight.multiprocessors) == ("cpu-1-core", "cpu-0.25-core", 1)
    for of in ("bandwidth", "link", "memory"):
        assert getattr(eight, of) == pytest.approx(getattr(two, of) / 4)
    assert eight.flops == pytest.approx({kind: rate / 4 for kind, rate in two.flops.items()})


@pytest.mark.parametrize(
    ("launcher", "machine", "name"),
    [("mpi", 8, "cpu-2-core"), ("slurm", 8, "cpu-2-core"), ("phalanx", 8, "cpu-0.5-core"), ("mpi", 2, "cpu-0.5-core")],
)
def test_cores_that_a_rank_is_bound_to_are_its_own(
    launcher: Launcher, machine: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "GPU_FOLDER", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    (node,) = Cluster.detect(Role(world_size=4, local_world_size=4, launcher=launcher)).nodes
    assert (node.devices, node.device.name) == (4, name)


def test_the_highest_frequency_counts_not_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "khz").write_text("3200000\n")
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 700.000\nflags\t\t: avx2\n\ncpu MHz\t\t: 800.000\n")
    (tmp_path / "broken").write_text("<unknown>\n")
    monkeypatch.setattr(detect, "PROCESSORS", tmp_path / "cpuinfo")
    cores = len(os.sched_getaffinity(0))
    for unreadable in ("none", "broken", "."):
        monkeypatch.setattr(detect, "HIGHEST_KHZ", tmp_path / unreadable)
        assert read_cluster("cpu").nodes[0].device.flops["fp32"] == pytest.approx(cores * 32 * 0.8e9)
    monkeypatch.setattr(detect, "HIGHEST_KHZ", tmp_path / "khz")
    assert read_cluster("cpu").nodes[0].device.flops["fp32"] == pytest.approx(cores * 32 * 3.2e9)


def gpus(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / f"0000:0{number}").mkdir()
        (folder / f"0000:0{number}" / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\n")
    return folder


def test_cards_are_found_by_their_drivers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "GPU_FOLDER", gpus(tmp_path, *["NVIDIA H100 80GB HBM3"] * 2, "NVIDIA B200"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = Cluster.detect(Role(node_count=2))
    assert found == read_cluster("h100x2,nodes=2")
    assert found.assumed[-2] == "2 nodes, all as this one"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.raises(ConfigError, match="found different GPUs: NVIDIA H100 80GB HBM3, NVIDIA B200"):
        Cluster.detect(Role())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Cluster.detect(Role(local_world_size=2)) == read_cluster("cpux2")


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA H800", "H800-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H100 NVL", "H100-94GB-NVL"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA L40S", "L40S-48GB-PCIe"),
        ("NVIDIA L40", "L40-48GB-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
    ],
)
def test_cards_have_presets(card: str, name: str) -> None:
    assert detect.preset_for_gpu(card).name == name


@pytest.mark.parametrize("card", ["Tesla T4", "NVIDIA A10G", "NVIDIA H800 PCIe"])
def test_cards_without_a_preset_are_named(card: str) -> None:
    with pytest.raises(ConfigError, match=f"found {card}, which has no preset"):
        detect.preset_for_gpu(card)


def test_here_is_this_host_as_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="phalanx calibrate"):
        read_cluster("here")

    def line(seconds: float) -> dict[str, Any]:
        return {"axes": [[2**23]], "seconds": [seconds], "powers": [1]}

    cube = {"axes": [[1024]] * 3, "seconds": [2 * 1024**3 / 50e9], "powers": [1, 1, 1]}
    grids = {"matmul fp32": cube, "matmul bf16": cube, "elementwise forward": line(1e-3), "send shm 2": line(2e-3)}
    host = dict.fromkeys(("launch_s", "backward_launch_s", "checkpoint_s", "selective_op_s"), 1e-6)
    rates = {"threads": 1, **host, "grids": grids}
    Measured.model_validate(
        {"host": "h", "processor": "p", "cores": 2, "memory": 2**34, "torch": "2", "date": "d", "rates": {2: rates}}
    ).save(measured_file())
    here = read_cluster("here")
    device = here.nodes[0].device
    assert (here.devices, device.memory, device.flops["fp32"]) == (2, 2**33, pytest.approx(50e9))
    assert (device.bandwidth, device.link) == (pytest.approx(2 * 2**23 / 1e-3), pytest.approx(2**23 / 2e-3))
    assert here.measured is not None
    assert here.measured.at(2).threads == 1
    slower = read_cluster("here,speed=0.5")
    assert slower.measured is None
    rates = slower.nodes[0].device.measured
    assert rates is not None
    assert rates.operator_s("elementwise", 2**23) == pytest.approx(2 * 1e-3)
    assert rates.collective_s("send", 2**23, 2) == pytest.approx(2e-3)
    assert here.assumed[0].startswith("measured with torch 2, which is 2.")
    assert read_cluster("herex2") == here
    with pytest.raises(ConfigError, match="Asked for 4 ranks of h, which was measured with 2"):
        read_cluster("herex4")


def test_a_cluster_has_a_price_in_words_and_in_files(tmp_path: Path) -> None:
    (tmp_path / "priced.toml").write_text("usd_per_device_hour = 1.5\n" + MIXED)
    (tmp_path / "mixed.toml").write_text(MIXED)
    assert read_cluster("h100x8,usd=2.5,nodes=2").usd_per_device_hour == 2.5
    priced = read_cluster(tmp_path / "priced.toml")
    assert priced.usd_per_hour == pytest.approx(1.5 * priced.devices)
    assert priced.weakest().devices < priced.devices
    assert priced.weakest().usd_per_hour == pytest.approx(priced.usd_per_hour), "what is left out is rented too"
    of_run = read_request(JOB, str(tmp_path / "priced.toml")).base.cluster
    assert of_run.usd_per_device_hour * of_run.nodes * of_run.per_node == pytest.approx(priced.usd_per_hour)
    assert read_cluster(f"{tmp_path / 'mixed.toml'},usd=3").usd_per_device_hour == 3
    assert read_cluster("h100x8").usd_per_device_hour is None
    with pytest.raises(ConfigError, match=r"Asked for usd=-1 of a cluster\. Give a number above 0"):
        read_cluster("h100x8,usd=-1")

"""Clusters from words and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cluster.description import read_cluster
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


def test_words_name_a_device_a_number_and_nodes() -> None:
    cluster = read_cluster("h100x8,nodes=16")
    assert cluster.devices == 128
    assert cluster.is_uniform
    assert cluster.nodes[0].gbps == 3200
    assert str(cluster) == "16 x (8 H100-80GB-SXM, 3200 Gb/s)"
    assert read_cluster(cluster) is cluster
    assert read_cluster("A100-40GB-SXMx4, gbps=100").nodes[0].gbps == 100


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
        ("h100x8,node=3", r"Did you mean 'nodes'"),
        ("h100x8,nodes=-1", "Give a number above 0"),
        ("h100x8,nodes=many", "Give a number above 0"),
        ("h100x8,nodes=1.5", "Give a whole number"),
        ("z9x8", "the device 'z9', which is not known"),
        ("nowhere.toml", "cannot be read"),
        ({"nodes": []}, "nodes: List should have at least 1 item"),
        ({"nodes": [{"device": "h100", "devices": 8, "nic": 1}]}, r"nodes\.0\.nic: Extra inputs"),
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

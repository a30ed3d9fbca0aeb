"""What a cluster is made of: nodes, their devices and the links between them (pure).

A cluster is named in a few words, or described by a file:

    h100x8,nodes=16             16 nodes of 8 H100, with the network such nodes usually have
    a100-40gbx4,nodes=2,gbps=200
    cluster.toml                nodes that differ, with figures of their own
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.cluster.devices import DEVICES, GIB, TERA, Device, device_named
from phalanx.errors import ConfigError, did_you_mean

USUAL = {"a100": "A100-80GB-SXM", "h100": "H100-80GB-SXM", "h200": "H200-141GB-SXM", "b200": "B200-180GB-SXM"}
"""The device that a short name usually means."""

GBPS_A_DEVICE = {"A100": 200.0, "H100": 400.0, "H800": 400.0, "H200": 400.0, "B200": 400.0}
"""Gb/s of network ports a device that reference designs of such nodes have: one port a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine with equal devices."""

    device: Device
    devices: int
    gbps: float
    """Gb/s of all network ports together, one way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes in the order in which ranks are dealt to them."""

    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.devices for node in self.nodes)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are equal."""
        return all(node == self.nodes[0] for node in self.nodes)

    def __str__(self) -> str:
        runs: list[tuple[Node, int]] = []
        for node in self.nodes:
            if runs and runs[-1][0] == node:
                runs[-1] = (node, runs[-1][1] + 1)
            else:
                runs.append((node, 1))
        return " + ".join(f"{count} x ({node.devices} {node.device.name}, {node.gbps:g} Gb/s)" for node, count in runs)


def read_cluster(said: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
    """Return a cluster from its words, a file, or what such a file holds.

    Args:
        said: Words such as `h100x8,nodes=16`, the path of a `.toml` or `.json` file, or a mapping.

    Raises:
        ConfigError: If it cannot be understood; says what was found and what is known.
    """
    if isinstance(said, Cluster):
        return said
    if isinstance(said, Mapping):
        return _described(said, "the cluster")
    text = str(said)
    if text.endswith((".toml", ".json")):
        return _described(_read(Path(text)), text)
    return _worded(text)


def _worded(text: str) -> Cluster:
    first, *rest = (word.strip() for word in text.split(","))
    found = re.fullmatch(r"(.+?)x(\d+)", first)
    if found is None or int(found[2]) < 1:
        raise ConfigError(
            f"Asked for the cluster {text!r}. Write DEVICExCOUNT,nodes=N, such as h100x8,nodes=16, or the path of a "
            ".toml or .json file."
        )
    device, count = device_named(USUAL.get(found[1].lower(), found[1])), int(found[2])
    numbers = {"nodes": 1.0, "gbps": _usual_gbps(device) * count}
    for word in rest:
        name, _, value = word.partition("=")
        if name not in numbers:
            raise ConfigError(
                f"Asked for {word!r} of a cluster; nodes= and gbps= are known.{did_you_mean(name, numbers)}"
            )
        numbers[name] = _positive(name, value)
    if numbers["nodes"] % 1:
        raise ConfigError(f"Asked for nodes={numbers['nodes']:g}. Give a whole number.")
    node = Node(device=device, devices=count, gbps=numbers["gbps"])
    return Cluster(nodes=(node,) * int(numbers["nodes"]))


def _positive(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"Asked for {name}={value} of a cluster. Give a number above 0.")
    return number


def _usual_gbps(device: Device) -> float:
    return GBPS_A_DEVICE.get(device.name.split("-")[0], 100.0)


# -- files -----------------------------------------------------------------------------------------------------------


class _DeviceFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    like: str
    """The preset whose figures hold where none are given."""
    tflops: dict[str, float] = Field(default_factory=dict)
    sustained: float | None = Field(default=None, gt=0, le=1)
    memory_gib: float | None = Field(default=None, gt=0)
    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    multiprocessors: int | None = Field(default=None, gt=0)
    link_gb_s: float | None = Field(default=None, gt=0)


class _NodeFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    device: str
    devices: int = Field(gt=0)
    count: int = Field(default=1, gt=0, le=100_000)
    gbps: float | None = Field(default=None, gt=0)


class _ClusterFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    nodes: list[_NodeFile] = Field(min_length=1)
    devices: list[_DeviceFile] = Field(default_factory=list)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check the path of the cluster's file.") from None
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: {error}. Correct the file.") from None


def _described(content: Any, where: str) -> Cluster:
    try:
        file = _ClusterFile.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        path = ".".join(str(part) for part in found["loc"])
        raise ConfigError(f"{where}: {path}: {found['msg']}. docs/predict.md shows such a file.") from None
    own = {device.name: _device(device) for device in file.devices}
    nodes: list[Node] = []
    for node in file.nodes:
        device = own.get(node.device) or device_named(USUAL.get(node.device.lower(), node.device))
        gbps = node.gbps if node.gbps is not None else _usual_gbps(device) * node.devices
        nodes += [Node(device=device, devices=node.devices, gbps=gbps)] * node.count
    return Cluster(nodes=tuple(nodes))


def _device(said: _DeviceFile) -> Device:
    like = device_named(USUAL.get(said.like.lower(), said.like))
    if said.name in DEVICES:
        raise ConfigError(f"The cluster's file describes {said.name}, which is a preset. Give it another name.")

    def first(own: float | None, scale: float, otherwise: float) -> float:
        return otherwise if own is None else own * scale

    return Device(
        name=said.name,
        flops={**like.flops, **{kind: rate * TERA for kind, rate in said.tflops.items()}},
        sustained=first(said.sustained, 1, like.sustained),
        memory=first(said.memory_gib, GIB, like.memory),
        bandwidth=first(said.bandwidth_gb_s, 1e9, like.bandwidth),
        multiprocessors=said.multiprocessors or like.multiprocessors,
        link=first(said.link_gb_s, 1e9, like.link),
    )

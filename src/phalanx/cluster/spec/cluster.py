"""`Cluster`: nodes, devices and links of a cluster, read from words such as `h100x8,nodes=2` or a file (pure).

A cluster is named in a few words, or described by a file:

    h100x8,nodes=16             16 nodes of 8 H100, with the network such nodes usually have
    h100x8,usd=2.5              the same, one node; a device costs 2.50 USD an hour
    a100-40gbx4,nodes=2,gbps=200
    cpux2, cpu                  this host's cores, dealt to two devices or one
    herex2, here                the same, as `phalanx calibrate` measured it
    h100x8,nodes=2+a100x8,nodes=2
                                nodes that differ, in the order of the ranks
    a100x8+a100x8,speed=0.8     the second node takes 1 / 0.8 times as long as its data sheet says
    cluster.toml                nodes that differ, with figures of their own
    rank_table.json,device=h100 the servers of a rank table
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.spec.devices import Device, find_preset
from phalanx.errors import ConfigError
from phalanx.i18n import suggest, tr

if TYPE_CHECKING:
    from phalanx.cluster.calibration.figures import Measured
    from phalanx.cluster.role.role import Role

GBPS_A_DEVICE = {
    "A100": 200.0,
    "A800": 200.0,
    "H20": 400.0,
    "H100": 400.0,
    "H800": 400.0,
    "H200": 400.0,
    "B200": 400.0,
    "GB200": 400.0,
    "MI300X": 400.0,
    "MI325X": 400.0,
}
"""Gb/s of network ports a device that reference designs of such nodes have: one port a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine with equal devices. The link between its devices is in `device.link`."""

    device: Device
    devices: int
    gbps: float
    """Gb/s of all network ports together, one way: what a group of neighbouring ranks has between nodes."""

    strided: float = 1.0
    """Share of `gbps` that groups with one rank a node reach together, when each device's group works at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes in the order in which ranks are dealt to them."""

    nodes: tuple[Node, ...]
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """What was taken for granted, in words."""

    measured: Measured | None = field(default=None, compare=False, repr=False)
    """The figures of `phalanx calibrate`, for the cluster `here`."""

    usd_per_device_hour: float | None = field(default=None, compare=False)
    """What renting a device costs; None if it is not known."""

    @classmethod
    def detect(cls, role: Role | None = None) -> Cluster:
        """Return the cluster this job runs on: this host's GPUs, else its processors, on as many nodes as it has.

        Opens no device. What cannot be seen from here stands in `assumed`.

        Args:
            role: Who this process is; read from its environment when None.

        Raises:
            ConfigError: If the host's GPUs differ or have no preset.
            RoleError: If the environment contradicts itself.
        """
        from phalanx.cluster.role.role import Role
        from phalanx.cluster.spec.detect import detect

        return detect(Role.detect() if role is None else role)

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.devices for node in self.nodes)

    @property
    def usd_per_hour(self) -> float | None:
        """What all devices cost an hour; None if it is not known."""
        return None if self.usd_per_device_hour is None else self.usd_per_device_hour * self.devices

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are equal."""
        return all(node == self.nodes[0] for node in self.nodes)

    def weakest(self) -> Cluster:
        """Return as many nodes, all equal, with the least that any has of each thing: a plan for it runs on this one.

        It costs what this one costs: devices that are left out are rented too.

        Raises:
            ConfigError: If the devices have no precision in common.
        """
        if self.is_uniform:
            return self
        node = Node(
            device=_least([node.device for node in self.nodes]),
            devices=min(node.devices for node in self.nodes),
            gbps=min(node.gbps for node in self.nodes),
            strided=min(node.strided for node in self.nodes),
        )
        equal = replace(self, nodes=(node,) * len(self.nodes))
        usd = None if self.usd_per_hour is None else self.usd_per_hour / equal.devices
        return replace(equal, usd_per_device_hour=usd)

    def __str__(self) -> str:
        runs: list[tuple[Node, int]] = []
        for node in self.nodes:
            if runs and runs[-1][0] == node:
                runs[-1] = (node, runs[-1][1] + 1)
            else:
                runs.append((node, 1))
        return " + ".join(f"{count} x ({node.devices} {node.device.name}, {node.gbps:g} Gb/s)" for node, count in runs)


def _least(devices: list[Device]) -> Device:
    names = tuple(dict.fromkeys(device.name for device in devices))
    if all(device == devices[0] for device in devices):
        return devices[0]
    common = [kind for kind in devices[0].flops if all(kind in device.flops for device in devices)]
    if not common:
        raise ConfigError(
            tr("{devices} compute in no precision in common. Describe equal nodes.", devices=", ".join(names))
        )
    return Device(
        name=f"least of {' and '.join(names)}",
        # Of the rates that are reached, not of the peaks: then the share is 1.
        flops={kind: min(device.rate(kind) for device in devices) for kind in common},
        sustained=1.0,
        sustained_fp8=1.0,
        older_instructions=min(device.older_instructions for device in devices),
        memory=min(device.memory for device in devices),
        bandwidth=min(device.bandwidth for device in devices),
        multiprocessors=min(device.multiprocessors for device in devices),
        link=min(device.link for device in devices),
    )


def read_cluster(description: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
    """Return a cluster from its words, a file, or what such a file holds.

    Args:
        description: Words such as `h100x8,nodes=16`, `cpux2` or `here`, several with `+` between them where nodes
            differ; the path of a `.toml` or `.json` file, which may be a rank table; or a mapping.

    Raises:
        ConfigError: If it cannot be understood; says what was found and what is known.
    """
    from phalanx.cluster.spec import files

    if isinstance(description, Cluster):
        return description
    if isinstance(description, Mapping):
        return files.parse_cluster(description, "the cluster")
    first, *rest = (word.strip() for word in str(description).split(","))
    if first.endswith((".toml", ".json")):
        settings = _parse_settings(rest, {"device": "", "usd": 0.0})
        return _with_price(files.read(Path(first), str(settings["device"])), settings)
    return _join([_parse_words(str(description), words) for words in str(description).split("+")])


def _parse_words(description: str, words: str) -> Cluster:
    first, *rest = (word.strip() for word in words.split(","))
    cluster = _this_host(first) or _preset_cluster(description, first)
    node = cluster.nodes[0]
    settings = _parse_settings(rest, {"nodes": 1.0, "gbps": node.gbps, "speed": 1.0, "usd": 0.0})
    nodes, gbps, speed = (float(settings[name]) for name in ("nodes", "gbps", "speed"))
    if nodes % 1:
        raise ConfigError(tr("Asked for nodes={nodes}. Give a whole number.", nodes=f"{nodes:g}"))
    node = replace(node, gbps=gbps, device=node.device.at_speed(speed))
    measured = cluster.measured if speed == 1 else None
    return _with_price(replace(cluster, nodes=(node,) * int(nodes), measured=measured), settings)


def _join(parts: list[Cluster]) -> Cluster:
    """Return one cluster of the nodes of several."""
    if len(parts) == 1:
        return parts[0]
    prices = [part.usd_per_hour for part in parts]
    unpriced = [part for part in parts if part.usd_per_hour is None]
    if unpriced and len(unpriced) < len(parts):
        raise ConfigError(
            tr("Asked for a cluster of which {part} has no price and others have. Give usd= to all.", part=unpriced[0])
        )
    devices = sum(part.devices for part in parts)
    return Cluster(
        nodes=tuple(node for part in parts for node in part.nodes),
        assumed=tuple(dict.fromkeys(assumed for part in parts for assumed in part.assumed)),
        usd_per_device_hour=None if unpriced else sum(price or 0.0 for price in prices) / devices,
    )


def _with_price(cluster: Cluster, settings: Mapping[str, float | str]) -> Cluster:
    usd = float(settings["usd"])
    return replace(cluster, usd_per_device_hour=usd) if usd else cluster


def _preset_cluster(description: str, first: str) -> Cluster:
    match = re.fullmatch(r"(.+?)x(\d+)", first)
    if match is None or int(match[2]) < 1:
        raise ConfigError(
            tr(
                "Asked for the cluster {said!r}. Write DEVICExCOUNT,nodes=N, such as h100x8,nodes=16; cpux2 or here "
                "for this host; or the path of a .toml or .json file.",
                said=description,
            )
        )
    device, count = find_preset(match[1]), int(match[2])
    return Cluster(nodes=(Node(device=device, devices=count, gbps=usual_gbps(device) * count),))


def _this_host(first: str) -> Cluster | None:
    """Return this host for `cpu` and `here`, with a number of devices or without."""
    match = re.fullmatch(r"(cpu|here)(?:x([1-9]\d*))?", first.lower())
    if match is None:
        return None
    from phalanx.cluster.spec.detect import cpu_node, measured_node

    count = int(match[2] or 0)
    if match[1] == "cpu":
        node, assumed = cpu_node(count or 1)
        return Cluster(nodes=(node,), assumed=assumed)
    node, measured, assumed = measured_node(count or None)
    return Cluster(nodes=(node,), measured=measured, assumed=assumed)


def _parse_settings(words: list[str], defaults: dict[str, float | str]) -> dict[str, float | str]:
    """Return settings such as `nodes=2` over their defaults; those whose default is a number must be above 0."""
    settings = dict(defaults)
    for word in words:
        name, _, value = word.partition("=")
        if name not in defaults:
            names = ", ".join(f"{key}=" for key in defaults)
            raise ConfigError(
                tr(
                    "Asked for {word!r} of a cluster; {known} are known.{nearest}",
                    word=word,
                    known=names,
                    nearest=suggest(name, defaults),
                )
            )
        settings[name] = value if isinstance(defaults[name], str) else _positive(name, value)
    return settings


def _positive(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(tr("Asked for {name}={value} of a cluster. Give a number above 0.", name=name, value=value))
    return number


def usual_gbps(device: Device) -> float:
    """Return the Gb/s of network ports that a node usually has for each device of a kind."""
    return GBPS_A_DEVICE.get(device.name.split("-")[0], 100.0)

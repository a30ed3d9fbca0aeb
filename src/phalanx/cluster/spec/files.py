"""Read a `Cluster` from a TOML or JSON file, or from a rank table (pure)."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.spec.cluster import Cluster, Node, usual_gbps
from phalanx.cluster.spec.devices import DEVICES, GIB, TERA, Device, find_preset
from phalanx.cluster.validation_errors import why_wrong
from phalanx.errors import ConfigError
from phalanx.i18n import tr

_OF_A_RANK_TABLE = {"server_list", "server_count", "group_list", "group_count", "board_id"}


class _DeviceFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    like: str
    """The preset whose figures hold where none are given."""
    tflops: dict[Literal["fp32", "fp16", "bf16", "fp8"], PositiveFloat] = Field(default_factory=dict)
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
    speed: float = Field(default=1.0, gt=0)
    """What its devices do in a second over what their figures say, as measured."""
    link_gb_s: float | None = Field(default=None, gt=0)
    """Inside the node, in place of the device's own."""
    gbps: float | None = Field(default=None, gt=0)
    """Between nodes, groups of neighbouring ranks."""
    strided_gbps: float | None = Field(default=None, gt=0)
    """Between nodes, groups with one rank a node, all of a node's together."""


class _ClusterFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    nodes: list[_NodeFile] = Field(min_length=1)
    devices: list[_DeviceFile] = Field(default_factory=list)
    usd_per_device_hour: float | None = Field(default=None, gt=0)


def read(path: Path, device: str) -> Cluster:
    """Return the cluster of a file.

    Args:
        path: A description, `.toml` or `.json`, or a rank table.
        device: What the devices of a rank table are; empty for this host's own.

    Raises:
        ConfigError: If it cannot be read or is wrong; names the file and the place.
    """
    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else tr("it is no text")
        raise ConfigError(
            tr("{path}: cannot be read ({why}). Check the path of the cluster's file.", path=path, why=why)
        ) from None
    if path.suffix == ".json" and any(f'"{key}"' in written for key in _OF_A_RANK_TABLE):
        return of_rank_table(rank_table.parse(written, str(path)), device)
    try:
        content = tomllib.loads(written) if path.suffix == ".toml" else json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ConfigError(tr("{path}: {why}. Correct the file.", path=path, why=error)) from None
    if device:
        raise ConfigError(
            tr(
                "Asked for device={device} of {path}, which says itself what it is made of. Leave it out.",
                device=device,
                path=path,
            )
        )
    return parse_cluster(content, str(path))


def parse_cluster(content: Any, where: str) -> Cluster:
    """Return the cluster that a file's content describes; raises ConfigError if it is wrong."""
    try:
        file = _ClusterFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or tr("the whole")
        raise ConfigError(
            tr(
                "{place}: {path}: {why}. docs/calibrate.md shows such a file.",
                place=where,
                path=path,
                why=why_wrong(first),
            )
        ) from None
    own = {device.name: _device(device) for device in file.devices}
    nodes = tuple(node for node_file in file.nodes for node in [_node(node_file, own, where)] * node_file.count)
    return Cluster(nodes=nodes, usd_per_device_hour=file.usd_per_device_hour)


def _node(node_file: _NodeFile, own: dict[str, Device], where: str) -> Node:
    device = (own.get(node_file.device) or find_preset(node_file.device)).at_speed(node_file.speed)
    gbps = node_file.gbps if node_file.gbps is not None else usual_gbps(device) * node_file.devices
    if node_file.link_gb_s is not None:
        device = replace(device, link=node_file.link_gb_s * 1e9)
    strided = node_file.strided_gbps if node_file.strided_gbps is not None else gbps
    if strided > gbps:
        raise ConfigError(
            tr(
                "{place}: asked for strided_gbps = {strided} over gbps = {gbps}, which is all the ports of a node "
                "carry. Correct one of them.",
                place=where,
                strided=f"{strided:g}",
                gbps=f"{gbps:g}",
            )
        )
    return Node(device=device, devices=node_file.devices, gbps=gbps, strided=strided / gbps)


def _device(device_file: _DeviceFile) -> Device:
    like = find_preset(device_file.like)
    if device_file.name in DEVICES:
        raise ConfigError(
            tr("The cluster's file describes {name}, which is a preset. Give it another name.", name=device_file.name)
        )

    def first(own: float | None, scale: float, otherwise: float) -> float:
        return otherwise if own is None else own * scale

    return Device(
        name=device_file.name,
        flops={**like.flops, **{kind: rate * TERA for kind, rate in device_file.tflops.items()}},
        sustained=first(device_file.sustained, 1, like.sustained),
        sustained_fp8=first(device_file.sustained, like.sustained_fp8 / like.sustained, like.sustained_fp8),
        memory=first(device_file.memory_gib, GIB, like.memory),
        bandwidth=first(device_file.bandwidth_gb_s, 1e9, like.bandwidth),
        multiprocessors=device_file.multiprocessors or like.multiprocessors,
        link=first(device_file.link_gb_s, 1e9, like.link),
    )


def of_rank_table(table: rank_table.RankTable, device: str = "") -> Cluster:
    """Return the cluster of a rank table: its servers as nodes, in the order of their lowest ranks.

    Args:
        table: The table, which names addresses but no kind of device.
        device: What they are, such as `h100`; this host's own, as it is or by its cores, when empty.
    """
    counts = [len(ranks) for ranks in table.ranks_by_server]
    if device:
        kind, gbps = find_preset(device), usual_gbps(find_preset(device))
        assumed: tuple[str, ...] = (tr("{device} on every server of {path}", device=device, path=table.source),)
    else:
        # Cores are shared out among as many ranks as the fullest server has.
        from phalanx.cluster.role.role import Role
        from phalanx.cluster.spec.detect import detect

        host = detect(Role(local_world_size=max(counts)))
        kind, gbps = host.nodes[0].device, host.nodes[0].gbps / host.nodes[0].devices
        assumed = (
            tr(
                "{device}, as here, on every server of {path}; device= says another",
                device=kind.name,
                path=table.source,
            ),
            *host.assumed,
        )
    nodes = tuple(Node(device=kind, devices=count, gbps=gbps * count) for count in counts)
    return Cluster(nodes=nodes, assumed=(*assumed, *table.notices))

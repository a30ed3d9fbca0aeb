"""Parse and write the two JSON layouts of an HCCL rank table, `group_list` and `server_list` (pure).

The older one lists instances in a group and names the kind of machine by a board id; the newer one, version 1.0, lists
servers and their devices. Numbers may be written as text in both, and usually are.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import ConfigError
from phalanx.i18n import tr

Layout = Literal["group", "server"]
"""`group`: board_id, group_list, instance_list. `server`: version 1.0, server_list."""

MACHINES = {"0x0000": ("x86", ("x86_64", "amd64", "i686")), "0x0020": ("arm", ("aarch64", "arm64"))}
"""What a board id says: a word for the processor, and how systems call it."""

COMPLETED = "completed"

_LONGEST_NUMBER = 18
"""Digits of a number that fits 64 bits; Python itself refuses thousands with an error of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One rank of a table."""

    rank: int
    server: str
    """IPv4 address of its host."""

    device_id: int
    """Number of its device on that host."""

    device_ip: str = ""
    """Address of the device's own network port; empty where the table names none."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A value of the table and where it stands, for messages."""

    value: Any
    source: str
    path: str = ""

    def wrong(self, what: str) -> ConfigError:
        """Return the error that says where and what."""
        return ConfigError(
            tr("{source}: {path} {what}", source=self.source, path=self.path or tr("the table"), what=what)
        )

    def has(self, key: str) -> bool:
        """Return whether this is an object with `key`."""
        return isinstance(self.value, dict) and key in self.value

    def need(self, key: str) -> TableEntry:
        """Return the entry under `key`, which must be there."""
        if not isinstance(self.value, dict):
            raise self.wrong(tr("must be an object in braces, found {found}. Correct it.", found=repr(self.value)))
        if key not in self.value:
            keys = ", ".join(self.value) or tr("nothing")
            raise self.wrong(tr("has no {name!r}, only {found}. Add it.", name=key, found=keys))
        return TableEntry(self.value[key], self.source, f"{self.path}.{key}" if self.path else key)

    def items(self) -> list[TableEntry]:
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            raise self.wrong(tr("must be a list in brackets, found {found}. Correct it.", found=repr(self.value)))
        return [TableEntry(value, self.source, f"{self.path}[{n}]") for n, value in enumerate(self.value)]

    def number(self) -> int:
        """Return a whole number of at least 0, which may be written as text."""
        digits = str(self.value).strip()
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _LONGEST_NUMBER
        if isinstance(self.value, bool) or not is_number:
            raise self.wrong(
                tr("must be a whole number of at least 0, found {found}. Correct it.", found=repr(self.value))
            )
        return int(digits)

    def words(self) -> str:
        """Return text without spaces around it."""
        if not isinstance(self.value, str):
            raise self.wrong(tr("must be text in quotes, found {found}. Correct it.", found=repr(self.value)))
        return self.value.strip()

    def check_count(self, key: str, expected: int, of: str) -> None:
        """Raise unless the number under `key` is how many there are of something, which `of` names."""
        entry = self.need(key)
        if entry.number() != expected:
            raise entry.wrong(
                tr(
                    "is {said}, but the table lists {found} {of}. Correct one of them.",
                    said=entry.number(),
                    found=expected,
                    of=of,
                )
            )


def layout_of(table: TableEntry) -> Layout:
    """Return which layout a table has; raises ConfigError if neither."""
    if any(table.has(key) for key in ("server_list", "server_count", "version")):
        return "server"
    if any(table.has(key) for key in ("group_list", "group_count", "board_id")):
        return "group"
    raise table.wrong(
        tr(
            "is in no layout known here: it has neither 'group_list' (with board_id) nor 'server_list' (with version "
            "1.0). Make one with `phalanx rank-table make --hosts 10.0.0.1,10.0.0.2`."
        )
    )


def read_groups(table: TableEntry) -> tuple[str, list[Device]]:
    """Return board id and devices, in the order of the file, of the older layout."""
    board_id = _board_id(table.need("board_id"))
    groups = table.need("group_list").items()
    table.check_count("group_count", len(groups), tr("groups"))
    if len(groups) != 1:
        raise table.need("group_list").wrong(
            tr("has {count} groups, and a job is started from one. Write a table for each job.", count=len(groups))
        )
    group = groups[0]
    devices = [_instance(entry) for entry in group.need("instance_list").items()]
    group.check_count("instance_count", len(devices), tr("instances"))
    group.check_count("device_num", len(devices), tr("devices"))
    group.check_count("server_num", len({device.server for device in devices}), tr("servers"))
    _check_interfaces(table, devices)
    _check_completed(table)
    return board_id, devices


def _board_id(entry: TableEntry) -> str:
    board_id = entry.words().lower()
    if board_id not in MACHINES:
        choices = tr(" or ").join(f"{choices} ({name})" for choices, (name, _) in MACHINES.items())
        raise entry.wrong(tr("must be {known}, found {found}. Correct it.", known=choices, found=repr(entry.value)))
    return board_id


def _instance(entry: TableEntry) -> Device:
    devices = entry.need("devices").items()
    rank, server = entry.need("rank_id").number(), _server(entry.need("server_id"))
    if len(devices) != 1:
        raise entry.wrong(
            tr(
                "(rank_id {rank}) has {count} devices, and a process runs on one. Give each an instance of its own.",
                rank=rank,
                count=len(devices),
            )
        )
    return _device(devices[0], rank, server)


def _check_interfaces(table: TableEntry, devices: Sequence[Device]) -> None:
    """The interfaces are not used here; where they are listed, their counts agree."""
    if not table.has("para_plane_nic_num"):
        return
    count = table.need("para_plane_nic_num")
    if table.has("para_plane_nic_name"):
        table.check_count("para_plane_nic_num", len(table.need("para_plane_nic_name").items()), tr("interfaces"))
    servers = [device.server for device in devices]
    most = max((servers.count(server) for server in servers), default=0)
    on_devices = table.has("para_plane_nic_location") and table.need("para_plane_nic_location").value == "device"
    if on_devices and count.number() != most:
        raise count.wrong(
            tr(
                "is {count}, but interfaces are said to be on the devices, and a server has {most}. Correct one of "
                "them.",
                count=count.number(),
                most=most,
            )
        )


def read_servers(table: TableEntry) -> list[Device]:
    """Return the devices, in the order of the file, of the newer layout."""
    version = table.need("version")
    if str(version.value).strip() != "1.0":
        raise version.wrong(
            tr("must be 1.0, the version read here, found {found}. Make a table of 1.0.", found=repr(version.value))
        )
    servers = table.need("server_list").items()
    table.check_count("server_count", len(servers), tr("servers"))
    names = [_server(server.need("server_id")) for server in servers]
    for server, name in zip(servers, names, strict=True):
        if names.count(name) > 1:
            raise server.need("server_id").wrong(
                tr("{name} is listed twice. List each server once, with its devices.", name=name)
            )
    _check_completed(table)
    return [
        _device(device, device.need("rank_id").number(), name)
        for server, name in zip(servers, names, strict=True)
        for device in server.need("device").items()
    ]


def _device(entry: TableEntry, rank: int, server: str) -> Device:
    address = entry.need("device_ip").words() if entry.has("device_ip") else ""
    if address and not _is_address(address):
        raise entry.need("device_ip").wrong(
            tr("must be an IP address, found {found}. Correct it.", found=repr(address))
        )
    return Device(rank=rank, server=server, device_id=entry.need("device_id").number(), device_ip=address)


def _server(entry: TableEntry) -> str:
    address = entry.words()
    if not _is_address(address, 4):
        raise entry.wrong(
            tr("must be the server's IPv4 address, found {found}. Write e.g. 10.0.0.1.", found=repr(address))
        )
    return address


def _is_address(address: str, version: int | None = None) -> bool:
    try:
        actual = ipaddress.ip_address(address).version
        return version is None or actual == version
    except ValueError:
        return False


def _check_completed(table: TableEntry) -> None:
    status = table.need("status")
    if status.value != COMPLETED:
        raise status.wrong(
            tr(
                "must be {wanted}, found {found}: what writes the table has not finished. Wait for it.",
                wanted=repr(COMPLETED),
                found=repr(status.value),
            )
        )


def _by_server(devices: Sequence[Device]) -> Iterator[tuple[str, list[Device]]]:
    for server in dict.fromkeys(device.server for device in devices):
        yield server, [device for device in devices if device.server == server]


def write_servers(devices: Sequence[Device]) -> dict[str, Any]:
    """Return the newer layout as plain values; devices by rank."""
    servers = [
        {"server_id": server, "device": [_device_json(device) | {"rank_id": str(device.rank)} for device in on_server]}
        for server, on_server in _by_server(devices)
    ]
    return {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": COMPLETED}


def write_groups(devices: Sequence[Device], board_id: str) -> dict[str, Any]:
    """Return the older layout as plain values; devices by rank."""
    counts = [len(on_server) for _, on_server in _by_server(devices)]
    instances = [
        {"devices": [_device_json(device)], "rank_id": str(device.rank), "server_id": device.server}
        for device in devices
    ]
    group = {
        "device_num": str(len(devices)), "server_num": str(len(counts)), "group_name": "",
        "instance_count": str(len(devices)), "instance_list": instances,
    }  # fmt: skip
    return {
        "board_id": board_id, "chip_info": "", "deploy_mode": "lab", "group_count": "1", "group_list": [group],
        "para_plane_nic_location": "device", "para_plane_nic_name": [f"eth{n}" for n in range(max(counts))],
        "para_plane_nic_num": str(max(counts)), "status": COMPLETED,
    }  # fmt: skip


def _device_json(device: Device) -> dict[str, str]:
    return {"device_id": str(device.device_id), "device_ip": device.device_ip or device.server}

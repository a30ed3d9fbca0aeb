"""`RankTable`: which rank runs on which device of which server, loaded from an HCCL rank table file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cluster.rank_table import layouts
from phalanx.cluster.rank_table.layouts import MACHINES, Device, Layout, TableEntry
from phalanx.errors import ConfigError
from phalanx.i18n import tr

VARIABLE = "RANK_TABLE_FILE"

_STRING_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[\]}])')


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTable:
    """Every rank of a job, its server and its device, checked."""

    source: str
    """The file, for messages."""

    layout: Layout
    devices: tuple[Device, ...]
    """One for each rank, in order."""

    board_id: str = ""
    """What kind of machine the older layout is for; empty in the newer one."""

    notices: tuple[str, ...] = ()
    """What was put up with."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers, in the order of their lowest ranks: a server's place is its node rank."""
        return tuple(dict.fromkeys(device.server for device in self.devices))

    def on(self, server: str) -> tuple[Device, ...]:
        """Return the devices of a server; a device's place is its local rank."""
        return tuple(device for device in self.devices if device.server == server)

    @property
    def ranks_by_server(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each server, by its place."""
        return tuple(tuple(device.rank for device in self.on(server)) for server in self.servers)

    @property
    def digest(self) -> str:
        """Eight digits that are the same for the same ranks, devices and servers."""
        identity = [(device.rank, device.server, device.device_id) for device in self.devices]
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:8]

    def check_machine(self, machine: str) -> None:
        """Raise ConfigError if the board id is that of another kind of machine.

        Args:
            machine: What the system calls this one, as `platform.machine()` does.
        """
        name, machines = MACHINES.get(self.board_id, ("", (machine.lower(),)))
        if machine.lower() not in machines:
            ours = next((board_id for board_id, (_, names) in MACHINES.items() if machine.lower() in names), None)
            advice = (
                tr("Write {board} if it is meant for this host", board=ours)
                if ours
                else tr("Use a table of version 1.0, without one")
            )
            raise ConfigError(
                tr(
                    "{source}: board_id {board} says {name}, but this machine is {machine}. {advice}.",
                    source=self.source,
                    board=self.board_id,
                    name=name,
                    machine=machine,
                    advice=advice,
                )
            )

    def to_json(self, layout: Layout, board_id: str = "") -> str:
        """Return the table as the text of a file.

        Args:
            layout: How to write it. What the older layout says besides ranks (interfaces) is made up alike for all.
            board_id: Kind of machine, for the older layout, where the table does not say.
        """
        if layout == "server":
            return json.dumps(layouts.write_servers(self.devices), indent=2) + "\n"
        return json.dumps(layouts.write_groups(self.devices, self.board_id or board_id), indent=2) + "\n"


def load(path: str) -> RankTable:
    """Read a rank table from a file.

    Raises:
        ConfigError: If it cannot be read or is wrong; names file, place and what to do.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else tr("it is no text")
        raise ConfigError(
            tr(
                "The rank table {path} cannot be read ({why}). Correct the path, or make one with `phalanx rank-table "
                "make --hosts 10.0.0.1,10.0.0.2 --out rank_table.json`.",
                path=path,
                why=reason,
            )
        ) from None
    return parse(content, path)


def load_named(variables: Mapping[str, str]) -> RankTable:
    """Read the table that RANK_TABLE_FILE names.

    A relative path that is not in this folder is looked for in the one above: loops that start ranks by hand enter a
    folder for each device, and name the table from where they began.

    Raises:
        ConfigError: As `load`.
    """
    path = variables[VARIABLE].strip()
    above = Path("..", path)
    return load(str(above) if not Path(path).exists() and above.exists() else path)


def parse(content: str, source: str) -> RankTable:
    """Read a rank table from text.

    Args:
        content: JSON in either layout; commas before a closing bracket are passed over, with a notice.
        source: Where it came from, for messages.

    Raises:
        ConfigError: For the first mistake; says where it is and what to do.
    """
    value, notices = _decode(content, source)
    table = TableEntry(value, source)
    layout = layouts.layout_of(table)
    board_id, devices = layouts.read_groups(table) if layout == "group" else ("", layouts.read_servers(table))
    _check_ranks(devices, source)
    ordered = tuple(sorted(devices, key=lambda device: device.rank))
    read = RankTable(source=source, layout=layout, devices=ordered, board_id=board_id, notices=notices)
    return replace(read, notices=(*notices, *_unusual(read)))


def _unusual(table: RankTable) -> list[str]:
    """Return what works here and not, or slower, on the machines that rank tables are for: 8 devices in two fours."""
    notices: list[str] = []
    for server in table.servers:
        ids = [device.device_id for device in table.on(server)]
        if len(ids) not in (1, 2, 4) and len(ids) % 8:
            notices.append(
                tr(
                    "{source}: {server} has {count} devices, where collectives of other frameworks want 1, 2, 4 or 8; "
                    "it works here. Where groups of 4 devices are linked, list 4 or 8 for the full speed of the links",
                    source=table.source,
                    server=server,
                    count=len(ids),
                )
            )
        elif 1 < len(ids) <= 4 and min(ids) < 4 <= max(ids):
            numbers = ", ".join(map(str, sorted(ids)))
            notices.append(
                tr(
                    "{source}: {server} has devices {devices}, of both fours 0-3 and 4-7; it works here. Where only "
                    "the devices of a four are linked with each other, list those of one",
                    source=table.source,
                    server=server,
                    devices=numbers,
                )
            )
    return notices


def _decode(content: str, source: str) -> tuple[Any, tuple[str, ...]]:
    lines: list[int] = []

    def blank(match: re.Match[str]) -> str:
        if match[0] != ",":
            return match[0]
        lines.append(content.count("\n", 0, match.start()) + 1)
        return " "

    # A blank in place of each comma: the lines and columns of other mistakes stay what they are.
    cleaned = _STRING_OR_COMMA.sub(blank, content)
    try:
        value = json.loads(cleaned)
    except json.JSONDecodeError as error:
        raise ConfigError(
            tr(
                "{source}: no JSON at line {line}, column {column} ({why}). Correct it there.",
                source=source,
                line=error.lineno,
                column=error.colno,
                why=error.msg,
            )
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            tr("{source}: no rank table ({why}). Give the file of a rank table.", source=source, why=error)
        ) from None
    return value, tuple(
        tr("{source}: the comma before a closing bracket in line {line} is passed over", source=source, line=line)
        for line in lines
    )


def _check_ranks(devices: list[Device], source: str) -> None:
    if not devices:
        raise ConfigError(tr("{source}: the table lists no device. List at least one.", source=source))
    seen: dict[int, Device] = {}
    places: dict[tuple[str, int], Device] = {}
    for device in devices:
        slot = (device.server, device.device_id)
        if device.rank in seen:
            other = seen[device.rank]
            raise ConfigError(
                tr(
                    "{source}: rank_id {rank} is given twice, to device {device} of {server} and device {other} of "
                    "{other_server}. Number the ranks 0 to {last}.",
                    source=source,
                    rank=device.rank,
                    device=other.device_id,
                    server=other.server,
                    other=device.device_id,
                    other_server=device.server,
                    last=len(devices) - 1,
                )
            )
        if slot in places:
            raise ConfigError(
                tr(
                    "{source}: device {device} of {server} is listed twice, for ranks {rank} and {other}. Give each "
                    "rank a device of its own.",
                    source=source,
                    device=device.device_id,
                    server=device.server,
                    rank=places[slot].rank,
                    other=device.rank,
                )
            )
        seen[device.rank] = places[slot] = device
    missing = next((rank for rank in range(len(devices)) if rank not in seen), None)
    if missing is not None:
        raise ConfigError(
            tr(
                "{source}: {count} devices need rank_id 0 to {last}, but {missing} is missing and {most} is given. "
                "Number them from 0 without gaps.",
                source=source,
                count=len(devices),
                last=len(devices) - 1,
                missing=missing,
                most=max(seen),
            )
        )

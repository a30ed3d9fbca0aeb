"""The command `phalanx rank-table`: make, check and convert rank table files."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import asdict
from pathlib import Path

import click

from phalanx.cluster import network
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.rank_table.layouts import MACHINES, Device
from phalanx.cluster.rank_table.rank_table import RankTable
from phalanx.errors import LaunchError
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.nodes import reachable
from phalanx.launch.request.options import DEFAULT_PORT

HCCN = Path("/etc/hccn.conf")
"""Where hosts with network ports on their devices keep those addresses, as `address_0=192.1.27.6`."""

_out = click.option("--out", metavar="FILE", help="Write there instead of on standard output.")


@click.group(epilog="\b\nExample:\n  phalanx rank-table check ranks.json")
def command() -> None:
    """Make, check or convert a rank table: which rank runs on which device of which host."""


@command.command(epilog="\b\nExample:\n  phalanx rank-table make --hosts 10.0.0.1,10.0.0.2")
@click.option("--hosts", required=True, metavar="LIST", help="Hosts of the job in order, e.g. 10.0.0.1,10.0.0.2.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="Ranks on each host. Default: one per GPU of this host; on CPU 1.",
)
@_out
def make(hosts: str, devices: int | None, out: str | None) -> None:
    """Write a table in the newer layout: ranks 0, 1, ... host by host, devices from 0 on each."""
    listed = [part.strip() for part in hosts.split(",") if part.strip()]
    if not listed:
        raise LaunchError(f"--hosts '{hosts}' lists no host. Write e.g. --hosts 10.0.0.1,10.0.0.2.")
    ports = device_addresses(HCCN.read_text()) if HCCN.exists() else {}
    count = devices or len(ports) or len(Machine.detect(os.environ).usable_gpus) or 1
    servers = [reachable(host) for host in listed]
    for server in servers:
        if servers.count(server) > 1:
            raise LaunchError(
                f"--hosts {hosts} lists {server} twice. List each host once; --devices says how many ranks."
            )
    table_devices = tuple(
        Device(
            rank=node_rank * count + device_id, server=server, device_id=device_id,
            device_ip=ports.get(device_id, "") if network.is_own(server) else "",
        )
        for node_rank, server in enumerate(servers)
        for device_id in range(count)
    )  # fmt: skip
    text = RankTable(source="--hosts", layout="server", devices=table_devices).to_json("server")
    _show_notices(rank_table.parse(text, f"--hosts {hosts}"))
    _write(text, out)


def device_addresses(text: str) -> dict[int, str]:
    """Return the address of each device's network port, by its number, from the text of /etc/hccn.conf."""
    return {int(number): address for number, address in re.findall(r"^address_(\d+)=(\S+)$", text, re.MULTILINE)}


@command.command(epilog="\b\nExample:\n  phalanx rank-table check ranks.json")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(file: str, as_json: bool) -> None:
    """Say what a table means, or what is wrong with it (exit code 1)."""
    table = _load(file)
    table.check_machine(platform.machine())
    meeting = f"{table.servers[0]}:{DEFAULT_PORT}"
    if as_json:
        facts = {"layout": table.layout, "board_id": table.board_id, "servers": table.servers, "meeting": meeting,
                 "devices": [asdict(device) for device in table.devices]}  # fmt: skip
        click.echo(json.dumps(facts))
        return
    for device in table.devices:
        port = f"  {device.device_ip}" if device.device_ip else ""
        click.echo(f"rank {device.rank}  {device.server}  device {device.device_id}{port}")
    ours = [server for server in table.servers if network.is_own(server)]
    click.echo(f"ranks: {len(table.devices)}, servers: {len(table.servers)}, this host: {', '.join(ours) or 'none'}")
    click.echo(f"launchers of several hosts, and ranks started by hand, meet at {meeting}; --http-port or MASTER_PORT")
    click.echo("chooses another port")


@command.command(epilog="\b\nExample:\n  phalanx rank-table convert old.json")
@click.argument("file")
@_out
def convert(file: str, out: str | None) -> None:
    """Write a table in the other layout: group_list as server_list, or the other way round."""
    table = _load(file)
    if table.layout == "group":
        _write(table.to_json("server"), out)
        return
    machine = platform.machine().lower()
    board_id = next((board_id for board_id, (_, names) in MACHINES.items() if machine in names), None)
    if board_id is None:
        machine_names = ", ".join(name for name, _ in MACHINES.values())
        raise LaunchError(
            f"The older layout has board ids for {machine_names}, and this machine is {machine}. Keep this one."
        )
    _write(table.to_json("group", board_id), out)


def _load(file: str) -> RankTable:
    table = rank_table.load(file)
    _show_notices(table)
    return table


def _show_notices(table: RankTable) -> None:
    for notice in table.notices:
        click.echo(notice, err=True)


def _write(text: str, out: str | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--out {out} cannot be written ({error.strerror}). Choose another file.") from None
    click.echo(f"wrote {out}", err=True)

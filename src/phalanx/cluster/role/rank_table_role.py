"""Read the `Role` of a process from a rank table (RANK_TABLE_FILE) and DEVICE_ID."""

from __future__ import annotations

import logging
import platform

from phalanx.cluster import network
from phalanx.cluster.env.environment import Environment
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.rank_table.layouts import Device
from phalanx.cluster.rank_table.rank_table import RankTable
from phalanx.cluster.role.role import Role
from phalanx.errors import RoleError

logger = logging.getLogger("phalanx.cluster")

MEETING_PORT = 29500
"""Port on the first host where hosts or ranks meet that know addresses only, unless they are told another."""

_NAMES = (rank_table.VARIABLE, "RANK_SIZE", "DEVICE_ID")


def table_role(env: Environment) -> Role | None:
    """Return the role of a process with `RANK_TABLE_FILE` and `DEVICE_ID`, or None where neither was set for it.

    Its rank is the table's entry for this host and that device. `RANK_SIZE`, where set, must agree with the table.

    Raises:
        RoleError: If a variable is missing or does not fit the table, or this host is not in the table.
        ConfigError: If the table is wrong.
    """
    variables = {name: value for name in _NAMES if (value := env.text(name)) is not None}
    # A table alone is for launchers to read, a device or a size alone may be any program's; two of them mean a loop.
    if len(variables) < 2 or (variables.get("RANK_SIZE") == "1" and rank_table.VARIABLE not in variables):
        return None
    because = f"A rank started by hand ({' and '.join(f'{name}={value}' for name, value in variables.items())})"
    env.need_text(rank_table.VARIABLE, because)
    device_id, size = env.need_integer("DEVICE_ID", because), env.integer("RANK_SIZE", minimum=1)
    table = rank_table.load_named(env.variables)
    for notice in table.notices:
        logger.warning("%s", notice)
    table.check_machine(platform.machine())
    if size is not None and size != len(table.devices):
        raise RoleError(
            f"RANK_SIZE={size}, but {table.source} lists {len(table.devices)} ranks. Correct one of them; a job on "
            "fewer devices needs a table of its own."
        )
    return _role(env, table, _entry(env, table, device_id))


def _entry(env: Environment, table: RankTable, device_id: int) -> Device:
    """The table's entry for a device of this host."""
    pod = env.text("POD_IP")
    ours = [pod] if pod in table.servers else [server for server in table.servers if network.is_own(server)]
    matches = [device for server in ours for device in table.on(str(server)) if device.device_id == device_id]
    if not ours:
        raise RoleError(
            f"{table.source} lists the servers {', '.join(table.servers)}, and none of them is an address of this "
            "host. Correct server_id, or set POD_IP to the one that is this host."
        )
    if not matches:
        there = ", ".join(str(device.device_id) for server in ours for device in table.on(str(server)))
        raise RoleError(
            f"DEVICE_ID={device_id} is not among the devices that {table.source} lists for this host: {there}. "
            "Correct one of them."
        )
    if len(matches) > 1:
        raise RoleError(
            f"{table.source} lists device {device_id} for {' and '.join(device.server for device in matches)}, which "
            "are all addresses of this host. Set POD_IP to the one that this process is meant for."
        )
    return matches[0]


def _role(env: Environment, table: RankTable, own: Device) -> Role:
    beside = table.on(own.server)
    has_port = env.text("MASTER_PORT") is not None
    return Role(
        rank=own.rank, world_size=len(table.devices), local_rank=beside.index(own), local_world_size=len(beside),
        device_index=own.device_id, node_rank=table.servers.index(own.server), node_count=len(table.servers),
        master_addr=env.text("MASTER_ADDR") or table.devices[0].server,
        master_port=env.port("MASTER_PORT", table.source) if has_port else MEETING_PORT,
        log_dir=env.text("PHALANX_LOG_DIR") or "", launcher="rank table",
    )  # fmt: skip

"""`fill`: fill launcher options that were not given from a rank table."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import replace

from phalanx.cluster.env.environment import Environment
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.rank_table.rank_table import RankTable
from phalanx.errors import LaunchError
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.nodes import match_host
from phalanx.launch.request.options import Options, flag_of
from phalanx.launch.request.request import detect_mode

logger = logging.getLogger("phalanx.launch")

_SET_BY_TABLE = ("ips", "nnodes", "master_addr", "gpus")
"""Flags that say what a table says as a whole."""


def fill(options: Options, environment: Mapping[str, str], machine: Machine) -> Options:
    """Return `options` with hosts, processes and gpus of `--rank-table`, else of RANK_TABLE_FILE, where there is one.

    Where a scheduler said which hosts take part, no table is needed, and none is read.

    Args:
        options: What the user typed, filled from a scheduler's variables.
        environment: The launcher's own variables.
        machine: This host.

    Raises:
        ConfigError: If the table is wrong, other flags say otherwise, or this host is not in it.
    """
    source = "--rank-table" if options.rank_table is not None else rank_table.VARIABLE
    path = options.rank_table or Environment(environment).text(rank_table.VARIABLE)
    if path is None or _skips_table(options, environment, source):
        return options
    table = rank_table.load_named(environment) if options.rank_table is None else rank_table.load(path)
    for notice in table.notices:
        logger.warning("%s", notice)
    table.check_machine(platform.machine())
    return _fill_from(options, machine, table, source)


def _skips_table(options: Options, environment: Mapping[str, str], source: str) -> bool:
    """Whether something else says what to start; says so, and refuses what cannot be meant together."""
    mode, _ = detect_mode(options)
    if options.origins:
        first = next(iter(options.origins))
        setting = options.describe_option(first)
        logger.warning("%s is not read: %s says what takes part. Unset that to start from the table.", source, setting)
        return True
    typed = [flag_of(name) for name in _SET_BY_TABLE if getattr(options, name) is not None]
    if options.rank_table is not None:
        if typed:
            raise LaunchError(f"--rank-table and {typed[0]} both say what takes part. Keep one of them.")
        return False
    if environment.get("PHALANX_RANK") or environment.get("TORCHELASTIC_RUN_ID"):
        return True  # Inside a rank of a job, which the table may be that of.
    if mode == "ps" or typed or options.nproc_per_node is not None:
        logger.info("%s is left aside: the flags say what to start", source)
        return True
    if environment.get("DEVICE_ID"):
        raise LaunchError(
            f"{source} and DEVICE_ID={environment['DEVICE_ID']} are set, as in a loop that starts one rank for each "
            "device, and this launcher starts all ranks of a host. Call it once, outside the loop, or start the script "
            "itself in the loop: python train.py."
        )
    return False


def _fill_from(options: Options, machine: Machine, table: RankTable, source: str) -> Options:
    nodes = match_host(options, machine, table.servers)
    devices = table.on(table.servers[nodes.rank])
    if options.nproc_per_node not in (None, len(devices)):
        raise LaunchError(
            f"{options.describe_option('nproc_per_node')} asks for {options.nproc_per_node} processes, "
            f"but {table.source} lists {len(devices)} devices of this host "
            f"({nodes.address}). Drop the flag, or correct the table."
        )
    gpus = ",".join(str(device.device_id) for device in devices) if machine.usable_gpus else None
    filled = {"ips", "gpus"} if gpus else {"ips"}
    if options.nproc_per_node is None:
        filled.add("nproc_per_node")
    return replace(
        options, table=table, rank_table=os.path.abspath(table.source), node_rank=nodes.rank,
        ips=",".join(table.servers), nproc_per_node=len(devices), gpus=gpus, origins=dict.fromkeys(filled, source),
    )  # fmt: skip

"""`fill`: fill launcher options that were not given from the scheduler's environment (Slurm, Kubeflow)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.cluster.allocation import Allocation, Fact, read_allocation
from phalanx.errors import LaunchError
from phalanx.launch.request.options import Options
from phalanx.launch.request.request import detect_mode

logger = logging.getLogger("phalanx.launch")

_FIELDS: dict[Fact, str] = {
    "node_count": "nnodes",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "http_port",
    "procs_per_node": "nproc_per_node",
}


def fill(options: Options, environment: Mapping[str, str]) -> Options:
    """Return `options` with the gaps filled from the launcher's environment; what the user typed always wins.

    Args:
        options: What the user typed.
        environment: The launcher's own variables.

    Raises:
        LaunchError: If the variables disagree, or give a parameter-server job several hosts without saying where its
            servers are.
    """
    # The hosts are all named already, or there is only this one.
    if options.ips or options.nnodes == 1 or options.servers or options.workers:
        return options
    allocation = read_allocation(environment, options.world_size_counts)
    if detect_mode(options)[0] == "ps":
        _check_one_node(allocation)
        return options
    least, most = options.least_nnodes, options.nnodes or 0
    if least is not None and "node_count" in allocation.origins and least <= allocation.node_count <= most:
        # A scheduler may have given fewer nodes than the most.
        options = replace(options, nnodes=allocation.node_count)
    if options.nnodes is not None and options.nnodes != allocation.node_count:
        return options
    return _fill_from(options, allocation)


def _check_one_node(allocation: Allocation) -> None:
    if allocation.node_count > 1:
        raise LaunchError(
            f"--server-num and --worker-num start processes on this host only, but "
            f"{allocation.origins['node_count']}={allocation.node_count} says the job has {allocation.node_count} "
            "hosts. Say where each process runs with --servers ip:port,... and --workers ip:port,..."
        )


def _fill_from(options: Options, allocation: Allocation) -> Options:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for fact, name in _FIELDS.items():
        # One host needs no place and no port to meet at.
        if fact != "procs_per_node" and allocation.node_count == 1:
            continue
        value = getattr(allocation, fact)
        if fact in allocation.origins and getattr(options, name) is None:
            values[name], origins[name] = value, allocation.origins[fact]
    if allocation.node_count > 1:
        values["host_names"] = allocation.host_names
        _note_batch_script(allocation)
    return replace(options, origins=origins, **values)


def _note_batch_script(allocation: Allocation) -> None:
    if allocation.in_batch_script and allocation.node_rank == 0:
        logger.warning(
            "this is the first of %d nodes; a batch script runs on this one only. To start on all: "
            "srun --ntasks-per-node=1 phalanx run ...; to use this one alone: --nnodes 1",
            allocation.node_count,
        )

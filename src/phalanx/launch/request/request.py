"""`LaunchRequest`: the validated configuration of a launcher, from options and machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from phalanx.cluster.env.environment import split_endpoint
from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.request.devices import assign_gpus, ranks_per_node
from phalanx.launch.request.elastic import ElasticRange, WorkerRange, elastic_range, worker_range
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.nodes import Nodes, collective_nodes, listed_nodes
from phalanx.launch.request.options import DEFAULT_PORT, Options, flag_of

Mode = Literal["collective", "ps"]
RoleName = Literal["worker", "server", "heter_worker"]
ROLES: tuple[RoleName, ...] = ("server", "worker", "heter_worker")
"""Roles in the order they are started."""

_PS_FLAGS = ("worker_num", "server_num", "heter_worker_num", "servers", "workers", "heter_workers")
_COLLECTIVE_FLAGS = ("rank_table", "ips", "nproc_per_node", "nnodes", "master_addr")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """One launcher's share of a job, checked."""

    mode: Mode
    nodes: Nodes
    port: int | None
    """Port the user fixed, or None for one chosen by the system."""

    counts: dict[RoleName, int]
    """Processes of each role on this node."""

    endpoints: dict[RoleName, tuple[str, ...]] = field(default_factory=dict)
    """Every `ip:port` of a role over the whole job, where the user listed them."""

    ranks: tuple[tuple[int, ...], ...] = ()
    """Ranks of each host's workers, by node and local rank, where a table says them; else they follow the nodes."""

    gpus: tuple[tuple[str, ...], ...] = ()
    """GPUs of each local worker; empty on CPU."""

    elastic: ElasticRange | None = None
    """How many ranks the job may have where that can change."""

    workers: WorkerRange | None = None
    """How many workers a job with parameter servers may have where that can change."""

    mode_flags: tuple[str, ...] = ()
    """The flags that decided the mode, for the log."""

    @property
    def meeting_port(self) -> int:
        """Port on the first host at which the launchers meet."""
        return self.port or DEFAULT_PORT

    @property
    def local_processes(self) -> int:
        """How many processes of the job run on this host."""
        return sum(self.counts.values())


def resolve(options: Options, machine: Machine) -> LaunchRequest:
    """Check what the user asked for against the machine.

    Raises:
        ConfigError: For the first thing that cannot work; says what was asked, what was found and what to do.
    """
    mode, mode_flags = detect_mode(options)
    if mode == "collective" and options.server_dir is not None:
        raise LaunchError(
            f"--server-dir {options.server_dir} is for parameter servers, and none were asked for. "
            "Add --server-num 1 --worker-num 2, or drop it."
        )
    workers = worker_range(options)
    counts: dict[RoleName, int]
    endpoints: dict[RoleName, tuple[str, ...]] = {}
    if mode == "collective":
        nodes = collective_nodes(options, machine)
        counts = {"worker": ranks_per_node(options, machine)}
    elif options.servers or options.workers:
        endpoints = _listed_endpoints(options)
        nodes = listed_nodes(options, machine, [e for role in ROLES for e in endpoints[role]])
        endpoints = _at_addresses(endpoints, nodes)
        counts = {role: sum(e.rpartition(":")[0] == nodes.address for e in endpoints[role]) for role in ROLES}
    else:
        nodes = collective_nodes(options, machine)
        counts = _ps_counts(options)
    return LaunchRequest(
        mode=mode,
        nodes=nodes,
        port=options.http_port,
        counts=counts,
        endpoints=endpoints,
        ranks=options.table.ranks_by_server if options.table else (),
        elastic=elastic_range(options, counts["worker"]),
        workers=workers,
        gpus=assign_gpus(options, machine, counts["worker"], only_if_asked=mode == "ps"),
        mode_flags=mode_flags,
    )


def check_script(script: str) -> None:
    """Raise LaunchError unless `script` is a file that can be read, or `-m` with a module name."""
    if script.startswith("-m "):
        return
    if os.path.isdir(script):
        example = os.path.join(script, "train.py")
        raise LaunchError(
            tr(
                "training_script '{script}' is a directory. Give the Python file to run, e.g. {example}.",
                script=script,
                example=example,
            )
        )
    if not os.path.exists(script):
        raise LaunchError(
            tr(
                "training_script '{script}' does not exist (looked in {folder}). Check the path.",
                script=script,
                folder=os.getcwd(),
            )
        )
    if not os.access(script, os.R_OK):
        raise LaunchError(tr("training_script '{script}' cannot be read. Check its permissions.", script=script))


def detect_mode(options: Options) -> tuple[Mode, tuple[str, ...]]:
    """Return the mode the flags mean, and the flags that say so.

    Raises:
        LaunchError: If flags of both modes were given.
    """
    servers = tuple(flag_of(name) for name in _PS_FLAGS if getattr(options, name))
    collective = tuple(flag_of(name) for name in _COLLECTIVE_FLAGS if getattr(options, name))
    if servers and collective:
        raise LaunchError(
            f"{', '.join(collective)} starts collective training and {', '.join(servers)} a "
            "parameter-server job; "
            "both were given. Keep one family: -n/--ips, or --server-num/--worker-num (several hosts: "
            "--servers/--workers)."
        )
    if servers:
        return "ps", servers
    if options.wants_servers:
        raise LaunchError(
            "launch_ps starts a parameter-server job, but neither --server-num and --worker-num nor "
            "--servers and "
            "--workers were given. Add e.g. --server-num 1 --worker-num 2."
        )
    hosts = options.origins.get("nnodes") or options.origins.get("ips")
    return "collective", (hosts,) if hosts else tuple(flag for flag in collective if flag == "--ips")


def _ps_counts(options: Options) -> dict[RoleName, int]:
    if not options.server_num or not options.worker_num:
        missing = "--server-num" if not options.server_num else "--worker-num"
        raise LaunchError(
            f"A parameter-server job needs servers and workers, but {missing} is missing. "
            "Add e.g. --server-num 1 --worker-num 2."
        )
    return {
        "server": options.server_num,
        "worker": options.worker_num,
        "heter_worker": options.heter_worker_num or 0,
    }


def _at_addresses(endpoints: dict[RoleName, tuple[str, ...]], nodes: Nodes) -> dict[RoleName, tuple[str, ...]]:
    """Write addresses for names of hosts: a host finds its processes by address."""
    names = dict.fromkeys(endpoint.rpartition(":")[0] for role in ROLES for endpoint in endpoints[role])
    addresses = dict(zip(names, nodes.hosts, strict=True))
    return {
        role: tuple(f"{addresses[host]}:{port}" for host, _, port in (e.rpartition(":") for e in endpoints[role]))
        for role in ROLES
    }


def _listed_endpoints(options: Options) -> dict[RoleName, tuple[str, ...]]:
    """The three endpoint lists, checked against each other and against the counts."""
    lists: dict[RoleName, tuple[str, ...]] = {}
    for role in ROLES:
        text = getattr(options, f"{role}s")
        lists[role] = tuple(part.strip() for part in text.split(",") if part.strip())
        count = getattr(options, f"{role}_num")
        if count is not None and count != len(lists[role]):
            raise LaunchError(
                f"{flag_of(role)}-num is {count}, but {flag_of(role)}s lists {len(lists[role])} endpoints. Drop "
                f"{flag_of(role)}-num or correct the list."
            )
        for endpoint in lists[role]:
            split_endpoint(endpoint, f"{flag_of(role)}s")
    for role in ("server", "worker"):
        if not lists[role]:
            raise LaunchError(
                f"--servers and --workers go together, but --{role}s is empty. List them as ip:port,ip:port."
            )
    listed = [endpoint for role in ROLES for endpoint in lists[role]]
    for endpoint in listed:
        if listed.count(endpoint) > 1:
            raise LaunchError(
                f"Endpoint {endpoint} is listed {listed.count(endpoint)} times. Give every process its own port."
            )
    return lists

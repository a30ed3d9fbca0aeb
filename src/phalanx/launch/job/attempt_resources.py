"""`AttemptResources`: bound sockets, job secret and endpoint list of a start of the job."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from phalanx.cluster import network
from phalanx.cluster.env.environment import Environment, split_endpoint
from phalanx.cluster.role.role import LAYOUT_FILE
from phalanx.cluster.runtime_folder import own_secret
from phalanx.errors import LaunchError
from phalanx.launch.process.environment import JobFacts, layout_folder
from phalanx.launch.process.source_files import path_for_user
from phalanx.launch.request import machine
from phalanx.launch.request.options import Options, flag_of
from phalanx.launch.request.request import ROLES, LaunchRequest, RoleName
from phalanx.launch.request.topology import NodeOffer, Process, Topology

logger = logging.getLogger("phalanx.launch")

ENDPOINTS = "endpoints.log"


@dataclass
class AttemptResources:
    """The sockets of one attempt on this host. A context: leaving it closes our copies."""

    request: LaunchRequest
    store: socket.socket | None = None
    """Listening socket of the job's store; None on hosts other than the first, unless the job is elastic."""

    endpoints: dict[RoleName, list[socket.socket]] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> AttemptResources:
        nodes = self.request.nodes
        try:
            # Any node of an elastic job may come to hold the store of a view.
            if nodes.rank == 0 or self.request.elastic is not None:
                # With several hosts the user's port is where the launchers meet.
                port = 0 if nodes.is_multi_node else (self.request.port or 0)
                self.store = self._bind(port, "--http-port", listen=True)
            for role in ROLES:
                flag = f"{flag_of(role)}s: port"
                self.endpoints[role] = [self._bind(port, flag) for port in self._ports_to_bind(role)]
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def release_sockets(self, *, keep_endpoints: bool) -> None:
        """Close our copies, now that the processes have theirs.

        A listening socket that we still held would let the peers of a dead process connect, and wait for ever: which is
        right where that process is started again, and wrong everywhere else.
        """
        if self.store is not None:
            self.store.close()
        if not keep_endpoints:
            self._open.close()

    def _bind(self, port: int, flag: str, *, listen: bool = False) -> socket.socket:
        return self._open.enter_context(machine.bind(self.request.nodes.address, port, flag=flag, listen=listen))

    def _ports_to_bind(self, role: RoleName) -> list[int]:
        if not self.request.endpoints:
            return [0] * self.request.counts.get(role, 0)
        listed = [split_endpoint(endpoint, f"{flag_of(role)}s") for endpoint in self.request.endpoints[role]]
        return [port for host, port in listed if host == self.request.nodes.address]

    def offer(self, job_id: str, options: Options, secret: str) -> NodeOffer:
        """Return what this host brings into the job."""
        terms = {
            "mode": self.request.mode,
            "--max-restarts": str(options.max_restarts),
            "--replicas": str(options.replicas),
            "the number of hosts": str(self.request.nodes.count),
        }
        for name in ("ips", "servers", "workers", "heter_workers"):
            if listed := getattr(options, name):
                terms[flag_of(name)] = listed.replace(" ", "")
        if self.request.elastic is not None:
            terms["-n"] = f"{options.least_nproc or options.nproc_per_node}:{options.nproc_per_node}"
            terms["--nnodes"] = f"{options.least_nnodes or options.nnodes}:{options.nnodes}"
        if options.table is not None:
            terms["--rank-table"] = f"(sha256 {options.table.digest})"
        if secret:
            terms["PHALANX_JOB_SECRET"] = f"(sha256 {hashlib.sha256(secret.encode()).hexdigest()[:8]})"
        return NodeOffer(
            node_rank=self.request.nodes.rank,
            address=self.request.nodes.address,
            hostname=socket.gethostname(),
            endpoints={role: [_name(s) for s in bound] for role, bound in self.endpoints.items()},
            job_id=job_id,
            store_port=0 if self.store is None else int(self.store.getsockname()[1]),
            terms=terms,
        )

    def sockets(self, layout: Topology) -> dict[str, socket.socket]:
        """Return the socket of each local process's endpoint, by process id."""
        by_name = {_name(s): s for bound in self.endpoints.values() for s in bound}
        return {process.id: by_name[process.endpoint] for process in layout.local}


def _name(bound: socket.socket) -> str:
    host, port = bound.getsockname()
    return f"{host}:{port}"


def job_secret(request: LaunchRequest, variables: Mapping[str, str]) -> str:
    """Return the secret that servers and workers of this job prove to each other, or "" where none is needed.

    One host makes its own. Launchers on several addresses of this host find the same one in a file of this user.

    Args:
        request: What is started.
        variables: The launcher's environment.

    Raises:
        LaunchError: If servers and workers are on several hosts and the user gave no secret.
        RoleError: If what the user gave is no secret.
    """
    secret = Environment(variables).secret("PHALANX_JOB_SECRET").hex()
    if secret or (request.nodes.is_multi_node and request.mode == "collective"):
        return secret
    if not request.nodes.is_multi_node:
        return secrets.token_hex(32)
    if all(network.is_loopback(host) for host in request.nodes.hosts):
        return own_secret()
    raise LaunchError(
        f"Servers and workers on {request.nodes.count} hosts need a secret to know each other by, and "
        "PHALANX_JOB_SECRET is not set. Make one with `openssl rand -hex 32`, and set it to the same value on every "
        "host before you start."
    )


def facts(
    request: LaunchRequest,
    options: Options,
    layout: Topology,
    *,
    attempt: int,
    log_dir: str,
    gloo_path: str,
    secret: str,
    server_layout: int = 0,
) -> JobFacts:
    """Return what the environment of this attempt's processes says besides the layout."""
    table, own = options.table, request.nodes.rank
    keeps_state = request.mode == "ps" and (options.server_dir or options.max_restarts)
    root = os.path.abspath(options.server_dir or f"{log_dir}/servers")
    may_scale = keeps_state and not request.nodes.is_multi_node and not request.endpoints
    return JobFacts(
        mode=request.mode,
        log_dir=log_dir,
        attempt=attempt,
        max_restarts=options.max_restarts,
        replicas=options.replicas,
        least_workers=0 if request.workers is None else request.workers.least,
        check_nan_inf=options.check_nan_inf,
        flight_log=options.flight_log,
        timeout_s=options.timeout_s,
        hang_after_s=options.hang_after_s,
        slow_share=options.slow_share,
        gloo_path=gloo_path,
        interface=network.interface_towards(layout.master[0], network.system_routes()),
        is_multi_host=request.nodes.is_multi_node,
        gpus=request.gpus,
        secret=secret,
        rank_table=options.rank_table or "" if table else "",
        device_ids=tuple(device.device_id for device in table.on(table.servers[own])) if table else (),
        server_dir=layout_folder(root, server_layout) if keeps_state else "",
        server_layout=server_layout,
        server_layout_file=f"{root}/{LAYOUT_FILE}" if may_scale else "",
    )


def write_endpoints(layout: Topology, log_dir: str) -> None:
    """Write `endpoints.log`: every endpoint of the job, one a line, by role."""
    names: tuple[tuple[RoleName, str], ...] = (
        ("worker", "PADDLE_TRAINER_ENDPOINTS"),
        ("server", "PADDLE_PSERVERS_IP_PORT_LIST"),
        ("heter_worker", "PADDLE_HETER_TRAINER_IP_PORT_LIST"),
    )
    with open(f"{log_dir}/{ENDPOINTS}", "w", encoding="utf-8") as file:
        for role, name in names:
            if layout.endpoints[role]:
                file.write("\n".join([f"{name}:", *layout.endpoints[role], ""]))


def local_processes(layout: Topology, role: RoleName) -> list[Process]:
    """Return the processes of a role on this host."""
    return [process for process in layout.local if process.role == role]


def log_files(layout: Topology, mode: str, log_dir: str) -> str:
    """Return where the logs are, as briefly as it can be said."""
    folder = path_for_user(log_dir)
    if layout.local[0].env_file:
        return f"{folder}/rank_N/train.log"
    return f"{folder}/serverlog.N, {folder}/workerlog.N" if mode == "ps" else f"{folder}/workerlog.N"


def log_hint(layout: Topology, mode: str, log_dir: str) -> str:
    """Return the line that says where the logs are."""
    folder = path_for_user(log_dir)
    if layout.local[0].env_file:
        return f"each process has a folder of its own in {folder}, with its output in train.log: {folder}/rank_N"
    if mode == "ps":
        return (
            f"Please check servers, workers and heter_worker logs in {folder}/workerlog.*, "
            f"{folder}/serverlog.* "
            f"and {folder}/heterlog.*"
        )
    return (
        f"details about PADDLE_TRAINER_ENDPOINTS can be found in {folder}/endpoints.log, and detail running "
        "logs "
        f"maybe found in {path_for_user(layout.local[0].log_file)}"
    )

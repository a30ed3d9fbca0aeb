"""Read the `Role` of a process that `srun` or `mpirun` started directly."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from phalanx.cluster.env.environment import Environment, expand_hosts, split_endpoint
from phalanx.cluster.role.role import Kind, Role
from phalanx.errors import RoleError

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch, interactive and extern steps from the top: they run the user's shell, not tasks."""

PORT_BASE, PORT_SPAN = 15000, 15000
"""Ports derived from a job id lie in [base, base + span), below the range systems hand out by themselves."""


def derived_port(job: str) -> int:
    """Return the port that every process of the job `job` derives alike."""
    return PORT_BASE + zlib.crc32(job.encode()) % PORT_SPAN


def step_role(env: Environment) -> Role | None:
    """Return the role of a process that `srun` or `mpirun` started, or None where neither did.

    Raises:
        RoleError: If variables are missing or do not fit each other.
    """
    role = _slurm_step(env) or _mpi_step(env)
    servers = env.integer("PHALANX_SERVER_NUM", minimum=1)
    return role if role is None or servers is None else _with_servers(env, role, servers)


def _with_servers(env: Environment, role: Role, servers: int) -> Role:
    """The first `servers` ranks of a step serve, the others train."""
    size = role.world_size
    if servers >= size:
        raise RoleError(
            f"PHALANX_SERVER_NUM={servers} leaves no worker among the {size} processes of this step. "
            "Start more processes, or name fewer servers."
        )
    lists = env.all_endpoints()
    _check_count("PHALANX_SERVER_ENDPOINTS", lists["server_endpoints"], servers)
    _check_count("PHALANX_WORKER_ENDPOINTS", lists["worker_endpoints"], size - servers)
    is_server = role.rank < servers
    kind: Kind
    kind, first = ("server", 0) if is_server else ("worker", servers)
    # Hosts are filled one after the other (mpirun --map-by slot, srun --distribution=block), servers first.
    servers_here = max(0, min(servers - (role.rank - role.local_rank), role.local_world_size))
    return replace(
        role, kind=kind, rank=role.rank - first, world_size=servers if is_server else size - servers,
        local_rank=role.local_rank - (0 if is_server else servers_here),
        local_world_size=servers_here if is_server else role.local_world_size - servers_here,
        # The first worker holds the store, and it need not be on the host of rank 0.
        master_addr=env.text("MASTER_ADDR") or split_endpoint(lists["worker_endpoints"][0], "worker endpoints")[0],
        endpoint=lists[f"{kind}_endpoints"][role.rank - first], **lists,
    )  # fmt: skip


def _check_count(name: str, endpoints: tuple[str, ...], expected: int) -> None:
    if len(endpoints) != expected:
        raise RoleError(
            f"PHALANX_SERVER_NUM needs {name} with {expected} host:port entries, one per process in rank order, "
            f"found {len(endpoints)}. Set it alike for every process of the step."
        )


def _slurm_step(env: Environment) -> Role | None:
    """Return the role of a task of an `srun` step, or None outside one (a batch script or an interactive shell)."""
    step = env.integer("SLURM_STEP_ID")
    if step is None or step >= FIRST_SPECIAL_STEP or env.text("SLURM_PROCID") is None:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if env.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = env.need_integer(size_name, f"SLURM_STEP_ID={step}", minimum=1)
    rank = env.need_integer("SLURM_PROCID", f"SLURM_STEP_ID={step}")
    if rank >= size:
        raise RoleError(f"SLURM_PROCID={rank} does not fit {size_name}={size}: ranks run from 0 to {size - 1}.")
    nodes = env.integer("SLURM_STEP_NUM_NODES", minimum=1) or 1
    node_rank = env.integer("SLURM_NODEID") or 0
    local_rank = env.integer("SLURM_LOCALID") or 0
    job = env.text("SLURM_JOB_ID") or "0"
    return Role(
        rank=rank, world_size=size, local_rank=local_rank,
        local_world_size=_tasks_on_node(env, node_rank) or (size if nodes == 1 else local_rank + 1),
        node_rank=node_rank, node_count=nodes, attempt=env.integer("SLURM_RESTART_COUNT") or 0,
        job_id=job, log_dir=env.text("PHALANX_LOG_DIR") or "", launcher="slurm",
        secret=env.secret("PHALANX_JOB_SECRET"),
        **_master(env, size, _first_host(env, nodes), f"{job}.{step}"),
    )  # fmt: skip


def _tasks_on_node(env: Environment, node_rank: int) -> int | None:
    """Read `2(x3),1`: two tasks on each of three nodes, one on the fourth."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for part in (env.text(name) or "").split(","):
        if not part:
            continue
        count, _, repeat = part.strip().rstrip(")").partition("(x")
        if not (count.isdecimal() and (repeat or "1").isdecimal()):
            raise RoleError(f"{name} must look like 2(x3),1, found {env.text(name)!r}. Start the step with srun.")
        counts += [int(count)] * int(repeat or "1")
    return counts[node_rank] if node_rank < len(counts) else None


def _first_host(env: Environment, nodes: int) -> str | None:
    if nodes == 1:
        return "127.0.0.1"
    listed = env.text("SLURM_STEP_NODELIST") or env.text("SLURM_JOB_NODELIST")
    return expand_hosts(listed)[0] if listed else None


def _mpi_step(env: Environment) -> Role | None:
    """Return the role of a process of Open MPI or of a PMI launcher (MPICH, Intel MPI), or None outside one."""
    for names in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if env.text(names[0]) is not None:
            return _mpi(env, *names)
    return None


def _mpi(env: Environment, rank_name: str, size_name: str, local_name: str, local_size_name: str) -> Role:
    size = env.need_integer(size_name, f"{rank_name}={env.text(rank_name)}", minimum=1)
    rank = env.need_integer(rank_name, f"{size_name}={size}")
    if rank >= size:
        raise RoleError(f"{rank_name}={rank} does not fit {size_name}={size}: ranks run from 0 to {size - 1}.")
    local_rank = env.integer(local_name) or 0
    local_size = env.integer(local_size_name, minimum=1) or local_rank + 1
    nodes = -(-size // local_size)
    job = env.text("PMIX_NAMESPACE") or env.text("OMPI_MCA_ess_base_jobid") or env.text("PMI_ID") or ""
    host = "127.0.0.1" if nodes == 1 else None
    return Role(
        rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_size,
        node_rank=min(rank // local_size, nodes - 1), node_count=nodes, job_id=job,
        log_dir=env.text("PHALANX_LOG_DIR") or "", launcher="mpi",
        secret=env.secret("PHALANX_JOB_SECRET"),
        **_master(env, size, host, job),
    )  # fmt: skip


def _master(env: Environment, size: int, host: str | None, job: str) -> dict[str, Any]:
    if size == 1:
        return {}
    address = env.text("MASTER_ADDR") or host
    if address is None:
        address = env.need_text("MASTER_ADDR", f"A direct step of {size} processes on several hosts")
    if env.text("MASTER_PORT") is None and job:
        return {"master_addr": address, "master_port": derived_port(job)}
    return {"master_addr": address, "master_port": env.port("MASTER_PORT", f"A direct step of {size} processes")}

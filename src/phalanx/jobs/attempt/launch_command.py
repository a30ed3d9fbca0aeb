"""`build_command`: launch command and environment of a node for each launch kind: phalanx, torchrun, env (pure).

phalanx    `phalanx run`, one launcher a node; RANK and WORLD_SIZE count processes
torchrun   torch's launcher, one a node; RANK and WORLD_SIZE count processes
env        the command itself, one process a node; RANK and WORLD_SIZE count nodes, as in DLC
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import BackendError, SpecError
from phalanx.jobs.spec.command import python_command
from phalanx.jobs.spec.training_job import TrainingJob

PORT = 29400
"""First port of an attempt where each has addresses of its own."""

PORTS = 40
"""How many ports from the first on an attempt may take on a host."""

_FLAGS = {
    "-u": ("PYTHONUNBUFFERED", "1"),
    "-O": ("PYTHONOPTIMIZE", "1"),
    "-OO": ("PYTHONOPTIMIZE", "2"),
    "-B": ("PYTHONDONTWRITEBYTECODE", "1"),
}
"""Flags of Python that have an environment variable, which launchers pass to every process."""

_LAUNCHERS = ("torchrun", "fleetrun", "phalanx", "accelerate", "deepspeed", "mpirun", "srun")


@dataclass(frozen=True)
class Rendezvous:
    """Which node this is, and where all of them are.

    `hosts` are addresses or names by node; hosts beyond the nodes of the spec run parameter servers only.
    From `port` on `PORTS` ports are this attempt's on every host.
    """

    node: int
    hosts: tuple[str, ...]
    port: int = PORT


@dataclass(frozen=True)
class LaunchCommand:
    """What to start, with which variables beside those of the job."""

    argv: tuple[str, ...]
    variables: dict[str, str]


def loopback_hosts(job: str, attempt: int, count: int) -> tuple[str, ...]:
    """Return addresses of this machine that no other attempt has: a piece of loopback's network.

    Args:
        job: The job's id.
        attempt: Number of the attempt.
        count: How many addresses, 254 at most.
    """
    first, second = hashlib.sha256(f"{job}/{attempt}".encode()).digest()[:2]
    # 127.0 is left to everybody else.
    return tuple(f"127.{first or 1}.{second}.{node + 1}" for node in range(count))


def distinct_hosts(hosts: tuple[str, ...], job: str, attempt: int) -> tuple[str, ...]:
    """Return addresses of nodes that differ: those of `hosts`, or where all are one machine, of loopback's network.

    Args:
        hosts: Addresses by node, as their names resolve.
        job: The job's id.
        attempt: Number of the attempt.

    Raises:
        BackendError: If some nodes share an address and others do not, so that no launcher could tell them apart.
    """
    if len(set(hosts)) == len(hosts):
        return hosts
    if len(set(hosts)) == 1:
        return loopback_hosts(job, attempt, len(hosts))
    shared = next(host for host in hosts if hosts.count(host) > 1)
    nodes = " and ".join(str(node) for node, host in enumerate(hosts) if host == shared)
    raise BackendError(
        f"nodes {nodes} have one address, {shared}, and others have another. Give each node an address of its own "
        "(Slurm: NodeAddr), or ask for fewer nodes with more procs_per_node."
    )


def program(command: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return `command` as a launcher takes it, with what Python's flags in it come to as variables.

    Raises:
        SpecError: If it starts no Python program, a launcher of its own, or has flags that cannot be handed on.
    """
    python = python_command(command)
    if python is None:
        first = command.split()[0].rpartition("/")[2]
        starts = f"{first}, and the job starts a launcher itself" if first in _LAUNCHERS else "no Python program"
        raise SpecError(
            f"command '{command}' starts {starts}. Write `python train.py ...` or `python -m module ...`, or set "
            "`launch: env` to run the command unchanged, once per node."
        )
    if unknown := [flag for flag in python.flags if flag not in _FLAGS]:
        raise SpecError(
            f"command '{command}' gives Python {' '.join(unknown)}, which launchers cannot hand on; they know "
            f"{', '.join(_FLAGS)}. Set its variable in `env`, or set `launch: env`."
        )
    words = ("-m", python.module) if python.module else (python.script,)
    return tuple(word for word in (*words, *python.arguments) if word), dict(_FLAGS[flag] for flag in python.flags)


def check(spec: TrainingJob) -> None:
    """Raise SpecError if no node could start `spec`: its command, too many servers, or too few GPUs."""
    if spec.launch != "env":
        program(spec.command)
    needed = 1 + (spec.servers.count + spec.resources.procs_per_node if spec.servers else 0)
    if needed > PORTS:
        raise SpecError(
            f"{needed - 1} servers and workers of a node need a port each, and a job has {PORTS - 1}. "
            "Use fewer servers, or fewer processes on each of more nodes."
        )
    procs, gpus = spec.resources.procs_per_node, spec.resources.gpu
    if spec.launch == "phalanx" and 0 < gpus < procs:
        raise SpecError(
            f"resources.procs_per_node: {procs} processes of a node need a GPU each, and resources.gpu is {gpus}. "
            "Make them equal, or leave gpu out to train on the CPU."
        )


def build_command(
    spec: TrainingJob, rendezvous: Rendezvous, *, python: str, logs: Path, log_files: bool = True
) -> LaunchCommand:
    """Return what node `rendezvous.node` starts.

    Args:
        spec: The job.
        rendezvous: Which node this is.
        python: The interpreter.
        logs: Folder of this node's logs.
        log_files: Whether each rank below torchrun writes a file of its own there; else all goes where torchrun's goes.

    Raises:
        SpecError: As `check`.
    """
    check(spec)
    if spec.launch == "env":
        return _env(spec, rendezvous)
    words, variables = program(spec.command)
    if spec.launch == "torchrun":
        # Each rank writes a log of its own, as those of `phalanx run` do.
        rank = ("--no-python", python, "-m", "phalanx.jobs.node.rank", str(logs), python) if log_files else ()
        command = _torchrun(spec, rendezvous, (*rank, *words), python)
    else:
        command = _phalanx(spec, rendezvous, words, python, str(logs))
    return LaunchCommand(command.argv, {"PYTHONUNBUFFERED": "1", **variables, **_threads(spec), **command.variables})


def _threads(spec: TrainingJob) -> dict[str, str]:
    """Each process's share of the cores asked for; without a number the launcher counts those of the machine."""
    if spec.resources.cpu is None or "OMP_NUM_THREADS" in spec.env:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(spec.resources.cpu) // spec.resources.procs_per_node))}


def _env(spec: TrainingJob, rendezvous: Rendezvous) -> LaunchCommand:
    variables = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": rendezvous.hosts[0],
        "MASTER_PORT": str(rendezvous.port),
        "RANK": str(rendezvous.node),
        "WORLD_SIZE": str(len(rendezvous.hosts)),
    }
    return LaunchCommand(tuple(shlex.split(spec.command)), variables | _threads(spec))


def _torchrun(spec: TrainingJob, rendezvous: Rendezvous, words: tuple[str, ...], python: str) -> LaunchCommand:
    multi_node = (
        f"--nnodes={len(rendezvous.hosts)}",
        f"--node-rank={rendezvous.node}",
        f"--master-addr={rendezvous.hosts[0]}",
        f"--master-port={rendezvous.port}",
    )
    argv = (
        *(python, "-m", "torch.distributed.run"),
        *(multi_node if len(rendezvous.hosts) > 1 else ("--standalone",)),
        f"--nproc-per-node={spec.resources.procs_per_node}",
        *words,
    )
    return LaunchCommand(argv, {})


def _phalanx(
    spec: TrainingJob, rendezvous: Rendezvous, words: tuple[str, ...], python: str, logs: str
) -> LaunchCommand:
    roles = _servers(spec, rendezvous) if spec.servers else _workers(spec, rendezvous)
    argv = (python, "-m", "phalanx.launch", "--log-dir", logs, *roles, *words)
    # Time to save, before the node itself kills what is left.
    return LaunchCommand(argv, {"PHALANX_STOP_GRACE_S": str(max(1, int(spec.grace)))})


def _workers(spec: TrainingJob, rendezvous: Rendezvous) -> tuple[str, ...]:
    resources = spec.resources
    count = ("-n", _range(resources.least_procs_per_node, resources.procs_per_node))
    if len(rendezvous.hosts) == 1:
        return ("--nnodes", "1", *count)
    rendezvous_flags = (
        "--ips",
        ",".join(rendezvous.hosts),
        "--node-rank",
        str(rendezvous.node),
        "--http-port",
        str(rendezvous.port),
    )
    if resources.least_nodes is None:
        return (*count, *rendezvous_flags)
    # A scheduler may have given fewer than the most.
    nodes = len(rendezvous.hosts)
    return (*count, "--nnodes", _range(min(resources.least_nodes, nodes), nodes), *rendezvous_flags)


def _range(least: int | None, most: int) -> str:
    return str(most) if least is None else f"{least}:{most}"


def _servers(spec: TrainingJob, rendezvous: Rendezvous) -> tuple[str, ...]:
    """Parameter servers beside the workers, or on the hosts that come after the workers'."""
    assert spec.servers is not None
    nodes, procs = spec.resources.nodes, spec.resources.procs_per_node
    # Beside servers, workers get GPUs only if asked for; the backend decides which ones a node has.
    gpus = ("--gpus", "all") if spec.resources.gpu and rendezvous.node < nodes else ()
    if len(rendezvous.hosts) == 1:
        return ("--server-num", str(spec.servers.count), "--worker-num", str(procs), *gpus)
    server_hosts = rendezvous.hosts[nodes:] or rendezvous.hosts
    port = rendezvous.port + 1
    servers = [f"{server_hosts[number % len(server_hosts)]}:{port + number}" for number in range(spec.servers.count)]
    port += spec.servers.count
    workers = [f"{host}:{port + local}" for host in rendezvous.hosts[:nodes] for local in range(procs)]
    # The launcher counts hosts as its lists name them, servers first.
    order = list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in (*servers, *workers)))
    rank = order.index(rendezvous.hosts[rendezvous.node])
    return (
        *("--servers", ",".join(servers), "--workers", ",".join(workers)),
        *("--node-rank", str(rank), "--http-port", str(rendezvous.port), *gpus),
    )

"""`read_allocation`: the nodes that a scheduler allocated, from its variables: Slurm, Kubeflow, node counts (pure).

These variables speak of machines, not of processes, so only a launcher reads them; `Role` never does. Where several
schedulers speak they must agree. Levels: docs/design/roles.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.cluster.env.environment import Environment, expand_hosts
from phalanx.cluster.role.mpi_srun_role import FIRST_SPECIAL_STEP, derived_port
from phalanx.errors import LaunchError, did_you_mean

Counts = Literal["nodes", "processes"]
COUNTS: tuple[Counts, ...] = ("nodes", "processes")
"""What RANK and WORLD_SIZE in a launcher's own environment may count."""

COUNTS_VARIABLE = "PHALANX_WORLD_SIZE_COUNTS"

Fact = Literal["node_count", "node_rank", "master_addr", "master_port", "procs_per_node"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The machines a job was given, as one of them sees it. None or empty where nothing was said."""

    node_count: int = 1
    node_rank: int | None = None
    master_addr: str = ""
    """Name or address of the first node."""

    master_port: int | None = None
    procs_per_node: int | None = None
    host_names: tuple[str, ...] = ()
    """Every node in order, where the scheduler lists them."""

    origins: Mapping[Fact, str] = field(default_factory=dict)
    """Which variable said each of these facts."""

    in_batch_script: bool = False
    """Whether this may be the batch script itself, which Slurm runs on the first node only."""


@dataclass(slots=True)
class _Collector:
    """Facts as they are said, each held against what was said before."""

    values: dict[Fact, int | str] = field(default_factory=dict)
    origins: dict[Fact, str] = field(default_factory=dict)

    def say(self, fact: Fact, variable: str, value: int | str | None) -> None:
        """Take one fact; None says nothing.

        Raises:
            LaunchError: If another variable said otherwise.
        """
        if value is None:
            return
        if fact in self.values and self.values[fact] != value:
            raise LaunchError(
                f"{self.origins[fact]}={self.values[fact]} and {variable}={value} disagree about the machines of this "
                "job. Unset the one that does not belong to it, or give --nnodes, --node-rank and --master-addr."
            )
        self.default(fact, variable, value)

    def default(self, fact: Fact, variable: str, value: int | str) -> None:
        """Take one fact unless something said it already."""
        if fact not in self.values:
            self.values[fact], self.origins[fact] = value, variable

    def integer(self, fact: Fact) -> int | None:
        """Return a number that was said, or None."""
        value = self.values.get(fact)
        return None if value is None else int(value)


def read_allocation(variables: Mapping[str, str], counts: Counts | None = None) -> Allocation:
    """Return the machines that `variables` describe; one node when they describe none.

    Inside a rank of a running job there is nothing to read: the machines are that job's.

    Args:
        variables: Environment of the launcher.
        counts: What RANK and WORLD_SIZE count, where the user said; PHALANX_WORLD_SIZE_COUNTS when None.

    Raises:
        LaunchError: If variables disagree, or it is open whether WORLD_SIZE counts nodes or processes.
        RoleError: If a number or a host list is malformed.
    """
    env = Environment(variables)
    if env.text("PHALANX_RANK") or env.text("TORCHELASTIC_RUN_ID"):
        return Allocation()
    facts = _Collector()
    _kubeflow(env, facts)
    _outer_ranks(env, facts, counts or _counts(env))
    hosts = _slurm(env, facts)
    if (facts.integer("node_count") or 1) > 1:
        _master(env, facts, hosts)
    return Allocation(
        node_count=facts.integer("node_count") or 1,
        node_rank=facts.integer("node_rank"),
        master_addr=str(facts.values.get("master_addr", "")),
        master_port=facts.integer("master_port"),
        procs_per_node=facts.integer("procs_per_node"),
        host_names=hosts,
        origins=facts.origins,
        in_batch_script=facts.origins.get("node_rank") == "SLURM_NODEID" and _step(env) is None,
    )


def _kubeflow(env: Environment, facts: _Collector) -> None:
    """A pod of a TrainJob; torchrun reads the same names."""
    elastic = env.text("PET_NNODES") or ""
    if ":" in elastic:
        raise LaunchError(
            f"PET_NNODES={elastic} is a range, and the number of hosts of a job is fixed here. Set one number."
        )
    facts.say("node_count", "PET_NNODES", env.integer("PET_NNODES", minimum=1))
    facts.say("node_rank", "PET_NODE_RANK", env.integer("PET_NODE_RANK"))
    if env.text("PET_NPROC_PER_NODE") not in ("auto", "gpu"):
        facts.say("procs_per_node", "PET_NPROC_PER_NODE", env.integer("PET_NPROC_PER_NODE", minimum=1))
    if env.text("PET_MASTER_PORT"):
        facts.say("master_port", "PET_MASTER_PORT", env.port("PET_MASTER_PORT", "PET_NNODES"))
    facts.say("master_addr", "PET_MASTER_ADDR", env.text("PET_MASTER_ADDR"))


def _counts(env: Environment) -> Counts | None:
    text = env.text(COUNTS_VARIABLE)
    if text is None:
        return None
    for choice in COUNTS:
        if text == choice:
            return choice
    raise LaunchError(
        f"{COUNTS_VARIABLE} must be nodes or processes, found {text!r}.{did_you_mean(text, COUNTS)} Correct it."
    )


def _outer_ranks(env: Environment, facts: _Collector, counts: Counts | None) -> None:
    """RANK and WORLD_SIZE of a pod (DLC, PyTorchJob): nodes where the user says so, never by a guess."""
    if counts == "processes":
        return
    size, rank = env.integer("WORLD_SIZE", minimum=1), env.integer("RANK")
    if counts == "nodes":
        if size is None or rank is None:
            missing = "WORLD_SIZE" if size is None else "RANK"
            raise LaunchError(
                f"WORLD_SIZE and RANK count nodes here (--world-size-counts), but {missing} is not set. Set it, or "
                "give --nnodes."
            )
        facts.say("node_count", "WORLD_SIZE", size)
        facts.say("node_rank", "RANK", rank)
    elif size is not None and size > 1 and rank is not None and "node_count" not in facts.values:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={size} are set where the launcher itself starts, and may count nodes or "
            "processes. If they count nodes (DLC, PyTorchJob), add --world-size-counts nodes; if they are left over "
            "from another job, add --world-size-counts processes, and they are ignored."
        )


def _slurm(env: Environment, facts: _Collector) -> tuple[str, ...]:
    """Nodes of the `srun` step that started one launcher each, else of the allocation; returns their names."""
    if env.text("SLURM_JOB_ID") is None and env.text("SLURM_JOB_NODELIST") is None:
        return ()
    step = _step(env)
    if step is None:
        count_name, list_name = "SLURM_NNODES", "SLURM_JOB_NODELIST"
    else:
        count_name = "SLURM_STEP_NUM_NODES"
        list_name = "SLURM_STEP_NODELIST" if env.text("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        _check_one_launcher_per_node(env)
    listed = env.text(list_name)
    count = env.integer(count_name, minimum=1)
    hosts = tuple(expand_hosts(listed)) if listed and count != 1 else ()
    if count is None:
        count = len(hosts) or 1
    elif hosts and len(hosts) != count:
        raise LaunchError(
            f"{count_name}={count}, but {list_name}={listed} names {len(hosts)} hosts. Start with srun, or give "
            "--nnodes, --node-rank and --master-addr."
        )
    facts.say("node_count", count_name if env.text(count_name) else list_name, count)
    if count > 1:
        facts.say("node_rank", "SLURM_NODEID", env.integer("SLURM_NODEID"))
    return hosts


def _step(env: Environment) -> int | None:
    """The number of the `srun` step this process is a task of, or None in a batch script or a shell."""
    step = env.integer("SLURM_STEP_ID")
    return None if step is None or step >= FIRST_SPECIAL_STEP else step


def _check_one_launcher_per_node(env: Environment) -> None:
    nodes = env.integer("SLURM_STEP_NUM_NODES", minimum=1) or 1
    name = "SLURM_STEP_NUM_TASKS" if env.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    tasks = env.integer(name, minimum=1) or nodes
    if tasks != nodes:
        raise LaunchError(
            f"srun started {tasks} launchers on {nodes} node(s) ({name}={tasks}, SLURM_STEP_NUM_NODES={nodes}), but "
            f"one per node starts all ranks there. Write: srun --ntasks-per-node=1 phalanx run -n "
            f"{max(1, tasks // nodes)} ..., or run the script itself under srun, without a launcher."
        )


def _master(env: Environment, facts: _Collector, hosts: tuple[str, ...]) -> None:
    """Where several nodes meet: what was said, else Slurm's first host and a port made from the job's id."""
    facts.say("master_addr", "MASTER_ADDR", env.text("MASTER_ADDR"))
    if env.text("MASTER_PORT"):
        facts.say("master_port", "MASTER_PORT", env.port("MASTER_PORT", "MASTER_ADDR"))
    if hosts:
        in_step = _step(env) is not None and env.text("SLURM_STEP_NODELIST")
        facts.default("master_addr", "SLURM_STEP_NODELIST" if in_step else "SLURM_JOB_NODELIST", hosts[0])
    if job := env.text("SLURM_JOB_ID"):
        step = _step(env)
        facts.default("master_port", "SLURM_JOB_ID", derived_port(job if step is None else f"{job}.{step}"))

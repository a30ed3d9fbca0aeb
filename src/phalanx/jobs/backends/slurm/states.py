"""`SinfoRow`: parse Slurm's job states, pending reasons and sinfo node lists (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.cluster.env.environment import expand_hosts
from phalanx.errors import SpecError, did_you_mean
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.training_job import TrainingJob

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""States of a job that has no nodes."""

ALIVE = ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
"""States of a job that has nodes."""

FAILURES: dict[str, tuple[Cause, str]] = {
    "NODE_FAIL": (Cause.NODE_FAILURE, "a node failed"),
    "BOOT_FAIL": (Cause.NODE_FAILURE, "a node did not start"),
    "PREEMPTED": (Cause.PREEMPTED, "a job of higher priority took the nodes"),
    "CANCELLED": (Cause.PREEMPTED, "cancelled by somebody, and not by us"),
    "REVOKED": (Cause.PREEMPTED, "taken back"),
    "TIMEOUT": (Cause.TIMEOUT, "its time ran out"),
    "DEADLINE": (Cause.TIMEOUT, "its deadline passed"),
    "OUT_OF_MEMORY": (Cause.OOM, "it used more memory than it had asked for"),
}
"""Final states that tell more than exit records."""

_WAITS = {
    "None": "not looked at yet",
    "Resources": "waits until enough nodes are free",
    "Priority": "other jobs are before it",
    "BeginTime": "its time to begin has not come",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that can never end as it should; cancel it",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; `scontrol release` lets it go",
    "JobLaunchFailure": "could not be started; an administrator must look",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "asks for more nodes than its partition allows",
    "PartitionTimeLimit": "asks for more time than its partition allows",
    "Prolog": "its nodes are being set up",
    "Reservation": "waits for its reservation",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
}
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class SinfoRow:
    """A node in a partition, as sinfo shows it."""

    partition: str
    is_default: bool
    name: str
    cpus: int
    memory_mib: int
    gpus: int


def why_waiting(reason: str) -> str:
    """Return why a job waits, in words and in Slurm's own."""
    name = _SPACES.split(reason.strip("() ").replace(", ", " "))[0].rstrip(",")
    if text := _WAITS.get(name):
        return f"{text} (Slurm: {reason})"
    if name.startswith(("QOS", "Assoc", "Max")):
        return f"a limit of its user, account or QOS is reached (Slurm: {reason})"
    return f"waits (Slurm: {reason})"


def hosts(listed: str) -> list[str]:
    """Return the nodes of a compact list, none for a job that has none yet."""
    return expand_hosts(listed) if listed and not listed.startswith("(") else []


def read_nodes(listing: str) -> list[SinfoRow]:
    """Return what sinfo lists as `partition|node|cpus|MiB|gres|limit`."""
    rows = []
    for line in listing.splitlines():
        partition, name, cpus, memory, gres, _ = line.strip().split("|")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        rows.append(SinfoRow(partition.rstrip("*"), partition.endswith("*"), name, int(cpus), int(memory), gpus))
    return rows


def needs(spec: TrainingJob) -> tuple[float | None, int | None]:
    """Return the cores and bytes that each node needs: its workers', and those of the servers that are dealt to it."""
    cpu, memory = spec.resources.cpu, spec.resources.memory
    if spec.servers is None:
        return cpu, memory
    each = -(-spec.servers.count // spec.resources.nodes)
    more_cpu, more_memory = each * (spec.servers.cpu or 0), each * (spec.servers.memory or 0)
    return None if cpu is None else cpu + more_cpu, None if memory is None else memory + more_memory


def check_said(spec: TrainingJob) -> None:
    """Raise SpecError for what means nothing to Slurm."""
    default = TrainingJob.model_fields
    if spec.queue != default["queue"].default:
        raise SpecError(f"queue {spec.queue} means nothing on Slurm. Say slurm.partition, or leave queue out.")
    if spec.priority != default["priority"].default:
        raise SpecError(
            f"priority {spec.priority} means nothing on Slurm. Say slurm.qos, or --nice in slurm.options, or leave "
            "priority out."
        )


def check_fits(spec: TrainingJob, rows: list[SinfoRow]) -> None:
    """Raise SpecError if the partition of `spec` does not exist, or has too few nodes that are large enough."""
    partition = spec.slurm.partition
    names = sorted({row.partition for row in rows})
    if partition is not None and partition not in names:
        raise SpecError(
            f"slurm.partition '{partition}' does not exist; there are {', '.join(names)}."
            f"{did_you_mean(partition, names)} Correct it, or leave it out for the default one."
        )
    inside = [row for row in rows if (row.partition == partition if partition else row.is_default)]
    if not inside:
        raise SpecError(f"Slurm has no default partition. Set slurm.partition to one of {', '.join(names)}.")
    resources = spec.resources
    cpu, memory = needs(spec)
    memory_mib = 0 if memory is None else memory / 2**20
    large = [
        row for row in inside if row.cpus >= (cpu or 0) and row.memory_mib >= memory_mib and row.gpus >= resources.gpu
    ]
    least = resources.least_nodes or resources.nodes
    if len(large) >= least:
        return
    best, name = max(inside, key=lambda row: (row.gpus, row.cpus, row.memory_mib)), inside[0].partition
    raise SpecError(
        f"resources ask for {least} nodes with {_amounts(cpu, memory_mib, resources.gpu)} each, but "
        f"partition '{name}' has {len(inside)} nodes, {len(large)} of them large enough; {best.name} has "
        f"{_amounts(best.cpus, best.memory_mib, best.gpus)}. Ask for less, or choose another partition."
    )


def _amounts(cpu: float | None, memory_mib: float, gpus: int) -> str:
    parts = [f"{cpu:g} cpu"] if cpu else []
    parts += [f"{memory_mib / 1024:.3g}Gi memory"] if memory_mib else []
    parts += [f"{gpus} gpu"] if gpus else []
    return ", ".join(parts) or "anything"

"""`TrainingJob`: the job spec, schema of job files, flags and requests (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from phalanx.jobs.backend_registry import BackendName
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.addresses import (
    kept_path,
)
from phalanx.jobs.spec.backend_options import Kubernetes, Slurm
from phalanx.jobs.spec.code_and_data import Code, Dataset, find_wrong_datasets
from phalanx.jobs.spec.command import parse_command
from phalanx.jobs.spec.fields import Bytes, Cores, Count, Name, Seconds, SpecModel, Text, Variable
from phalanx.jobs.spec.quantities import split_ranges

DEFAULT_WORKSPACE = "default"
RESERVED_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_CHECKPOINT_DIR")
)
"""Variables that every launch sets itself, besides `PHALANX_DATASET_*`; a job's `env` must leave them alone."""


class Resources(SpecModel):
    """What one job needs. `cpu`, `memory` and `gpu` are for each node."""

    nodes: Count = Field(default=1, ge=1, le=10_000)
    """How many machines; a range as 1:4 for an elastic job."""
    least_nodes: int | None = Field(default=None, ge=1)
    """The smaller number of a range of machines; filled from it."""
    procs_per_node: Count = Field(default=1, ge=1, le=1000)
    """Ranks on each; a range as 1:4 for an elastic job."""
    least_procs_per_node: int | None = Field(default=None, ge=1)
    """The smaller number of a range of ranks; filled from it."""
    cpu: Cores | None = None
    """Cores; fractions are allowed."""
    memory: Bytes | None = None
    """As 8Gi or 500M."""
    gpu: int = Field(default=0, ge=0, le=1000)
    """Accelerators."""

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, value: Any) -> Any:
        return split_ranges(value, ("nodes", "procs_per_node")) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        for name in ("nodes", "procs_per_node"):
            least, most = getattr(self, f"least_{name}"), getattr(self, name)
            if least is not None and least > most:
                raise ValueError(f"{name} {least}:{most} ends before it starts; write {most}:{least}")
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change while the job runs."""
        return self.least_nodes is not None or self.least_procs_per_node is not None


class ServerRole(SpecModel):
    """Parameter servers with resources of their own; the job's `resources` are then its workers'."""

    count: int = Field(default=1, ge=1, le=1000)
    """How many servers."""
    cpu: Cores | None = None
    """Cores of each server."""
    memory: Bytes | None = None
    """Memory of each server, as 8Gi."""


class Retries(SpecModel):
    """What is tried again. `max` counts every attempt after the first, whatever ended the one before."""

    max: int = Field(default=0, ge=0, le=1_000_000)
    """How many attempts may follow the first."""
    on: tuple[Cause, ...] = (Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.HANG)
    """The causes of failure after which another attempt is made."""
    hang_after: Seconds | None = None
    """Silence of every rank, no log and no run event, after which an attempt counts as hung. None: never."""


class Checkpoint(SpecModel):
    """The folder that survives attempts; the script reads it from PHALANX_CHECKPOINT_DIR."""

    dir: Annotated[str, AfterValidator(kept_path)] | None = None
    """An absolute path, as to resume another job, or one in the job's own folder. Default: one of the job's own."""


class TrainingJob(SpecModel):
    """A job. Unknown fields are refused; `phalanx job submit job.yaml` reads one from a file."""

    kind: Literal["TrainingJob"] = "TrainingJob"
    name: Name
    """Small letters, digits and dashes, 40 at most; the id of a job begins with it."""
    workspace: Name = DEFAULT_WORKSPACE
    """The workspace that the job and what it names belong to."""
    command: Annotated[str, AfterValidator(parse_command)]
    """What starts the training, as typed in the code's folder: `python train.py --epochs 10`."""
    code: Code = Code(path=".")
    datasets: Annotated[tuple[Dataset, ...], Field(max_length=100)] = ()
    """Datasets by name (`mnist`, `mnist:data`), or in full."""
    env: Annotated[dict[Variable, Text], Field(max_length=1000)] = {}
    """Environment variables of the ranks."""
    secrets: Annotated[tuple[Variable, ...], Field(max_length=100)] = ()
    """Names of the workspace's secrets, which the ranks find as environment variables."""
    resources: Resources = Resources()
    servers: ServerRole | None = None
    launch: Literal["phalanx", "torchrun", "env"] = "phalanx"
    """phalanx, torchrun: a launcher on every node starts the ranks, WORLD_SIZE counts processes.
    env: one process a node, started as it is, WORLD_SIZE and RANK count nodes."""
    backend: BackendName = "local"
    """What runs the job: this machine, Slurm or Kubernetes."""
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    queue: Name = "default"
    """Queue of this machine, or of Kueue; Slurm's is slurm.partition."""
    priority: int = Field(default=5, ge=1, le=9)
    """This machine: from 1 to 9; higher ones start first."""
    max_runtime: Seconds | None = None
    """Time after which the job is ended, as 2h or 1h30m."""
    grace: Seconds = 30.0
    """Time between SIGTERM and SIGKILL, in which a script saves its checkpoint."""
    retries: Retries = Retries()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = [*_wrong_variables(self), *find_wrong_datasets(self.datasets)]
        if self.servers is not None and self.launch != "phalanx":
            wrong.append(f"servers are started by launch phalanx, not {self.launch}; leave one of them out")
        if self.resources.is_elastic and (self.launch != "phalanx" or self.servers is not None):
            what = "servers" if self.launch == "phalanx" else f"launch {self.launch}"
            wrong.append(f"a range of nodes or procs_per_node needs launch phalanx without servers; found {what}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


def secrets_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the secrets that a job needs, of its ranks, its code and its datasets; `spec` is its JSON."""
    others = (spec["code"]["secret"], *(dataset["secret"] for dataset in spec["datasets"]))
    return tuple(dict.fromkeys((*spec["secrets"], *(name for name in others if name))))


def _wrong_variables(job: TrainingJob) -> list[str]:
    taken = [
        name for name in (*job.env, *job.secrets) if name in RESERVED_VARIABLES or name.startswith("PHALANX_DATASET_")
    ]
    twice = [name for name in job.secrets if name in job.env]
    return [f"{name} is set by the launch; leave it out" for name in taken] + [
        f"{name} is in env and in secrets; leave one out" for name in twice
    ]

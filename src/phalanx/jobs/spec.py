"""What a job is: the one model behind the YAML file, the command line's flags and the body of a request. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phalanx.jobs.quantities import to_bytes, to_seconds
from phalanx.jobs.states import Cause

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""A name that Kubernetes, Slurm, a folder and an address all take: small letters, digits and dashes, 40 at most."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Bytes = Annotated[int, BeforeValidator(to_bytes)]
Seconds = Annotated[float, BeforeValidator(to_seconds)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Code(_Model):
    """Where the code comes from: a git repository at a ref, a path, or a code configuration of the workspace by name.

    Exactly one of `git`, `path` and `name` is given. `commit` is filled at submission for git, `digest` for a path.
    """

    git: str | None = None
    ref: str = "HEAD"
    commit: str | None = None
    path: str | None = None
    digest: str | None = None
    name: Name | None = None
    subdir: str = "."
    secret: Variable | None = None
    """Secret whose value is the token or password for the repository."""


class Dataset(_Model):
    """A dataset in a job: a dataset configuration by name, or said in full, and where the script finds it.

    `kind` and `uri` are filled from the configuration at submission. A relative `mount` lies in the working copy.
    """

    name: Name
    mount: str | None = None
    readonly: bool = True
    kind: Literal["local", "nas", "s3", "oss", "http"] | None = None
    uri: str | None = None
    file_system: str | None = None
    """NAS: id of the file system."""
    sha256: str | None = None
    """http: what the file must hash to."""
    secret: Variable | None = None
    endpoint: str | None = None
    """s3, oss: address of the service, where it is not the default one."""


class Resources(_Model):
    """What one job needs. `cpu`, `memory` and `gpu` are for each node."""

    nodes: int = Field(default=1, ge=1)
    procs_per_node: int = Field(default=1, ge=1)
    cpu: float | None = Field(default=None, gt=0)
    memory: Bytes | None = None
    gpu: int = Field(default=0, ge=0)


class ServerRole(_Model):
    """Parameter servers with resources of their own; the job's `resources` are then its workers'."""

    count: int = Field(default=1, ge=1)
    cpu: float | None = Field(default=None, gt=0)
    memory: Bytes | None = None


class Retries(_Model):
    """What is tried again. `max` counts every attempt after the first, whatever ended the one before."""

    max: int = Field(default=0, ge=0)
    on: tuple[Cause, ...] = (Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.HANG)
    hang_after: Seconds | None = None
    """Silence of every rank, no log and no run event, after which an attempt counts as hung. None: never."""


class Checkpoint(_Model):
    """The folder that survives attempts; the script reads it from PHALANX_CHECKPOINT_DIR. Default: one of the job's."""

    dir: str | None = None


class Kubernetes(_Model):
    """What only Kubernetes needs to know."""

    dialect: Literal["trainjob", "pytorchjob", "jobset"] = "trainjob"
    namespace: str = "default"
    image: str | None = None
    queue: str | None = None
    """Kueue: the local queue."""
    runtime: str = "torch-distributed"
    """TrainJob: the cluster training runtime to build on."""


class Slurm(_Model):
    """What only Slurm needs to know."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    """More `#SBATCH` options, as `--constraint=a100`."""


class TrainingJob(_Model):
    """A job. Unknown fields are refused; `phalanx job submit job.yaml` reads one from a file."""

    kind: Literal["TrainingJob"] = "TrainingJob"
    name: Name
    workspace: Name = "default"
    command: str = Field(min_length=1)
    """What starts the training, as typed in the code's folder: `python train.py --epochs 10`."""
    code: Code = Code(path=".")
    datasets: tuple[Dataset, ...] = ()
    env: dict[Variable, str] = {}
    secrets: tuple[Variable, ...] = ()
    """Names of the workspace's secrets, which the ranks find as environment variables."""
    resources: Resources = Resources()
    servers: ServerRole | None = None
    launch: Literal["phalanx", "torchrun", "env"] = "phalanx"
    """phalanx, torchrun: a launcher on every node starts the ranks, WORLD_SIZE counts processes.
    env: one process a node, started as it is, WORLD_SIZE and RANK count nodes."""
    backend: Literal["local", "slurm", "kubernetes"] = "local"
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    queue: Name = "default"
    priority: int = Field(default=5, ge=1, le=9)
    max_runtime: Seconds | None = None
    grace: Seconds = 30.0
    """Time between SIGTERM and SIGKILL, in which a script saves its checkpoint."""
    retries: Retries = Retries()
    checkpoint: Checkpoint = Checkpoint()

"""`TrainingJob`: the job spec, schema of job files, flags and requests (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

from phalanx.jobs.backend_registry import BackendName
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.addresses import (
    bucket_and_key,
    folder_path,
    git_address,
    git_ref,
    inner_path,
    kept_path,
    kind_of,
    mount_path,
    web_address,
)
from phalanx.jobs.spec.command import parse_command
from phalanx.jobs.spec.quantities import split_ranges, to_bytes, to_seconds

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""A name that Kubernetes, Slurm, a folder and an address all take: small letters, digits and dashes, 40 at most."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line: what becomes one of a script, or a value in a manifest."""

Source = Annotated[str, Field(pattern=r"^(secret|configmap)/[a-z0-9][a-z0-9.-]*$")]
"""Where pods take environment variables from."""

Cores = Annotated[float, Field(gt=0, le=100_000)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, WithJsonSchema({"type": ["integer", "string"], "examples": [2, "1:4"]})]
Bytes = Annotated[
    int, BeforeValidator(to_bytes), WithJsonSchema({"type": ["string", "integer"], "examples": ["8Gi", "500M"]})
]
Seconds = Annotated[
    float, BeforeValidator(to_seconds), WithJsonSchema({"type": ["string", "number"], "examples": ["90s", "1h30m"]})
]

DEFAULT_WORKSPACE = "default"

RESERVED_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_CHECKPOINT_DIR")
)
"""Variables that every launch sets itself, besides `PHALANX_DATASET_*`; a job's `env` must leave them alone."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Code(_Model):
    """Where the code comes from: a git repository at a ref, a path, or a code configuration of the workspace by name.

    Exactly one of `git`, `path` and `name` is given. `commit` is filled at submission for git, `digest` for a path; a
    digest alone is a tree that was sent to the server.
    """

    git: Annotated[str, AfterValidator(git_address)] | None = None
    """Address of a repository: https://, http://, ssh://, user@host:path, or a path of a repository here."""
    ref: Annotated[str, AfterValidator(git_ref)] = "HEAD"
    """Branch, tag or commit."""
    commit: Commit | None = None
    """git: the commit that `ref` was at submission."""
    path: Annotated[str, AfterValidator(folder_path)] | None = None
    """A folder on this machine, which is copied without what .phalanxignore, or else .gitignore, leaves out."""
    digest: Sha256 | None = None
    """path: the content at submission."""
    name: Name | None = None
    """Name of a code configuration of the workspace."""
    subdir: Annotated[str, AfterValidator(inner_path)] = "."
    """Folder of the code in which the command starts."""
    secret: Variable | None = None
    """Secret whose value is the token or password for the repository."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return _code_from_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("git", "path", "name") if getattr(self, name) is not None]
        if len(sources) != 1 and not (self.digest and not sources):
            raise ValueError(f"give exactly one of git, path and name; found {' and '.join(sources) or 'none'}")
        if (self.commit and not self.git) or (self.digest and (self.git or self.name)):
            raise ValueError("commit belongs to git, digest to path; leave it out, submission fills it")
        if self.secret and self.git and not self.git.startswith(("https://", "http://")):
            raise ValueError("a secret is a token for https://; ssh takes its keys from the agent, a path needs none")
        return self


class Dataset(_Model):
    """A dataset in a job: a registered dataset by name, or a full description, and where the script finds it.

    `kind` and `uri` are filled from the configuration at submission, and what can be known of the content.
    """

    name: Name
    mount: Annotated[str, AfterValidator(mount_path)] | None = None
    """Where the script reads it: a path from the folder the command starts in, or an absolute one. PHALANX_DATASET_*
    says it too."""
    readonly: bool = True
    kind: Literal["local", "nas", "s3", "oss", "http"] | None = None
    uri: str | None = None
    """local, nas: the path on the machines that train. Others: s3://, oss://, https:// or http://."""
    file_system: Word | None = None
    """NAS: id of the file system."""
    sha256: Sha256 | None = None
    """http: what the file must hash to."""
    secret: Variable | None = None
    """s3, oss: secret whose value is ACCESS_KEY_ID:ACCESS_KEY_SECRET. Without one the bucket is read as anybody."""
    endpoint: Annotated[str, AfterValidator(web_address)] | None = None
    """s3, oss: address of the service, where it is not the default one."""
    version: Word | None = None
    """What the content was at submission: an etag, a time of change."""
    size: Annotated[int, Field(ge=0)] | None = None
    """Bytes at submission."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            name, _, mount = value.partition(":")
            return {"name": name, "mount": mount or None}
        if isinstance(value, dict) and isinstance(value.get("uri"), str) and value.get("kind") is None:
            return {**value, "kind": kind_of(value["uri"])}
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind is not None and self.uri is None:
            raise ValueError(f"kind {self.kind} needs a uri: where the data is")
        if self.kind is not None and self.uri is not None:
            _check_address(self.kind, self.uri)
        for field, kinds in _ONLY_FOR.items():
            if getattr(self, field) is not None and self.kind not in (*kinds, None):
                raise ValueError(f"{field} is for {' and '.join(kinds)}, not for {self.kind}; leave it out")
        if self.kind is not None and not self.is_path and not self.readonly:
            raise ValueError(
                f"kind {self.kind} is fetched once for all jobs; it can only be read, so leave out readonly"
            )
        if self.kind == "oss" and self.endpoint is None:
            raise ValueError("oss needs an endpoint, as https://oss-REGION.aliyuncs.com")
        if self.kind == "nas" and self.file_system is None:
            raise ValueError("nas needs the id of its file_system")
        return self

    @property
    def is_path(self) -> bool:
        """Whether `uri` is a path of the machines that train, which is not fetched."""
        return self.kind in ("local", "nas")

    @property
    def variable(self) -> str:
        """Name of the environment variable in which a script finds where the dataset lies."""
        return "PHALANX_DATASET_" + self.name.replace("-", "_").upper()


_ONLY_FOR = {"file_system": ("nas",), "sha256": ("http",), "endpoint": ("s3", "oss"), "secret": ("s3", "oss")}


class Resources(_Model):
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


class ServerRole(_Model):
    """Parameter servers with resources of their own; the job's `resources` are then its workers'."""

    count: int = Field(default=1, ge=1, le=1000)
    """How many servers."""
    cpu: Cores | None = None
    """Cores of each server."""
    memory: Bytes | None = None
    """Memory of each server, as 8Gi."""


class Retries(_Model):
    """What is tried again. `max` counts every attempt after the first, whatever ended the one before."""

    max: int = Field(default=0, ge=0, le=1_000_000)
    """How many attempts may follow the first."""
    on: tuple[Cause, ...] = (Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.HANG)
    """The causes of failure after which another attempt is made."""
    hang_after: Seconds | None = None
    """Silence of every rank, no log and no run event, after which an attempt counts as hung. None: never."""


class Checkpoint(_Model):
    """The folder that survives attempts; the script reads it from PHALANX_CHECKPOINT_DIR."""

    dir: Annotated[str, AfterValidator(kept_path)] | None = None
    """An absolute path, as to go on from another job, or one in the job's own folder. Default: one of the job's own."""


class Toleration(_Model):
    """A taint of nodes that pods may run on all the same."""

    key: Word | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: Word | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Kubernetes(_Model):
    """What only Kubernetes needs to know."""

    dialect: Literal["trainjob", "pytorchjob", "jobset"] = "trainjob"
    """Which kind of object is made."""
    trainer: Literal["2.0", "2.1", "2.2", "2.3"] = "2.3"
    """TrainJob: the release of Kubeflow Trainer in the cluster, or the newest that is older than it."""
    namespace: Word = "default"
    """Where it is made."""
    image: Word | None = None
    """Container image; phalanx must be installed in it."""
    queue: Word | None = None
    """Kueue: the local queue. Default: `queue` of the job, unless that is `default`."""
    runtime: Word = "torch-distributed"
    """TrainJob: the cluster training runtime to build on."""
    service_account: Word | None = None
    """Service account of the pods."""
    image_pull_secrets: Annotated[tuple[Word, ...], Field(max_length=100)] = ()
    """Secrets of the namespace with which the image is pulled."""
    priority_class: Word | None = None
    """Priority class of the pods."""
    node_selector: Annotated[dict[Word, Text], Field(max_length=100)] = {}
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=100)] = ()
    """Taints of nodes that pods may run on all the same."""
    env_from: Annotated[tuple[Source, ...], Field(max_length=100)] = ()
    """What pods take environment variables from, as `secret/NAME` or `configmap/NAME` of the namespace."""
    labels: Annotated[dict[Word, Text], Field(max_length=100)] = {}
    """More labels of the workload and its pods."""
    annotations: Annotated[dict[Word, Text], Field(max_length=100)] = {}
    """More annotations of the workload and its pods."""
    restricted: bool = False
    """Fit the Pod Security Standard `restricted`: no root, no more rights than a process begins with."""
    run_as_user: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Id of the user that pods run as. Default: the user of the image."""
    fs_group: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Group that owns the volumes of pods."""
    pod_patch: Annotated[dict[Word, JsonValue], Field(max_length=100)] = {}
    """More fields of a pod's template, as `spec: {hostNetwork: true}`; lists of named objects are merged by name."""
    workload_patch: Annotated[dict[Word, JsonValue], Field(max_length=100)] = {}
    """More fields of the workload, merged in the same way."""


class Slurm(_Model):
    """What only Slurm needs to know."""

    partition: Word | None = None
    """Partition to run in; the cluster has a default."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    options: Annotated[tuple[Word, ...], Field(max_length=100)] = ()
    """More `#SBATCH` options, as `--constraint=a100`."""


class TrainingJob(_Model):
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
        wrong = [*_wrong_variables(self), *_wrong_datasets(self.datasets)]
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


def _code_from_text(text: str) -> dict[str, str]:
    if not text.startswith("git+"):
        if "://" in text or text.startswith("git@"):
            raise ValueError(f"write git+{text.split('@')[0] if '://' in text else 'ssh://HOST/PATH'} for a repository")
        return {"path": text}
    address = text.removeprefix("git+")
    _, at, ref = urlsplit(address).path.partition("@")
    if not at:
        return {"git": address}
    return {"git": address[: len(address) - len(ref) - 1], "ref": ref}


def _check_address(kind: str, uri: str) -> None:
    if kind in ("s3", "oss"):
        if kind_of(uri) != kind:
            raise ValueError(f"{uri!r} is not of kind {kind}; write it as {kind}://BUCKET/FOLDER")
        bucket_and_key(uri)
    elif kind == "http":
        web_address(uri)
    elif "://" in folder_path(uri):
        raise ValueError(f"{uri!r} is no path; kind {kind} is a path that the machines see")


def _wrong_variables(job: TrainingJob) -> list[str]:
    taken = [
        name for name in (*job.env, *job.secrets) if name in RESERVED_VARIABLES or name.startswith("PHALANX_DATASET_")
    ]
    twice = [name for name in job.secrets if name in job.env]
    return [f"{name} is set by the launch; leave it out" for name in taken] + [
        f"{name} is in env and in secrets; leave one out" for name in twice
    ]


def _wrong_datasets(datasets: tuple[Dataset, ...]) -> list[str]:
    names = [d.name for d in datasets]
    wrong = [f"dataset {name} is there twice; give each a name" for name in sorted(set(names)) if names.count(name) > 1]
    mounts = [PurePosixPath(d.mount) for d in datasets if d.mount is not None]
    return wrong + [
        f"mounts {first} and {other} lie in each other; mount each dataset in a place of its own"
        for first, other in combinations(mounts, 2)
        if first.is_relative_to(other) or other.is_relative_to(first)
    ]

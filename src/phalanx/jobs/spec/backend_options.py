"""`Kubernetes`, `Slurm`: sections of a job spec that one backend alone reads (pure)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from phalanx.jobs.spec.fields import Source, SpecModel, Text, Word


class Toleration(SpecModel):
    """A taint of nodes that pods may run on all the same."""

    key: Word | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: Word | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Kubernetes(SpecModel):
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


class Slurm(SpecModel):
    """What only Slurm needs to know."""

    partition: Word | None = None
    """Partition to run in; the cluster has a default."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    options: Annotated[tuple[Word, ...], Field(max_length=100)] = ()
    """More `#SBATCH` options, as `--constraint=a100`."""

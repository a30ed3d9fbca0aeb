"""`manifests`: render the Kubernetes manifests of an attempt: TrainJob, PyTorchJob or JobSet, ConfigMap, Secret (pure).

Pods see no folder of ours: their order is a ConfigMap, secrets are a Secret, both mounted as files; code and datasets
are fetched by `phalanx.jobs.node.__main__` in each pod, and a NAS is a volume claim by its file-system id.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import SpecError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.backend import Submission
from phalanx.jobs.backends.kubernetes import options
from phalanx.jobs.backends.kubernetes.options import GRACE_S, Manifest
from phalanx.jobs.spec.quantities import as_quantity
from phalanx.jobs.spec.training_job import TrainingJob

FOLDER = "/phalanx"
"""The attempt's folder in a pod."""

_SECRETS = "/phalanx-secrets"
HIDDEN = "(hidden)"
CODE_BYTES = 900_000
"""Most bytes of packed code that go with the order; a ConfigMap holds 1 MiB."""

_POD_FAILURES = 10
"""How often the pod of each node of an elastic job may fail by itself before the job does."""

JOB_LABEL, ATTEMPT_LABEL = "phalanx.dev/job", "phalanx.dev/attempt"


@dataclass(frozen=True)
class Dialect:
    """One kind of workload: how it is addressed, and what its pods carry."""

    group: str
    version: str
    kind: str
    plural: str
    name_label: str
    """Label of pods whose value is the workload's name."""


DIALECTS = {
    "trainjob": Dialect("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "jobset.sigs.k8s.io/jobset-name"),
    "pytorchjob": Dialect("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", "training.kubeflow.org/job-name"),
    "jobset": Dialect("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "jobset.sigs.k8s.io/jobset-name"),
}


def name_of(submission: Submission) -> str:
    """Return the name of the attempt's workload, by which it is found again."""
    return f"{submission.job}-{submission.attempt}"


def check(spec: TrainingJob) -> None:
    """Raise SpecError if `spec` lacks what Kubernetes needs, or asks for what a dialect cannot."""
    launch_command.check(spec)
    settings = spec.kubernetes
    if not settings.image:
        raise SpecError(
            "backend: kubernetes runs pods, and kubernetes.image is not set. Name an image with Python, torch, git and "
            "phalanx in it."
        )
    if spec.servers and settings.dialect != "jobset":
        raise SpecError(
            f"kubernetes.dialect {settings.dialect} has no role for parameter servers. Set kubernetes.dialect to "
            "jobset, where servers are a replicated job of their own."
        )
    if spec.resources.least_nodes is not None and settings.dialect != "jobset":
        raise SpecError(
            f"kubernetes.dialect {settings.dialect} ends a job whose pod is lost, and resources.nodes is a range. Set "
            "kubernetes.dialect to jobset, where pods come back, or give one number of nodes."
        )
    options.check(spec)


def manifests(submission: Submission, *, job_secret: str, code: bytes = b"") -> list[Manifest]:
    """Return the attempt's objects in the order in which they are made: ConfigMap, Secret, workload.

    Args:
        submission: The attempt.
        job_secret: What servers and workers know each other by.
        code: The packed tree of code given as a path, empty for a git repository.
    """
    spec = submission.spec
    workload = {"trainjob": _trainjob, "pytorchjob": _pytorchjob, "jobset": _jobset}[spec.kubernetes.dialect]
    values = {**submission.secrets, "PHALANX_JOB_SECRET": job_secret}
    secret = _object(submission, "v1", "Secret", "-secrets")
    secret |= {"type": "Opaque", "stringData": {"secrets.json": json.dumps(values)}}
    body = options.merge(workload(submission, bool(code)), spec.kubernetes.workload_patch)
    return [_config_map(submission, code), secret, body]


def hidden(objects: list[Manifest]) -> list[Manifest]:
    """Return manifests that may be shown: values of secrets are hidden, packed code is left out."""
    shown = []
    for manifest in objects:
        if manifest["kind"] == "Secret":
            names = json.loads(manifest["stringData"]["secrets.json"])
            manifest = {**manifest, "stringData": {"secrets.json": json.dumps(dict.fromkeys(names, HIDDEN))}}
        if "binaryData" in manifest:
            sizes = {name: f"({len(text)} characters)" for name, text in manifest["binaryData"].items()}
            manifest = {**manifest, "binaryData": sizes}
        shown.append(manifest)
    return shown


def _object(submission: Submission, version: str, kind: str, suffix: str = "") -> Manifest:
    labels = {
        "app.kubernetes.io/managed-by": "phalanx",
        JOB_LABEL: submission.job,
        ATTEMPT_LABEL: str(submission.attempt),
    }
    settings = submission.spec.kubernetes
    metadata = {"name": name_of(submission) + suffix, "namespace": settings.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _workload(submission: Submission) -> Manifest:
    dialect = DIALECTS[submission.spec.kubernetes.dialect]
    manifest = _object(submission, f"{dialect.group}/{dialect.version}", dialect.kind)
    settings, metadata = submission.spec.kubernetes, manifest["metadata"]
    metadata["labels"] |= settings.labels
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    if queue := options.queue_of(submission.spec):
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = queue
    return manifest


def _config_map(submission: Submission, code: bytes) -> Manifest:
    attempt_spec = attempt_files.spec_json(submission, f"{FOLDER}/home", FOLDER)
    manifest = _object(submission, "v1", "ConfigMap", "-order") | {"data": {"attempt.json": json.dumps(attempt_spec)}}
    if len(code) > CODE_BYTES:
        raise SpecError(
            f"code.path packs to {len(code)} bytes, and {CODE_BYTES} can go with a job on Kubernetes. Give the code "
            "as a git repository, or leave data out of it with .phalanxignore."
        )
    return manifest | ({"binaryData": {"code.tar.gz": base64.b64encode(code).decode()}} if code else {})


def _hosts(submission: Submission) -> list[str]:
    """Names of the pods by node, servers last."""
    name, spec = name_of(submission), submission.spec
    if spec.kubernetes.dialect == "pytorchjob":
        return [f"{name}-master-0", *(f"{name}-worker-{node}" for node in range(spec.resources.nodes - 1))]
    servers = spec.servers.count if spec.servers else 0
    nodes = [f"{name}-node-0-{node}.{name}" for node in range(spec.resources.nodes)]
    return nodes + [f"{name}-server-0-{server}.{name}" for server in range(servers)]


def _command(submission: Submission, *, variable: str, first: int = 0) -> list[str]:
    return [
        *("python", "-m", "phalanx.jobs.node", FOLDER, "--pod", "--node", variable, "--first-node", str(first)),
        *("--hosts", ",".join(_hosts(submission)), "--secrets-file", f"{_SECRETS}/secrets.json"),
        *("--report", "/dev/termination-log"),
    ]


def _volumes(submission: Submission) -> list[Manifest]:
    # The secret's file may be read by any user of the pod, since images run as any; no other container mounts it.
    name = name_of(submission)
    claims = {d.file_system for d in submission.spec.datasets if d.kind == "nas" and d.file_system}
    return [
        {"name": "attempt", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "order", "configMap": {"name": f"{name}-order"}},
        {"name": "secrets", "secret": {"secretName": f"{name}-secrets", "defaultMode": 0o444}},
        *({"name": f"nas-{claim}", "persistentVolumeClaim": {"claimName": claim}} for claim in sorted(claims)),
    ]


def _mounts(submission: Submission, has_code: bool) -> list[Manifest]:
    files = ["attempt.json", *(["code.tar.gz"] if has_code else [])]
    data = {d.uri: d for d in submission.spec.datasets if d.kind == "nas"}
    return [
        {"name": "attempt", "mountPath": FOLDER},
        {"name": "shm", "mountPath": "/dev/shm"},
        *({"name": "order", "mountPath": f"{FOLDER}/{file}", "subPath": file} for file in files),
        {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
        *(
            {"name": f"nas-{d.file_system}", "mountPath": uri, "readOnly": d.readonly}
            for uri, d in sorted(data.items())
        ),
    ]


def _amounts(cpu: float | None, memory: int | None, gpu: int = 0) -> Mapping[str, Any]:
    amounts = {}
    if cpu is not None:
        amounts["cpu"] = f"{round(cpu * 1000)}m"
    if memory is not None:
        amounts["memory"] = as_quantity(memory)
    if gpu:
        amounts["nvidia.com/gpu"] = str(gpu)
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _pod(
    submission: Submission, container: str, command: list[str], has_code: bool, *, server: bool = False
) -> Manifest:
    spec = submission.spec
    resources = _amounts(spec.resources.cpu, spec.resources.memory, spec.resources.gpu)
    if server and spec.servers:
        resources = _amounts(spec.servers.cpu, spec.servers.memory)
    container_spec: Manifest = {"name": container, "image": spec.kubernetes.image, "command": command}
    container_spec |= {"resources": resources} if resources else {}
    container_spec |= {"volumeMounts": _mounts(submission, has_code), **options.container(spec)}
    metadata: Manifest = {"labels": {JOB_LABEL: submission.job, ATTEMPT_LABEL: str(submission.attempt)}}
    metadata["labels"] |= spec.kubernetes.labels
    if spec.kubernetes.annotations:
        metadata["annotations"] = dict(spec.kubernetes.annotations)
    body = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.grace) + GRACE_S,
        "containers": [container_spec],
        "volumes": _volumes(submission),
    }
    return {"metadata": metadata, "spec": body | options.pod_spec(spec)}


def _patch(submission: Submission, pod: Manifest) -> Manifest:
    return dict(options.merge(pod, submission.spec.kubernetes.pod_patch))


def _deadline(submission: Submission) -> dict[str, int]:
    """A deadline later than the nodes' own, which comes first and records the reason."""
    limit, grace = submission.spec.max_runtime, submission.spec.grace
    return {} if limit is None else {"activeDeadlineSeconds": int(limit + grace) + 60}


def _indexed_job(submission: Submission, pods: int, pod: Manifest) -> Manifest:
    pod = _patch(submission, pod)
    job = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 0, "template": pod}
    return {"spec": job | _deadline(submission)}


def _jobset(submission: Submission, has_code: bool) -> Manifest:
    spec, index = submission.spec, "JOB_COMPLETION_INDEX"
    nodes = spec.resources.nodes
    pod = _pod(submission, "node", _command(submission, variable=index), has_code)
    template = _indexed_job(submission, nodes, pod)
    if spec.resources.least_nodes is not None:
        # Pods that are evicted or preempted come back under their number, and their launcher joins the others.
        ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
        template["spec"] |= {"backoffLimit": _POD_FAILURES * nodes, "podFailurePolicy": {"rules": [ignored]}}
    jobs = [{"name": "node", "replicas": 1, "template": template}]
    if spec.servers:
        command = _command(submission, variable=index, first=nodes)
        pod = _pod(submission, "server", command, has_code, server=True)
        jobs.append({"name": "server", "replicas": 1, "template": _indexed_job(submission, spec.servers.count, pod)})
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name_of(submission)}
    # What is started again is started by us, with a budget of the job's.
    policy = {"network": network, "failurePolicy": {"maxRestarts": 0}}
    return _workload(submission) | {"spec": {**policy, "replicatedJobs": jobs}}


def _trainjob(submission: Submission, has_code: bool) -> Manifest:
    spec = submission.spec
    command = _command(submission, variable="JOB_COMPLETION_INDEX")
    resources = _amounts(spec.resources.cpu, spec.resources.memory, spec.resources.gpu)
    trainer: Manifest = {"image": spec.kubernetes.image, "command": command, "numNodes": spec.resources.nodes}
    trainer |= {"resourcesPerNode": resources} if resources else {}
    pod = _pod(submission, "node", command, has_code)
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": spec.kubernetes.runtime}
    body = {"runtimeRef": runtime, "trainer": trainer, **options.trainjob_changes(spec, pod, "node")}
    # The nodes enforce the limit; older releases of Trainer have no deadline.
    deadline = _deadline(submission) if "runtimePatches" in body else {}
    return _workload(submission) | {"spec": body | deadline}


def _pytorchjob(submission: Submission, has_code: bool) -> Manifest:
    # The operator sets RANK to the number of the pod.
    pod = _pod(submission, "pytorch", _command(submission, variable="RANK"), has_code)
    others = submission.spec.resources.nodes - 1
    pod = _patch(submission, pod)
    roles = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": pod}}
    roles |= {"Worker": {"replicas": others, "restartPolicy": "Never", "template": pod}} if others else {}
    policy = {"backoffLimit": 0, "cleanPodPolicy": "None", **_deadline(submission)}
    return _workload(submission) | {"spec": {"runPolicy": policy, "pytorchReplicaSpecs": roles}}

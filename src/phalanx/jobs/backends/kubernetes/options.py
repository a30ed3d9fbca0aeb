"""Apply the `kubernetes.*` options of a job spec to pods and workloads (pure)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from phalanx.errors import SpecError
from phalanx.jobs.limits import FILE, Limits
from phalanx.jobs.spec.addresses import is_local
from phalanx.jobs.spec.training_job import TrainingJob

logger = logging.getLogger("phalanx.jobs")

Manifest = dict[str, Any]

GRACE_S = 15
"""What a pod gets beyond the job's grace, to report its end."""

_POD_GRACE_S = 30
"""Default grace period of a pod."""

_CARRIED: dict[str, frozenset[str]] = {
    "2.0": frozenset({"containers", "volumes", "serviceAccountName", "nodeSelector", "tolerations"}),
}
"""Of a pod's spec, what a TrainJob can change in its runtime, by release of Trainer."""
_CARRIED["2.1"] = _CARRIED["2.0"] | {"affinity", "imagePullSecrets", "metadata"}
_CARRIED["2.2"] = _CARRIED["2.1"] | {"securityContext"}
_CARRIED["2.3"] = _CARRIED["2.2"] | {"terminationGracePeriodSeconds"}

_FIELD = {
    "priorityClassName": "priority_class",
    "envFrom": "env_from",
    "imagePullSecrets": "image_pull_secrets",
    "metadata": "labels and annotations",
    "securityContext": "restricted, run_as_user and fs_group",
}


def queue_of(spec: TrainingJob) -> str | None:
    """Return the local queue of Kueue in which a job waits; None for no queue."""
    own = spec.queue if spec.queue != TrainingJob.model_fields["queue"].default else None
    return spec.kubernetes.queue or own


def pod_spec(spec: TrainingJob) -> Manifest:
    """Return what a job sets in the spec of its pods, beside containers and volumes."""
    settings = spec.kubernetes
    tolerations = [taint.model_dump(exclude_none=True) for taint in settings.tolerations]
    context: Manifest = {"runAsUser": settings.run_as_user, "fsGroup": settings.fs_group}
    if settings.restricted:
        context |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return _without_nothing(
        {
            "serviceAccountName": settings.service_account,
            "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
            "priorityClassName": settings.priority_class,
            "nodeSelector": dict(settings.node_selector),
            "tolerations": tolerations,
            "securityContext": _without_nothing(context),
        }
    )


def container(spec: TrainingJob) -> Manifest:
    """Return what a job sets in the containers of its pods."""
    kinds = {"secret": "secretRef", "configmap": "configMapRef"}
    sources = [source.split("/", 1) for source in spec.kubernetes.env_from]
    context = (
        {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}} if spec.kubernetes.restricted else {}
    )
    return _without_nothing(
        {"envFrom": [{kinds[kind]: {"name": name}} for kind, name in sources], "securityContext": context}
    )


def _without_nothing(fields: Mapping[str, Any]) -> Manifest:
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}


def merge(base: Any, patch: Any) -> Any:
    """Return `base` changed by `patch`.

    Objects are merged, null removes a key, lists of things with a `name` or `mountPath` are merged by it, and all else
    takes the place of what was there.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        both = {**base, **{name: merge(base.get(name), value) for name, value in patch.items()}}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list):
        for key in ("mountPath", "name"):
            if all(isinstance(item, Mapping) and key in item for item in (*base, *patch)):
                by_key = {item[key]: item for item in base}
                return list((by_key | {item[key]: merge(by_key.get(item[key]), item) for item in patch}).values())
    return merge({}, patch) if isinstance(patch, Mapping) else patch


# -- what a TrainJob changes in its runtime ---------------------------------------------------------------------------


def trainjob_changes(spec: TrainingJob, pod: Manifest, replicated: str) -> Manifest:
    """Return the part of a TrainJob's spec that makes the pods of its runtime those of `pod`.

    Args:
        spec: The job.
        pod: The template of its pods, with one container, without the job's own patch.
        replicated: Name of the replicated job, and of the container, in the runtime.
    """
    release = spec.kubernetes.trainer
    body = {name: value for name, value in pod["spec"].items() if name in _CARRIED[release]}
    own = {name: value for name, value in pod["spec"]["containers"][0].items() if name in _IN_CONTAINER}
    body["containers"] = [{"name": replicated, **own}]
    template = merge({"metadata": pod["metadata"], "spec": body}, spec.kubernetes.pod_patch)
    if release == "2.0":
        return {"podSpecOverrides": [{"targetJobs": [{"name": replicated}], **template["spec"]}]}
    if release == "2.1":
        return {"podTemplateOverrides": [{"targetJobs": [{"name": replicated}], **template}]}
    jobs = [{"name": replicated, "template": {"spec": {"template": template}}}]
    change = {"trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    return {"runtimePatches": [{"manager": "phalanx.dev/jobs", **change}]}


_IN_CONTAINER = ("env", "volumeMounts", "securityContext")
"""Of a container, what a TrainJob can change in its runtime; image, command and resources are set elsewhere."""


# -- checks -----------------------------------------------------------------------------------------------------------


def check(spec: TrainingJob) -> None:
    """Raise SpecError with everything in `spec` that Kubernetes, or its kind of workload, cannot do."""
    wrong = [*_wrong_sources(spec), *_wrong_queue(spec), *_wrong_retries(spec), *_wrong_patches(spec)]
    if spec.kubernetes.dialect == "trainjob":
        wrong += _wrong_for_trainjob(spec)
    if wrong:
        raise SpecError("\n  ".join(wrong))


def check_member(spec: TrainingJob, limits: Limits) -> Iterator[str]:
    """Yield what members of a server may not say to its cluster."""
    settings = spec.kubernetes
    if limits.namespaces is not None and settings.namespace not in limits.namespaces:
        allowed = " and ".join(limits.namespaces) or "none"
        yield f"kubernetes.namespace: jobs of this server's members are made in {allowed}, not in {settings.namespace}."
    if not limits.kubernetes_patch and (settings.pod_patch or settings.workload_patch):
        yield (
            "kubernetes.pod_patch and workload_patch: members of this server may not say them. Leave them out, or "
            f"its administrator sets `kubernetes_patch: true` in {FILE}."
        )


def _wrong_sources(spec: TrainingJob) -> Iterator[str]:
    if not spec.name[0].isalpha():
        yield f"name {spec.name}: pods are found by names that begin with a letter. Begin it with one."
    if spec.code.git is not None and is_local(spec.code.git):
        yield (
            f"code.git: {spec.code.git} is a repository on this machine, which pods do not see. Give its address as "
            "https:// or ssh://, or the folder as code.path."
        )
    for dataset in spec.datasets:
        if dataset.kind == "local":
            yield (
                f"dataset {dataset.name} is a folder of this machine, which pods do not see. Use kind nas (a volume "
                "claim), s3, oss or http."
            )


def _wrong_queue(spec: TrainingJob) -> Iterator[str]:
    own, settings = spec.queue, spec.kubernetes
    default = TrainingJob.model_fields["queue"].default
    if settings.queue is not None and own not in (default, settings.queue):
        yield f"queue {own} and kubernetes.queue {settings.queue} name two queues of Kueue; leave one of them out."
    if spec.priority != TrainingJob.model_fields["priority"].default and settings.priority_class is None:
        yield (
            f"priority {spec.priority} means nothing on Kubernetes, which orders by classes. Name one in "
            "kubernetes.priority_class, or leave priority out."
        )


def _wrong_retries(spec: TrainingJob) -> Iterator[str]:
    folder = spec.checkpoint.dir
    if spec.retries.max == 0:
        return
    claims = {str(dataset.uri): dataset for dataset in spec.datasets if dataset.kind == "nas"}
    if folder is None or not folder.startswith("/"):
        yield (
            f"retries.max is {spec.retries.max}, and checkpoints would be lost with the pods of each attempt. Let "
            "checkpoint.dir be a path in a dataset of kind nas, or leave retries out."
        )
        return
    around = [dataset for uri, dataset in claims.items() if PurePosixPath(folder).is_relative_to(uri)]
    if around and all(dataset.readonly for dataset in around):
        yield f"checkpoint.dir {folder} lies in dataset {around[0].name}, which is readonly; say `readonly: false`."
    if not around:
        logger.warning(
            "checkpoint.dir %s lies in no dataset of kind nas: attempts after the first find no checkpoint there, "
            "unless the runtime or kubernetes.pod_patch mounts a volume",
            folder,
        )


def _wrong_patches(spec: TrainingJob) -> Iterator[str]:
    settings = spec.kubernetes
    if others := sorted(settings.pod_patch.keys() - {"metadata", "spec"}):
        yield f"kubernetes.pod_patch: a pod's template has metadata and spec, not {', '.join(others)}."
    for field in ("pod_patch", "workload_patch"):
        for name, value in getattr(settings, field).items():
            if name in ("metadata", "spec") and not isinstance(value, dict):
                yield f"kubernetes.{field}: {name} is an object; write it as {name}: {{...}}."
    metadata = settings.workload_patch.get("metadata")
    changed = {*settings.workload_patch, *(metadata if isinstance(metadata, dict) else ())}
    if ours := sorted(changed & {"apiVersion", "kind", "name", "namespace", "status"}):
        yield f"kubernetes.workload_patch: {', '.join(ours)} of the workload cannot be changed; leave it out."


def _wrong_for_trainjob(spec: TrainingJob) -> Iterator[str]:
    release = spec.kubernetes.trainer
    fields = {*pod_spec(spec), *container(spec)}
    fields |= {"metadata"} if spec.kubernetes.labels or spec.kubernetes.annotations else set()
    patched = spec.kubernetes.pod_patch.get("spec")
    fields |= {*(patched if isinstance(patched, dict) else ())}
    for name in sorted(fields - _CARRIED[release]):
        field = _FIELD.get(name, name)
        later = next((number for number, carried in _CARRIED.items() if name in carried), None)
        instead = f"It can from Trainer {later} on (kubernetes.trainer), or" if later else "Say it in the runtime, or"
        yield f"kubernetes.{field}: a TrainJob of Trainer {release} cannot say it. {instead} set dialect to jobset."
    if "terminationGracePeriodSeconds" not in _CARRIED[release] and spec.grace + GRACE_S > _POD_GRACE_S:
        logger.warning(
            "a TrainJob of Trainer %s cannot say how long its pods get to end: let terminationGracePeriodSeconds of "
            "the runtime %s be %d",
            *(release, spec.kubernetes.runtime, int(spec.grace) + GRACE_S),
        )

"""`Pod`: node, waiting reason and failure of an attempt's pods (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.jobs.models import Cause, Failure
from phalanx.jobs.spec.training_job import TrainingJob

_INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICATED = "jobset.sigs.k8s.io/replicatedjob-name"
_ROLE, _NUMBER = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"

_LOST_REASONS = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity", "UnexpectedAdmissionError")
_PREEMPTED_REASONS = ("Evicted", "Preempting", "Preempted")


@dataclass(frozen=True)
class Pod:
    """A pod as it was last seen."""

    name: str
    node: int
    """Which node of the attempt it is."""

    phase: str
    host: str = ""
    waits: str = ""
    """Why it does not run yet, in Kubernetes' words."""

    has_started: bool = False
    exit_code: int | None = None
    message: str = ""
    """What its container left when it ended."""

    why: str = ""
    """Why it ended, in Kubernetes' words: Error, OOMKilled, Evicted, ..."""


def pods_of(spec: TrainingJob, objects: Iterable[Mapping[str, Any]]) -> list[Pod]:
    """Return the pods among raw objects, by node."""
    return sorted((_pod(spec, raw) for raw in objects), key=lambda pod: (pod.node, pod.name))


def _pod(spec: TrainingJob, raw: Mapping[str, Any]) -> Pod:
    status = raw.get("status", {})
    container: Mapping[str, Any] = next(iter(status.get("containerStatuses") or ()), {})
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    return Pod(
        name=raw["metadata"]["name"],
        node=_node(spec, raw["metadata"]),
        phase=status.get("phase", "Pending"),
        host=raw.get("spec", {}).get("nodeName") or "",
        waits=_waiting_reason(status, state.get("waiting") or {}),
        has_started="running" in state or bool(ended),
        exit_code=ended.get("exitCode"),
        message=ended.get("message") or "",
        why=status.get("reason") or _disruption(status) or ended.get("reason") or "",
    )


def _node(spec: TrainingJob, metadata: Mapping[str, Any]) -> int:
    named = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    if _ROLE in named:
        return int(named.get(_NUMBER, 0)) + (1 if named[_ROLE].lower() == "worker" else 0)
    first = spec.resources.nodes if named.get(_REPLICATED) == "server" else 0
    return first + int(named.get(_INDEX, 0))


def _waiting_reason(status: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    if waiting.get("reason"):
        return _words(waiting["reason"], waiting.get("message"))
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return _words(condition.get("reason") or "Unscheduled", condition.get("message"))
    return ""


def _disruption(status: Mapping[str, Any]) -> str:
    """Why the cluster itself ended a pod."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return "Preempted" if "Preempt" in (condition.get("reason") or "") else "Evicted"
    return ""


def _words(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason


def why_waiting(pods: Iterable[Pod]) -> str:
    """Return why the first pod that waits does, or an empty string."""
    return next((pod.waits for pod in pods if pod.waits), "")


def failure_of(pods: Iterable[Pod]) -> Failure | None:
    """Return what Kubernetes did to a pod of an attempt, which its exit record cannot tell; None if nothing."""
    for pod in pods:
        if pod.why == "OOMKilled":
            message = f"pod {pod.name} used more memory than its limit (Kubernetes: OOMKilled)"
            return Failure(Cause.OOM, message, pod.node, exit_code=pod.exit_code)
        cause = (
            Cause.PREEMPTED
            if pod.why in _PREEMPTED_REASONS
            else Cause.NODE_FAILURE
            if pod.why in _LOST_REASONS
            else None
        )
        if cause is not None:
            return Failure(cause, f"pod {pod.name} was ended by the cluster (Kubernetes: {pod.why})", pod.node)
    return None

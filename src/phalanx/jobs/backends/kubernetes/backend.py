"""`Kubernetes`: the Kubernetes backend: creates, watches and deletes one workload per attempt.

Pods write into no folder of ours. What they print comes from their logs, how each ended from the message that its node
leaves with the container; `collect` brings both into the attempt's folder, as nodes elsewhere write them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import BackendError, SpecError
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.backends.kubernetes import manifests
from phalanx.jobs.backends.kubernetes.logs import LogCursor
from phalanx.jobs.backends.kubernetes.manifests import DIALECTS, Dialect
from phalanx.jobs.backends.kubernetes.options import Manifest, queue_of
from phalanx.jobs.backends.kubernetes.pods import Pod, failure_of, pods_of, why_waiting
from phalanx.jobs.models import Cause, Failure
from phalanx.jobs.sources import archive as trees
from phalanx.jobs.spec.training_job import TrainingJob

if TYPE_CHECKING:
    from phalanx.jobs.backends.kubernetes.informer import Informer

logger = logging.getLogger("phalanx.jobs")

REQUEST_S = 30.0
"""How long one request may take."""

LOG_BYTES = 4 << 20
"""Most text of a pod that one call of `collect` brings; the rest comes with the next."""


class Kubernetes:
    """Runs attempts as workloads of the cluster that KUBECONFIG, or the pod this runs in, names."""

    name = "kubernetes"

    def __init__(self, client: Any = None) -> None:
        """Make the backend.

        Args:
            client: The client library's ApiClient; None reads the configuration when the cluster is first asked.
        """
        self._client = client
        self._informers: dict[tuple[str, ...], Informer] = {}

    def check(self, spec: TrainingJob) -> None:
        """Raise SpecError if pods cannot run `spec`, or the client library is missing. The cluster is not asked."""
        if importlib.util.find_spec("kubernetes") is None:
            raise SpecError("backend: kubernetes needs its client library. Run: pip install 'phalanx[kubernetes]'")
        manifests.check(spec)

    def render(self, submission: Submission, *, full: bool = False) -> str:
        """Return the manifests as YAML; values of secrets are hidden and packed code is left out, unless `full`."""
        import yaml

        class Plain(yaml.SafeDumper):
            """Writes everything where it belongs: what is there twice is written twice."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        objects = self._objects(submission)
        shown = objects if full else manifests.hidden(objects)
        return str(yaml.dump_all(shown, Dumper=Plain, sort_keys=False, width=120))

    def submit(self, submission: Submission) -> str:
        """Make the attempt's objects, or find those that are there; return the workload's name.

        Raises:
            BackendError: If the cluster refuses, or cannot be reached.
        """
        attempt_files.write_spec(submission)
        config, secret, workload = self._objects(submission)
        namespace = submission.spec.kubernetes.namespace
        core = self._core()
        self._create(core.create_namespaced_config_map, namespace, config)
        self._create(core.create_namespaced_secret, namespace, secret)
        try:
            self._create(self._custom().create_namespaced_custom_object, *self._resource_path(submission), workload)
        except BackendError as error:
            if "unknown field" in str(error) and submission.spec.kubernetes.dialect == "trainjob":
                release = submission.spec.kubernetes.trainer
                raise BackendError(
                    f"{error} Kubeflow Trainer there is older than {release}: say kubernetes.trainer."
                ) from None
            raise
        self._set_owner(submission, (core.patch_namespaced_config_map, config), (core.patch_namespaced_secret, secret))
        return manifests.name_of(submission)

    def status(self, submission: Submission, handle: str) -> Status:
        """Return where the attempt is."""
        workload = self._workload(submission)
        if workload is None:
            return Status(Phase.GONE, "the cluster has no such workload")
        pods = self._pods(submission)
        hosts = tuple(pod.host for pod in pods if pod.host)
        conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions") or () if c["status"] == "True"}
        if conditions.keys() & {"Complete", "Completed", "Succeeded"}:
            return Status(Phase.SUCCEEDED, "", hosts)
        failed = conditions.get("Failed")
        broken = failure_of(pods)
        if failed is not None or broken is not None or any(pod.phase == "Failed" for pod in pods):
            return Status(Phase.FAILED, _describe(failed or {}), hosts, broken or _of_workload(failed))
        if "Suspended" in conditions:
            queue = queue_of(submission.spec)
            return Status(Phase.QUEUED, f"suspended, waits in queue {queue}" if queue else "suspended")
        reason, servers = why_waiting(pods), submission.spec.servers
        all_pods = submission.spec.resources.nodes + (servers.count if servers else 0)
        if len(pods) < all_pods or any(not pod.host for pod in pods):
            return Status(Phase.QUEUED, reason or "its pods are not made yet", hosts)
        if all(pod.has_started for pod in pods):
            return Status(Phase.RUNNING, "running", hosts)
        return Status(Phase.PREPARING, reason or "its pods are starting", hosts)

    def collect(self, submission: Submission, handle: str) -> None:
        """Append what pods have printed since the last call, and take over how each ended."""
        paths.logs(submission.folder).mkdir(parents=True, exist_ok=True)
        for pod in self._pods(submission):
            if not pod.has_started:
                continue
            self._append_log(submission, pod)
            if pod.phase == "Running":
                attempt_files.write_heartbeat(submission.folder, pod.node, "running")
            if pod.message and attempt_files.read_exit_record(submission.folder, pod.node) is None:
                _store_exit_record(submission.folder, pod)

    def stop(self, submission: Submission, handle: str, grace_s: float) -> None:
        """Remove the workload; its pods get SIGTERM, and the grace that was written into them."""
        # It stays until its pods are gone, so that their last output is still collected.
        delete = self._custom().delete_namespaced_custom_object
        self._delete(delete, *self._resource_path(submission), manifests.name_of(submission), policy="Foreground")

    def cleanup(self, submission: Submission, handle: str) -> None:
        """Remove everything that was made for the attempt."""
        name, namespace, core = manifests.name_of(submission), submission.spec.kubernetes.namespace, self._core()
        self._delete(self._custom().delete_namespaced_custom_object, *self._resource_path(submission), name)
        self._delete(core.delete_namespaced_secret, f"{name}-secrets", namespace)
        self._delete(core.delete_namespaced_config_map, f"{name}-order", namespace)

    def close(self) -> None:
        """Watch the cluster no longer."""
        for informer in self._informers.values():
            informer.close()

    def _objects(self, submission: Submission) -> list[Manifest]:
        return manifests.manifests(submission, job_secret=secrets.token_hex(32), code=_pack_code(submission))

    def _pods(self, submission: Submission) -> list[Pod]:
        namespace = submission.spec.kubernetes.namespace
        # The operator's label: not every release of Trainer lets a job set labels.
        label = DIALECTS[submission.spec.kubernetes.dialect].name_label
        objects = self._watch(
            ("pods", namespace, label), lambda: self._core().list_namespaced_pod, namespace, label_selector=label
        )
        name = manifests.name_of(submission)
        own = [raw for raw in objects.values() if (raw["metadata"].get("labels") or {}).get(label) == name]
        return pods_of(submission.spec, own)

    def _workload(self, submission: Submission) -> Mapping[str, Any] | None:
        """The workload, asked for by name where the watch has not seen it yet."""
        path, name = self._resource_path(submission), manifests.name_of(submission)
        objects = self._watch(path, lambda: self._custom().list_namespaced_custom_object, *path)
        if name in objects:
            return objects[name]
        workload = _request(self._custom().get_namespaced_custom_object, *path, name, ok_statuses=(404,))
        return None if workload is None else dict(workload)

    def _watch(self, key: tuple[str, ...], call: Any, *words: str, **named: str) -> dict[str, Mapping[str, Any]]:
        from phalanx.jobs.backends.kubernetes.informer import Informer

        if key not in self._informers:
            self._informers[key] = Informer(" ".join(key), functools.partial(call(), *words, **named))
        return self._informers[key].objects()

    def _append_log(self, submission: Submission, pod: Pod) -> None:
        """Append the lines of a pod's log that are newer than those we have.

        The server gives lines since a time in whole seconds, so some come twice and are told by their own time stamps.
        """
        log = paths.logs(submission.folder) / f"node-{pod.node}.log"
        cursor = LogCursor.read(log)
        query: dict[str, Any] = {"timestamps": True, "limit_bytes": LOG_BYTES, "_preload_content": False}
        if cursor.stamp:
            query["since_seconds"] = cursor.seconds_ago()
        namespace = submission.spec.kubernetes.namespace
        # 404: the pod is gone; 400: its container has nothing to show yet.
        response = _request(self._core().read_namespaced_pod_log, pod.name, namespace, ok_statuses=(400, 404), **query)
        if response is not None:
            cursor.append(log, response.data)

    def _resource_path(self, submission: Submission) -> tuple[str, str, str, str]:
        dialect: Dialect = DIALECTS[submission.spec.kubernetes.dialect]
        return dialect.group, dialect.version, submission.spec.kubernetes.namespace, dialect.plural

    def _create(self, create: Any, *words: Any) -> None:
        """Make an object; one that is there already was made by us before."""
        # Strict: fields that the cluster does not know are refused, which it would else leave out.
        _request(create, *words, ok_statuses=(409,), field_validation="Strict")

    def _set_owner(self, submission: Submission, *objects: tuple[Any, Manifest]) -> None:
        """Make the workload own objects, so that the cluster removes them with it."""
        dialect, name = DIALECTS[submission.spec.kubernetes.dialect], manifests.name_of(submission)
        workload = _request(
            self._custom().get_namespaced_custom_object, *self._resource_path(submission), name, ok_statuses=(404,)
        )
        if workload is None:
            return
        owner = {"apiVersion": f"{dialect.group}/{dialect.version}", "kind": dialect.kind, "name": name}
        change = {"metadata": {"ownerReferences": [owner | {"uid": workload["metadata"]["uid"]}]}}
        for patch, manifest in objects:
            metadata = manifest["metadata"]
            if _request(patch, metadata["name"], metadata["namespace"], change, ok_statuses=(403, 404)) is None:
                logger.warning("%s cannot be patched: it stays if nobody removes it with %s", metadata["name"], name)

    def _delete(self, delete: Any, *words: Any, policy: str = "Background") -> None:
        _request(delete, *words, ok_statuses=(404,), propagation_policy=policy)

    def _core(self) -> Any:
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self._api())

    def _custom(self) -> Any:
        from kubernetes.client import CustomObjectsApi

        return CustomObjectsApi(self._api())

    def _api(self) -> Any:
        if self._client is None:
            from kubernetes import client, config

            try:
                config.load_config()  # type: ignore[no-untyped-call]
            except config.ConfigException as error:
                raise BackendError(f"No Kubernetes cluster is configured: {error}. Set KUBECONFIG.") from None
            self._client = client.ApiClient()
        return self._client


def _request(call: Any, *words: Any, ok_statuses: tuple[int, ...], **named: Any) -> Any:
    """Return what the cluster answers, None for an HTTP status in `ok_statuses`: it is so already, or is not there.

    Raises:
        BackendError: If the cluster refuses, or cannot be reached.
    """
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    from phalanx.jobs.backends.kubernetes.informer import error_message, raise_for_status

    try:
        return raise_for_status(call(*words, _request_timeout=REQUEST_S, **named))
    except ApiException as error:
        if error.status in ok_statuses:
            return None
        raise BackendError(f"Kubernetes says no: {error_message(error)}") from None
    except HTTPError as error:
        raise BackendError(f"The Kubernetes cluster cannot be reached: {error}") from None


def _pack_code(submission: Submission) -> bytes:
    """The tree of code given as a path, packed; pods fetch repositories themselves."""
    digest = submission.spec.code.digest
    if submission.spec.code.git is not None or digest is None:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "code.tar.gz"
        trees.pack(submission.folder.parents[2] / "code" / digest, archive)
        return archive.read_bytes()


def _store_exit_record(folder: Path, pod: Pod) -> None:
    """Keep the exit record that a node left with its container; other text there is not ours."""
    try:
        record = attempt_files.parse_exit_record(pod.message)
    except (ValueError, TypeError, KeyError):
        return
    attempt_files.write_exit_record(folder, pod.node, record)


def _of_workload(condition: Mapping[str, Any] | None) -> Failure | None:
    """The failure of a workload whose deadline passed; for others the exit records have the reason."""
    if condition is None or "Deadline" not in (condition.get("reason") or ""):
        return None
    return Failure(Cause.TIMEOUT, f"its time ran out (Kubernetes: {_describe(condition)})")


def _describe(condition: Mapping[str, Any]) -> str:
    words = (condition.get("reason"), condition.get("message"))
    return ": ".join(word for word in words if word)

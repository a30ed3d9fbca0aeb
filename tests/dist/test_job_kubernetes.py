"""The Kubernetes backend over HTTP, against a server that holds objects, refuses, breaks watches and forgets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration

from kubernetes_server import KubernetesServer
from phalanx.errors import BackendError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import ExitRecord
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.backends.kubernetes.backend import Kubernetes
from phalanx.jobs.models import Cause
from phalanx.jobs.spec.training_job import TrainingJob

pytestmark = pytest.mark.dist

PODS = "/api/v1/namespaces/team/pods"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
CONFIGS = "/api/v1/namespaces/team/configmaps"
SECRETS = "/api/v1/namespaces/team/secrets"


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as running:
        yield running


@pytest.fixture
def cluster(server: KubernetesServer) -> Iterator[Kubernetes]:
    made = Kubernetes(ApiClient(Configuration(host=server.address)))
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path) -> Submission:
    said = {
        "name": "j",
        "command": "python train.py",
        "code": {"git": "https://example.org/a.git", "commit": "0" * 40},
        "resources": {"nodes": 2},
        "backend": "kubernetes",
        "kubernetes": {"dialect": "jobset", "namespace": "team", "image": "i", "queue": "gold"},
    }
    folder = tmp_path / "jobs" / "j-1" / "attempt-1"
    return Submission("j-1", 1, TrainingJob.model_validate(said), folder, {"TOKEN": "hush"})


def pod(server: KubernetesServer, number: int, *, state: dict[str, Any] | None = None, **status: Any) -> None:
    """Set pod `number` of the attempt as a cluster would."""

    def change(made: dict[str, Any]) -> None:
        labels = {
            "jobset.sigs.k8s.io/jobset-name": "j-1-1",
            "batch.kubernetes.io/job-completion-index": str(number),
        }
        made["metadata"]["labels"] = labels
        made["spec"] = {"nodeName": f"host-{number}"} if state is not None else {}
        made["status"] = {"phase": "Running" if state else "Pending", **status}
        made["status"] |= {"containerStatuses": [{"state": state}]} if state else {}

    server.put(PODS, f"j-1-1-node-0-{number}", change)


def condition(server: KubernetesServer, kind: str, reason: str = "") -> None:
    """Have the workload say that it is so."""
    said = {"type": kind, "status": "True", "reason": reason, "message": "m"}
    server.put(JOBSETS, "j-1-1", lambda made: made.update(status={"conditions": [said]}))


def until(status: Callable[[], Status], phase: Phase) -> Status:
    """Wait until a watch has told."""
    deadline = time.monotonic() + 20
    while (found := status()).phase is not phase:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_an_attempt_is_made_once_watched_and_removed(
    server: KubernetesServer, cluster: Kubernetes, job: Submission
) -> None:
    def status() -> Status:
        return cluster.status(job, "j-1-1")

    assert status() == Status(Phase.GONE, "the cluster has no such workload")
    assert cluster.submit(job) == cluster.submit(job) == "j-1-1"
    assert [len(server.collections[path]) for path in (JOBSETS, SECRETS)] == [1, 1]
    for path, name in ((SECRETS, "j-1-1-secrets"), (CONFIGS, "j-1-1-order")):
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "j-1-1", "uid": "uid-of-j-1-1"}
        assert server.collections[path][name]["metadata"]["ownerReferences"] == [owner]
    assert until(status, Phase.QUEUED).reason == "its pods are not made yet"
    condition(server, "Suspended")
    assert until(lambda: _worded(status(), "suspended"), Phase.QUEUED).reason == "suspended, waits in queue gold"
    condition(server, "Created")
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
    pod(server, 0, conditions=[unscheduled])
    assert until(lambda: _worded(status(), "0/3"), Phase.QUEUED).reason == "Unschedulable: 0/3 nodes: no gpu"
    pod(server, 0, state={"running": {}})
    pod(server, 1, state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    assert until(status, Phase.PREPARING).reason == "ImagePullBackOff: no such image"
    pod(server, 1, state={"running": {}})
    assert until(status, Phase.RUNNING).nodes == ("host-0", "host-1")
    condition(server, "Completed")
    until(status, Phase.SUCCEEDED)
    for _ in range(2):
        cluster.stop(job, "j-1-1", 1.0)
        cluster.cleanup(job, "j-1-1")
    assert [len(server.collections[path]) for path in (JOBSETS, SECRETS)] == [0, 0]
    until(status, Phase.GONE)


def _worded(status: Status, words: str) -> Status:
    """The status once its reason speaks of something, and before as if nothing were known."""
    return status if words in status.reason else Status(Phase.GONE)


def test_a_watch_that_breaks_goes_on_and_one_that_is_too_old_begins_anew(
    server: KubernetesServer, cluster: Kubernetes, job: Submission
) -> None:
    cluster.submit(job)
    cluster.status(job, "j-1-1")
    for number in range(2):
        pod(server, number, state={"running": {}})
    until(lambda: cluster.status(job, "j-1-1"), Phase.RUNNING)
    server.cut_watches()
    server.forget()
    # Seen by nobody while no watch is open, and too old to be told again.
    condition(server, "Completed")
    server.forget()
    until(lambda: cluster.status(job, "j-1-1"), Phase.SUCCEEDED)
    lists = [line for line in server.requests if line.startswith(f"GET {JOBSETS}") and "watch" not in line]
    assert len(lists) >= 2


def test_logs_come_once_and_exit_records_with_them(
    server: KubernetesServer, cluster: Kubernetes, job: Submission
) -> None:
    cluster.submit(job)
    pod(server, 0, state={"running": {}})
    now = time.time()
    server.say("j-1-1-node-0-0", "first", now - 1)
    server.say("j-1-1-node-0-0", "same moment", now - 1)
    cluster.collect(job, "j-1-1")
    server.say("j-1-1-node-0-0", "same moment, later", now - 1)
    server.say("j-1-1-node-0-0", "last", now)
    cluster.collect(job, "j-1-1")
    another = Kubernetes(ApiClient(Configuration(host=server.address)))
    another.collect(job, "j-1-1")
    another.close()
    log = job.folder / "logs" / "node-0.log"
    assert log.read_text() == "first\nsame moment\nsame moment, later\nlast\n"
    assert attempt_files.read_activity(job.folder, 0) == "running"

    end = ExitRecord("failed", Cause.USER_CODE, "rank 0 raised ValueError: x", rank=0, exit_code=1)
    pod(
        server,
        0,
        state={"terminated": {"exitCode": 1, "reason": "Error", "message": attempt_files.exit_record_json(end)}},
        phase="Failed",
    )
    status = until(lambda: cluster.status(job, "j-1-1"), Phase.FAILED)
    assert status.failure is None, "what the node wrote says more"
    cluster.collect(job, "j-1-1")
    assert attempt_files.read_exit_record(job.folder, 0) == end


@pytest.mark.parametrize(
    ("state", "status", "cause"),
    [
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, {}, Cause.OOM),
        ({"terminated": {"exitCode": 143, "reason": "Error"}}, {"reason": "NodeShutdown"}, Cause.NODE_FAILURE),
        ({"terminated": {"exitCode": 143}}, {"reason": "Evicted"}, Cause.PREEMPTED),
    ],
)
def test_what_the_cluster_did_to_a_pod_is_a_cause(
    server: KubernetesServer, cluster: Kubernetes, job: Submission, state: Any, status: Any, cause: Cause
) -> None:
    cluster.submit(job)
    pod(server, 1, state=state, phase="Failed", **status)
    failure = until(lambda: cluster.status(job, "j-1-1"), Phase.FAILED).failure
    assert failure is not None
    assert (failure.cause, failure.node) == (cause, 1)


def test_a_deadline_of_the_cluster_is_a_timeout(server: KubernetesServer, cluster: Kubernetes, job: Submission) -> None:
    cluster.submit(job)
    condition(server, "Failed", "DeadlineExceeded")
    failure = until(lambda: cluster.status(job, "j-1-1"), Phase.FAILED).failure
    assert failure is not None
    assert failure.cause is Cause.TIMEOUT


def test_what_the_cluster_refuses_is_told_in_its_words_until_it_does_not(
    server: KubernetesServer, cluster: Kubernetes, job: Submission
) -> None:
    cluster.submit(job)
    server.refused = "pods"
    with pytest.raises(BackendError, match=r"does not tell of pods team .*: pods is forbidden \(403\)"):
        cluster.status(job, "j-1-1")
    server.refused = ""
    pod(server, 0, state={"running": {}})
    # Listed again by the thread, after a moment that grows.
    until(lambda: _despite(cluster, job), Phase.QUEUED)
    # A pod that has no log yet, or none any more, leaves no error in ours.
    cluster.collect(job, "j-1-1")
    assert not (job.folder / "logs" / "node-0.log").exists()
    server.refused = "log"
    with pytest.raises(BackendError, match=r"Kubernetes says no: log is forbidden \(403\)"):
        cluster.collect(job, "j-1-1")


def test_what_an_older_trainer_would_leave_out_is_refused_with_the_setting_to_change(
    server: KubernetesServer, cluster: Kubernetes, job: Submission
) -> None:
    asked = job.spec.kubernetes.model_copy(update={"dialect": "trainjob", "queue": None})
    trainjob = replace(job, spec=job.spec.model_copy(update={"kubernetes": asked}))
    server.unknown = "runtimePatches"
    message = r'unknown field "spec.runtimePatches".* Kubeflow Trainer there is older than 2.3: say kubernetes.trainer'
    with pytest.raises(BackendError, match=message):
        cluster.submit(trainjob)
    older = asked.model_copy(update={"trainer": "2.1"})
    cluster.submit(replace(trainjob, spec=trainjob.spec.model_copy(update={"kubernetes": older})))


def _despite(cluster: Kubernetes, job: Submission) -> Status:
    """The status, or that nothing is known while the cluster refuses."""
    try:
        return cluster.status(job, "j-1-1")
    except BackendError:
        return Status(Phase.GONE)


def test_what_is_shown_hides_values_and_what_cannot_be_reached_is_told(job: Submission) -> None:
    shown = Kubernetes().render(job)
    assert "hush" not in shown
    assert json.dumps({"TOKEN": "(hidden)", "PHALANX_JOB_SECRET": "(hidden)"}) in shown.replace("\n  ", "")
    configuration = Configuration(host="http://127.0.0.1:1")
    configuration.retries = False
    with pytest.raises(BackendError, match="cannot be reached"):
        Kubernetes(ApiClient(configuration)).submit(job)

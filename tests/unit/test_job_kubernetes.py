"""The manifests of Kubernetes against the schemas of those who read them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from phalanx.errors import SpecError
from phalanx.jobs.backend import Submission
from phalanx.jobs.backends.kubernetes import Kubernetes
from phalanx.jobs.backends.kubernetes_manifests import HIDDEN, check, hidden, manifests
from phalanx.jobs.spec import TrainingJob

FULL: dict[str, Any] = {
    "name": "mnist",
    "command": "python train.py",
    "code": {"git": "https://example.org/a.git", "commit": "0" * 40},
    "resources": {"nodes": 3, "procs_per_node": 2, "cpu": 1.5, "memory": "8Gi", "gpu": 2},
    "datasets": [{"name": "d", "kind": "nas", "uri": "/mnt/data", "file_system": "claim-1", "mount": "/data"}],
    "secrets": ["TOKEN"],
    "backend": "kubernetes",
    "max_runtime": "2h",
}


def spec(dialect: str, **said: Any) -> TrainingJob:
    cluster = {"dialect": dialect, "namespace": "team", "image": "registry/train:1", "queue": "gold"}
    return TrainingJob.model_validate({**FULL, "kubernetes": cluster, **said})


def made(dialect: str, **said: Any) -> list[dict[str, Any]]:
    submission = Submission(
        "mnist-ab12", 2, spec(dialect, **said), Path("/h/jobs/mnist-ab12/attempt-2"), {"TOKEN": "x"}
    )
    return manifests(submission, job_secret="ab" * 32)


def pods(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates of a JobSet or PyTorchJob."""
    if workload["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in workload["spec"]["replicatedJobs"]]
    return [role["template"] for role in workload["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("dialect", ["trainjob", "pytorchjob", "jobset"])
def test_what_the_core_knows_fits_its_strict_schema(dialect: str) -> None:
    config, secret, workload = made(dialect)
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)
    kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
    for template in [] if dialect == "trainjob" else pods(workload):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    if dialect == "jobset":
        for job in workload["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **job["template"]}
            kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("dialect", "model"), [("trainjob", models.TrainerV1alpha1TrainJob), ("jobset", models.JobsetV1alpha2JobSet)]
)
def test_the_models_of_the_operators_know_every_key(dialect: str, model: Any) -> None:
    workload = made(dialect)[-1]
    read = model.from_dict(copy.deepcopy(workload)).to_dict()
    assert json.loads(json.dumps(read, default=str)) == workload


def test_a_trainjob_runs_our_node_in_every_pod() -> None:
    workload = made("trainjob")[-1]
    assert workload["metadata"] == {
        "name": "mnist-ab12-2",
        "namespace": "team",
        "labels": {
            "app.kubernetes.io/managed-by": "phalanx",
            "phalanx.dev/job": "mnist-ab12",
            "phalanx.dev/attempt": "2",
            "kueue.x-k8s.io/queue-name": "gold",
        },
    }
    trainer = workload["spec"]["trainer"]
    assert trainer["numNodes"] == 3
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "1500m", "memory": str(8 * 2**30), "nvidia.com/gpu": "2"}
    assert trainer["command"][:8] == [
        *("python", "-m", "phalanx.jobs.node", "/phalanx", "--pod", "--node", "JOB_COMPLETION_INDEX", "--first-node"),
    ]
    assert "mnist-ab12-2-node-0-0.mnist-ab12-2,mnist-ab12-2-node-0-1.mnist-ab12-2" in trainer["command"][10]
    assert workload["spec"]["activeDeadlineSeconds"] == 7290


def test_servers_are_a_replicated_job_with_resources_of_their_own() -> None:
    workload = made("jobset", servers={"count": 2, "cpu": 8, "memory": "64Gi"})[-1]
    node, server = workload["spec"]["replicatedJobs"]
    assert (node["template"]["spec"]["completions"], server["template"]["spec"]["completions"]) == (3, 2)
    container = server["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "8000m", "memory": str(64 * 2**30)}
    command = container["command"]
    assert command[command.index("--first-node") + 1] == "3"
    assert command[command.index("--hosts") + 1].split(",")[3:] == [
        "mnist-ab12-2-server-0-0.mnist-ab12-2",
        "mnist-ab12-2-server-0-1.mnist-ab12-2",
    ]
    assert workload["spec"]["failurePolicy"] == {"maxRestarts": 0}


def test_a_pytorchjob_has_a_master_and_workers_that_no_operator_restarts() -> None:
    workload = made("pytorchjob")[-1]
    roles = workload["spec"]["pytorchReplicaSpecs"]
    assert {name: (role["replicas"], role["restartPolicy"]) for name, role in roles.items()} == {
        "Master": (1, "Never"),
        "Worker": (2, "Never"),
    }
    assert workload["spec"]["runPolicy"]["backoffLimit"] == 0
    assert list(made("pytorchjob", resources={"nodes": 1})[-1]["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_a_nas_is_a_claim_and_the_order_a_file() -> None:
    template = pods(made("jobset")[-1])[0]["spec"]
    assert {"name": "nas-claim-1", "persistentVolumeClaim": {"claimName": "claim-1"}} in template["volumes"]
    mounts = {mount["mountPath"]: mount for mount in template["containers"][0]["volumeMounts"]}
    assert mounts["/mnt/data"]["readOnly"] is True
    assert mounts["/phalanx/attempt.json"]["subPath"] == "attempt.json"
    order = json.loads(made("jobset")[0]["data"]["attempt.json"])
    assert (order["home"], order["checkpoint"]) == ("/phalanx/home", "/phalanx/checkpoints")


@pytest.mark.parametrize("dialect", ["trainjob", "pytorchjob", "jobset"])
def test_values_of_secrets_are_in_the_secret_alone_and_not_in_what_is_shown(dialect: str) -> None:
    config, secret, workload = made(dialect)
    assert json.loads(secret["stringData"]["secrets.json"])["TOKEN"] == "x"
    assert "ab" * 32 not in json.dumps([config, workload])
    shown = hidden([config, secret, workload])
    assert set(json.loads(shown[1]["stringData"]["secrets.json"]).values()) == {HIDDEN}


def test_packed_code_goes_with_the_order_while_it_is_small() -> None:
    submission = Submission(
        "j-1", 1, spec("jobset", code={"path": "/x", "digest": "0" * 64}), Path("/h/jobs/j-1/a"), {}
    )
    config, _, workload = manifests(submission, job_secret="", code=b"tar")
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)
    mounts = pods(workload)[0]["spec"]["containers"][0]["volumeMounts"]
    assert "/phalanx/code.tar.gz" in [mount["mountPath"] for mount in mounts]
    assert hidden([config])[0]["binaryData"] == {"code.tar.gz": "(4 characters)"}
    with pytest.raises(SpecError, match="packs to 900001 bytes, and 900000 can go with a job on Kubernetes"):
        manifests(submission, job_secret="", code=b"x" * 900_001)


def test_a_tree_of_code_is_packed_as_it_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "code" / ("0" * 64)
    kept.mkdir(parents=True)
    (kept / "train.py").write_text("print(1)")
    asked = spec("jobset", code={"path": "/x", "digest": "0" * 64})
    text = Kubernetes().render(Submission("j-1", 1, asked, tmp_path / "jobs" / "j-1" / "attempt-1", {}))
    shown = list(yaml.safe_load_all(text))
    assert [made["kind"] for made in shown] == ["ConfigMap", "Secret", "JobSet"]
    assert "characters" in shown[0]["binaryData"]["code.tar.gz"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"kubernetes": {}}, "kubernetes.image is not set. Name an image"),
        ({"servers": {}}, "kubernetes.dialect trainjob has no role for parameter servers. Set .* to jobset"),
        ({"datasets": [{"name": "d", "kind": "local", "uri": "/x"}]}, "dataset d is a folder of this machine"),
    ],
)
def test_what_pods_cannot_do_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(spec("trainjob", **said))

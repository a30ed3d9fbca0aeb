"""The manifests of Kubernetes against the schemas of those who read them."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from phalanx.errors import SpecError
from phalanx.jobs.backend import Submission
from phalanx.jobs.backends.kubernetes.backend import Kubernetes
from phalanx.jobs.backends.kubernetes.manifests import HIDDEN, check, hidden, manifests
from phalanx.jobs.backends.kubernetes.options import merge
from phalanx.jobs.spec.quantities import as_quantity, to_bytes
from phalanx.jobs.spec.training_job import TrainingJob

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


CLUSTER: dict[str, Any] = {"namespace": "team", "image": "registry/train:1"}

OLD: dict[str, Any] = {
    "service_account": "trainer",
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
"""What pods of every kind of workload can be told."""

NEWER: dict[str, Any] = OLD | {
    "image_pull_secrets": ["registry"],
    "labels": {"team.example/cost": "42"},
    "annotations": {"sidecar.istio.io/inject": "false"},
}
SAFE: dict[str, Any] = NEWER | {"restricted": True, "run_as_user": 1000, "fs_group": 1000}
ALL: dict[str, Any] = SAFE | {
    "priority_class": "high",
    "env_from": ["secret/tokens", "configmap/settings"],
    "pod_patch": {
        "spec": {"hostNetwork": True, "containers": [{"name": "node", "env": [{"name": "A", "value": "1"}]}]}
    },
    "workload_patch": {"metadata": {"labels": {"more": "x"}}},
}


def rich(dialect: str, said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return made(dialect, kubernetes={"dialect": dialect, **CLUSTER, **said}, **more)[-1]


@pytest.mark.parametrize("dialect", ["trainjob", "pytorchjob", "jobset"])
@pytest.mark.parametrize("said", [{}, ALL])
def test_what_the_core_knows_fits_its_strict_schema(dialect: str, said: dict[str, Any]) -> None:
    config, secret, workload = made(dialect, kubernetes={"dialect": dialect, **CLUSTER, **said})
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
@pytest.mark.parametrize("more", [False, True])
def test_the_models_of_the_operators_know_every_key(dialect: str, model: Any, more: bool) -> None:
    workload = rich(dialect, {} if not more else ALL if dialect == "jobset" else SAFE)
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
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "1500m", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert trainer["command"][:8] == [
        *("python", "-m", "phalanx.jobs.node", "/phalanx", "--pod", "--node", "JOB_COMPLETION_INDEX", "--first-node"),
    ]
    assert "mnist-ab12-2-node-0-0.mnist-ab12-2,mnist-ab12-2-node-0-1.mnist-ab12-2" in trainer["command"][10]
    assert workload["spec"]["activeDeadlineSeconds"] == 7290


@pytest.mark.parametrize("dialect", ["jobset", "pytorchjob"])
def test_pods_carry_what_the_job_says_of_them(dialect: str) -> None:
    workload = rich(dialect, ALL)
    for pod in pods(workload):
        found = pod["spec"]
        assert pod["metadata"]["labels"]["team.example/cost"] == "42"
        assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        assert (found["serviceAccountName"], found["priorityClassName"]) == ("trainer", "high")
        assert found["imagePullSecrets"] == [{"name": "registry"}]
        assert found["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
        sources = [{"secretRef": {"name": "tokens"}}, {"configMapRef": {"name": "settings"}}]
        assert found["containers"][0]["envFrom"] == sources
        assert found["hostNetwork"] is True
        # What the standard `restricted` asks for, of its documentation.
        assert found["securityContext"] == {
            **{"runAsUser": 1000, "fsGroup": 1000, "runAsNonRoot": True},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert found["containers"][0]["securityContext"] == context
        assert {kind for volume in found["volumes"] for kind in volume} <= {
            *("name", "configMap", "emptyDir", "secret", "persistentVolumeClaim"),
        }
        # Any user of the image may read it, and it is mounted nowhere else.
        assert next(v["secret"]["defaultMode"] for v in found["volumes"] if "secret" in v) == 0o444
    assert workload["metadata"]["labels"]["more"] == "x"
    if dialect == "jobset":
        container = pods(workload)[0]["spec"]["containers"][0]
        assert (container["image"], container["env"]) == ("registry/train:1", [{"name": "A", "value": "1"}])


@pytest.mark.parametrize(
    ("release", "key", "said", "carried"),
    [
        ("2.0", "podSpecOverrides", OLD, {"serviceAccountName", "nodeSelector", "tolerations"}),
        ("2.1", "podTemplateOverrides", NEWER, {"imagePullSecrets"}),
        ("2.2", "runtimePatches", SAFE, {"securityContext"}),
        ("2.3", "runtimePatches", SAFE, {"securityContext", "terminationGracePeriodSeconds"}),
    ],
)
def test_a_trainjob_changes_its_runtime_in_the_words_of_the_release(
    release: str, key: str, said: dict[str, Any], carried: set[str]
) -> None:
    """The keys are those of the CRDs v2.0.1, v2.1.0, v2.2.0 and v2.3.0."""
    body = rich("trainjob", said | {"trainer": release})["spec"]
    assert {"podSpecOverrides", "podTemplateOverrides", "runtimePatches"} & body.keys() == {key}
    change = body[key][0]
    if key == "runtimePatches":
        change = change["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        assert change["targetJobs"] == [{"name": "node"}]
    pod = change if release == "2.0" else change["spec"]
    assert carried | {"containers", "volumes"} <= pod.keys()
    assert ("terminationGracePeriodSeconds" in pod) == (release == "2.3")
    assert ("activeDeadlineSeconds" in body) == (key == "runtimePatches")
    assert pod["containers"][0]["name"] == "node"
    assert "/phalanx-secrets" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"trainer": "2.0", "labels": {"a": "b"}},
            "kubernetes.labels and annotations: a TrainJob of Trainer 2.0 cannot",
        ),
        (
            {"trainer": "2.0", "image_pull_secrets": ["a"]},
            "It can from Trainer 2.1 on .kubernetes.trainer., or set dialect",
        ),
        ({"trainer": "2.1", "restricted": True}, "restricted, run_as_user and fs_group: .* It can from Trainer 2.2 on"),
        ({"priority_class": "high"}, "kubernetes.priority_class: .* Say it in the runtime, or set dialect to jobset"),
        ({"env_from": ["secret/a"]}, "kubernetes.env_from: .* Say it in the runtime"),
        ({"pod_patch": {"spec": {"hostNetwork": True}}}, "kubernetes.hostNetwork: .* Say it in the runtime"),
        ({"pod_patch": {"hostNetwork": True}}, "a pod's template has metadata and spec, not hostNetwork"),
        ({"workload_patch": {"metadata": {"name": "x"}}}, "name of the workload cannot be changed"),
        ({"pod_patch": {"spec": None}}, "kubernetes.pod_patch: spec is an object"),
        ({"workload_patch": {"metadata": 5}}, "kubernetes.workload_patch: metadata is an object"),
    ],
)
def test_what_a_trainjob_cannot_carry_is_refused_with_what_can(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(spec("trainjob", kubernetes={**CLUSTER, **said}))


def test_the_queue_of_the_job_is_the_queue_of_kueue() -> None:
    label = "kueue.x-k8s.io/queue-name"
    assert (
        made("jobset", queue="gold", kubernetes={**CLUSTER, "dialect": "jobset"})[-1]["metadata"]["labels"][label]
        == "gold"
    )
    assert label not in rich("jobset", {})["metadata"]["labels"]


@pytest.mark.parametrize("dialect", ["trainjob", "pytorchjob", "jobset"])
def test_manifests_are_written_out_and_in_full_they_can_be_applied(dialect: str, tmp_path: Path) -> None:
    kept = tmp_path / "code" / ("0" * 64)
    kept.mkdir(parents=True)
    (kept / "train.py").write_text("print(1)")
    asked = spec(dialect, code={"path": "/x", "digest": "0" * 64})
    submission = Submission("j-1", 1, asked, tmp_path / "jobs" / "j-1" / "attempt-1", {"TOKEN": "x"})
    short, text = (Kubernetes().render(submission, full=full) for full in (False, True))
    assert not re.search(r"[:-] [&*]id\d", text)
    config, secret, _ = yaml.safe_load_all(text)
    archive = io.BytesIO(base64.b64decode(config["binaryData"]["code.tar.gz"]))
    with tarfile.open(fileobj=archive) as packed:
        assert packed.getnames() == ["train.py"]
    assert json.loads(secret["stringData"]["secrets.json"])["TOKEN"] == "x"
    assert json.loads(list(yaml.safe_load_all(short))[1]["stringData"]["secrets.json"])["TOKEN"] == HIDDEN


def test_servers_are_a_replicated_job_with_resources_of_their_own() -> None:
    workload = made("jobset", servers={"count": 2, "cpu": 8, "memory": "64Gi"})[-1]
    node, server = workload["spec"]["replicatedJobs"]
    assert (node["template"]["spec"]["completions"], server["template"]["spec"]["completions"]) == (3, 2)
    container = server["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "8000m", "memory": "64Gi"}
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
        (
            {"code": {"git": "/srv/a.git"}},
            "code.git: /srv/a.git is a repository on this machine, which pods do not see",
        ),
        ({"code": {"git": "file:///srv/a.git"}}, "which pods do not see. Give its address as https:// or ssh://"),
        ({"name": "3d-net"}, "name 3d-net: pods are found by names that begin with a letter"),
        ({"queue": "silver"}, "queue silver and kubernetes.queue gold name two queues of Kueue"),
        ({"priority": 7}, "priority 7 means nothing on Kubernetes, which orders by classes"),
        ({"retries": {"max": 2}}, "retries.max is 2, and checkpoints would be lost with the pods of each attempt"),
        ({"retries": {"max": 2}, "checkpoint": {"dir": "c"}}, "Let checkpoint.dir be a path in a dataset of kind nas"),
        ({"retries": {"max": 2}, "checkpoint": {"dir": "/mnt/data/c"}}, "in dataset d, which is readonly"),
    ],
)
def test_what_pods_cannot_do_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(spec("trainjob", **said))


def test_a_checkpoint_folder_that_outlives_pods_allows_retries(caplog: pytest.LogCaptureFixture) -> None:
    data = [FULL["datasets"][0] | {"readonly": False}]
    check(spec("trainjob", retries={"max": 2}, checkpoint={"dir": "/mnt/data/run"}, datasets=data))
    assert not caplog.records
    check(spec("trainjob", retries={"max": 2}, checkpoint={"dir": "/elsewhere"}, datasets=data))
    assert "attempts after the first find no checkpoint there" in caplog.text


def test_patches_merge_by_name_remove_with_null_and_replace_the_rest() -> None:
    base = {"a": {"b": 1, "c": 2}, "l": [{"name": "x", "v": 1}, {"name": "y"}], "t": [{"key": "1"}]}
    patch = {
        "a": {"b": None, "d": {"e": None, "f": 1}},
        "l": [{"name": "x", "w": 2}, {"name": "z"}],
        "t": [{"key": "2"}],
    }
    assert merge(base, patch) == {
        "a": {"c": 2, "d": {"f": 1}},
        "l": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}],
        "t": [{"key": "2"}],
    }


@pytest.mark.parametrize(
    ("count", "said"), [(8 << 30, "8Gi"), (3 << 29, "1536Mi"), (500 * 10**6, "500M"), (1023, "1023")]
)
def test_amounts_of_memory_are_written_as_people_do(count: int, said: str) -> None:
    assert as_quantity(count) == said
    assert to_bytes(said) == count

"""CreateJob requests of PAI-DLC as jobs of ours."""

from __future__ import annotations

import json
import logging

import pytest

from phalanx.errors import SpecError
from phalanx.jobs.spec.code_and_data import Dataset
from phalanx.jobs.spec.dlc import translate
from phalanx.jobs.spec.file import read
from phalanx.jobs.spec.training_job import TrainingJob

REQUEST = {
    "WorkspaceId": "268",
    "DisplayName": "MNIST ddp (test)",
    "JobType": "PyTorchJob",
    "JobSpecs": [
        {"Type": "Master", "PodCount": 1, "Image": "registry/torch:2", "ResourceConfig": {"CPU": "4", "Memory": "8Gi"}},
        {
            "Type": "Worker",
            "PodCount": 3,
            "Image": "registry/torch:2",
            "ResourceConfig": {"CPU": "8", "Memory": "8Gi", "GPU": "1", "SharedMemory": "5Gi"},
        },
    ],
    "UserCommand": "pip list\npython train.py --epochs 3",
    "Envs": {"LR": "0.01", "WORLD_SIZE": "4"},
    "Priority": "8",
    "JobMaxRunningTimeMinutes": 90,
    "CodeSource": {"CodeSourceId": "code-2026", "Branch": "dev", "MountPath": "/root/code"},
    "DataSources": [
        {"DataSourceId": "d-mnist", "MountPath": "/mnt/data"},
        {"Uri": "oss://bucket.oss-cn-beijing.aliyuncs.com/a/b/", "MountPath": "/mnt/oss", "MountAccess": "RO"},
        {"Uri": "nas://fs1.cn-beijing/", "MountPath": "/mnt/nas", "Options": "{}"},
    ],
    "ThirdpartyLibs": ["numpy==1.26"],
    "ResourceId": "rs-1",
    "UserVpc": {},
    "Novelty": 7,
}


def test_a_request_becomes_a_job_whose_world_size_counts_pods() -> None:
    job = TrainingJob.model_validate(translate(REQUEST)[0])
    assert (job.name, job.launch, job.priority, job.max_runtime) == ("mnist-ddp-test", "env", 8, 5400)
    assert (job.resources.nodes, job.resources.procs_per_node) == (4, 1)
    assert (job.resources.cpu, job.resources.memory, job.resources.gpu) == (8, 8 * 2**30, 1)
    assert job.kubernetes.image == "registry/torch:2"
    assert job.command == "bash -c 'pip list\npython train.py --epochs 3'"
    assert job.env == {"LR": "0.01"}
    assert (job.code.name, job.code.ref) == ("code-2026", "dev")
    assert job.datasets == (
        Dataset(name="d-mnist", mount="/mnt/data"),
        Dataset(
            name="data-1",
            mount="/mnt/oss",
            kind="oss",
            uri="oss://bucket/a/b",
            endpoint="https://oss-cn-beijing.aliyuncs.com",
        ),
        Dataset(name="data-2", mount="/mnt/nas", kind="nas", uri="/mnt/nas", file_system="fs1"),
    )


def test_nothing_is_left_out_in_silence() -> None:
    lines = translate(REQUEST)[1]
    expected = (
        "WorkspaceId 268: ",
        "JobSpecs[1].ResourceConfig: all nodes get as much cpu as the largest",
        "JobSpecs[1].SharedMemory 5Gi: ",
        "Envs.WORLD_SIZE: every launch sets it",
        "CodeSource.MountPath /root/code: ",
        "CodeSource code-2026: its repository is not in the file; add it: phalanx code add code-2026",
        "DataSources[0]: where it lies cannot be told; add it: phalanx dataset add d-mnist",
        "DataSources[2].Options {}: ",
        "ThirdpartyLibs ['numpy==1.26']: nothing is installed into a job",
        "ResourceId rs-1: ",
        "Novelty 7: nothing here is like it",
    )
    assert len(lines) == len(expected)
    for start in expected:
        assert any(line.startswith(start) for line in lines), start


def test_a_file_with_a_request_is_read_as_one(caplog: pytest.LogCaptureFixture, phalanx_propagates: None) -> None:
    with caplog.at_level(logging.WARNING, "phalanx.jobs"):
        job = read(json.dumps(REQUEST), flags={"workspace": "team"})
    assert job.workspace == "team"
    assert "not taken over: Novelty 7: nothing here is like it" in caplog.messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JobType": "TFJob"}, "JobType TFJob cannot be taken over, only PyTorchJob"),
        ({"JobSpecs": [{"Type": "PS"}]}, r"JobSpecs\[0\] has the role PS"),
        ({"JobSpecs": [{"PodCount": "many"}]}, r"JobSpecs\[0\].PodCount is many, not a number"),
        ({"JobSpecs": [{"ResourceConfig": {"CPU": "x"}}]}, r"JobSpecs\[0\].ResourceConfig: could not convert"),
        ({"JobSpecs": "x"}, "JobSpecs is x, not a list"),
        ({"Envs": [1]}, r"Envs is \[1\], not fields by name"),
        ({"JobSpecs": []}, "resources.nodes: input should be greater than or equal to 1"),
        ({"DisplayName": ""}, 'name: "" cannot be'),
    ],
)
def test_a_request_that_cannot_be_taken_over_says_why(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(json.dumps(REQUEST | change))

"""Files that others wrote, broken in every way: each parser gives a value or its one error, in little memory."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx as px
from mutations import broken_bytes, broken_documents, broken_json, json_bytes, little_memory
from phalanx.checkpoint.folder.manifest import read_manifest
from phalanx.checkpoint.tensors.safetensors_file import TensorFile, check_file
from phalanx.cluster.calibration.figures import read_measured
from phalanx.cluster.rank_table import rank_table
from phalanx.cluster.spec import files as cluster_files
from phalanx.errors import BackendError, ConfigError, DataError, PhalanxError, PlanError, SpecError
from phalanx.jobs import paths
from phalanx.jobs.attempt import metrics
from phalanx.jobs.attempt.files import read_exit_record, read_spec
from phalanx.jobs.node.exit_reason import failure
from phalanx.jobs.spec.file import read as read_job
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.reports.logs import ENDED
from phalanx.plan.files import load_plan, non_defaults
from phalanx.plan.value import Axis, OnRanks, ParamRule, Plan, Shard
from phalanx.ps.server.log import Log
from phalanx.ps.server.recovery import Recovery
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_service import SnapshotService
from phalanx.ps.serving.server_replica import ServerReplica
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.read import open_snapshot
from phalanx.ps.snapshot.records import read_records
from phalanx.ps.snapshot.save import save_local
from phalanx.ps.table.placement import SHARDS
from phalanx.ps.table.table import make_table
from ps_requests import SPEC, FakeWorker, gradient

broken = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    model = nn.Linear(3, 2)
    path = px.save(folder / "checkpoint", model, torch.optim.Adam(model.parameters()), step=1)
    manifest, marker = next(path.glob("manifest*")), path / "complete.json"
    return path, json.loads(manifest.read_text()), json.loads(marker.read_text())


ODD_VALUES_OF_RANKS = st.dictionaries(
    st.sampled_from(["aliases", "model", "random", "kept", "optimizer", "loader", "x"]),
    st.sampled_from([None, 3, "x", [], {"$tensor": "x"}, {"$items": 3}, {"$tuple": [1]}, {"$tensor": []}]),
    max_size=2,
)


def read_checkpoint(path: Path) -> None:
    manifest = read_manifest(path)
    for file in manifest.files:
        check_file(path, file)
    files = [TensorFile(path / file.name) for file in manifest.files]
    for tensor in manifest.tensors.values():
        for chunk in tensor.saved_chunks:
            files[chunk.rank].tensor(tensor.slot(chunk))


@broken
@given(data=st.data())
def test_a_checkpoint_with_a_broken_manifest(checkpoint: Any, data: st.DataObject) -> None:
    path, valid, marker = checkpoint
    text = data.draw(broken_documents(valid))
    (path / marker["manifest"]).write_bytes(text)
    (path / "complete.json").write_bytes(json_bytes({**marker, "sha256": hashlib.sha256(text).hexdigest()}))
    with little_memory(), suppress(DataError):
        read_checkpoint(path)


def test_a_checkpoint_that_names_a_file_longer_than_the_file_system_takes(checkpoint: Any) -> None:
    path, valid, marker = checkpoint
    (file,) = valid["files"]
    text = json_bytes({**valid, "files": [{**file, "name": "x" * 300}]})
    (path / marker["manifest"]).write_bytes(text)
    (path / "complete.json").write_bytes(json_bytes({**marker, "sha256": hashlib.sha256(text).hexdigest()}))
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        read_manifest(path)


@broken
@given(data=st.data())
def test_a_checkpoint_with_broken_tensors_or_values(checkpoint: Any, data: st.DataObject) -> None:
    path, valid, marker = checkpoint
    rest = {key: value for key, value in valid.items() if key != "values"}
    values = {"of_rank": [0], "unique": [{**valid["values"]["unique"][0], **data.draw(ODD_VALUES_OF_RANKS)}]}
    text = json_bytes({**data.draw(st.just(rest) | broken_json(rest)), "values": values})
    (path / marker["manifest"]).write_bytes(text)
    (path / "complete.json").write_bytes(json_bytes({**marker, "sha256": hashlib.sha256(text).hexdigest()}))
    with little_memory(), suppress(PhalanxError):
        px.load(path, nn.Linear(3, 2))


@broken
@given(data=st.data())
def test_a_checkpoint_with_a_broken_marker(checkpoint: Any, data: st.DataObject) -> None:
    path, valid, marker = checkpoint
    (path / marker["manifest"]).write_bytes(json_bytes(valid))
    (path / "complete.json").write_bytes(data.draw(broken_documents(marker)))
    with suppress(DataError):
        read_checkpoint(path)


HEADER = {
    "__metadata__": {"format": "pt", "phalanx": "note"},
    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "empty": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [24, 24]},
    "count": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
}


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(32)


@broken
@given(
    content=broken_json(HEADER).map(json_bytes).map(with_header)
    | broken_bytes(with_header(json_bytes(HEADER)))
    | st.builds(lambda size, rest: struct.pack("<Q", size) + rest, st.integers(0, 2**64 - 1), st.binary(max_size=20))
)
def test_a_broken_file_of_tensors(folder: Path, content: bytes) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(content)
    with little_memory(), suppress(DataError):
        file = TensorFile(path)
        file.note()
        for slot in file.slots().values():
            with suppress(DataError):
                file.tensor(slot)


# --- snapshots and logs of parameter servers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def snapshot(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "snapshot"
    table = make_table(SPEC)
    table.push(np.arange(4), np.ones((4, 2), np.float32))
    save_local(SnapshotParticipant({"items": table}, range(SHARDS)), path, {"epoch": 3, "x": torch.ones(2)})
    return path, json.loads((path / "manifest.json").read_text())


def read_snapshot(path: Path) -> None:
    read = open_snapshot(path)
    for spec in read.tables.values():
        read.fill(make_table(spec), range(SHARDS))
    read.extra()


@broken
@given(data=st.data())
def test_a_snapshot_with_a_broken_manifest(snapshot: Any, data: st.DataObject) -> None:
    path, valid = snapshot
    fewer = {**valid, "files": dict(list(valid["files"].items())[:1])}
    (path / "manifest.json").write_bytes(data.draw(broken_documents(fewer)))
    with little_memory(), suppress(DataError, ConfigError):
        read_snapshot(path)


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "", ".", "/etc/hostname", "a\0b"])
def test_no_file_of_a_snapshot_leads_out_of_its_folder(snapshot: Any, name: str) -> None:
    path, valid = snapshot
    shard = next(iter(valid["files"]))
    files = {**valid["files"], shard: {**valid["files"][shard], "name": name}}
    (path / "manifest.json").write_bytes(json_bytes({**valid, "files": files}))
    with pytest.raises(DataError, match="is no file of a snapshot"):
        open_snapshot(path)


@pytest.mark.parametrize("base", [".", "../snapshot", "nowhere", "a\0b"])
def test_a_snapshot_that_is_its_own_base_is_an_error(snapshot: Any, base: str) -> None:
    path, valid = snapshot
    names = {"mode": "delta", "base": {"save": valid["save"], "directory": base, "tables": ["items"]}}
    (path / "manifest.json").write_bytes(json_bytes({**valid, **names}))
    with pytest.raises((DataError, ConfigError)):
        open_snapshot(path)


def record(meta: bytes, body: bytes) -> bytes:
    """Return a record whose checksums hold, whatever it says."""
    checked = struct.pack("<IQII", len(meta), len(body), zlib.crc32(meta), zlib.crc32(body))
    return b"PXR1" + struct.pack("<I", zlib.crc32(checked)) + checked + meta + body


def shard_record(since: int = 0) -> tuple[int, dict[str, Any], bytes]:
    """Return the shard of id 7, and the text and bytes of its record, of a delta if it is since a tick."""
    table = make_table(SPEC)
    table.push(np.array([7]), np.ones((1, 2), np.float32))
    shard = next(shard for shard in range(SHARDS) if len(table.keys(shard)))
    table.push(np.array([7]), np.ones((1, 2), np.float32))
    columns = table.export(shard, since)
    arrays = [columns.keys, columns.ticks, columns.rows, columns.waiting_keys, columns.waiting_ticks]
    arrays += [columns.waiting_counts, columns.days]
    meta = {"table": "items", "shard": shard, "tick": columns.tick, "whole": True, "format": "full"}
    if since:
        arrays.append(np.array([7], np.int64))
        meta |= {"whole": False, "format": "changes", "decays": 0}
    meta["arrays"] = [[array.dtype.name, list(array.shape)] for array in arrays]
    return shard, meta, b"".join(array.tobytes() for array in arrays)


SHARD, SHARD_META, SHARD_BODY = shard_record()
_, CHANGES_META, CHANGES_BODY = shard_record(since=1)


def broken_records(meta: dict[str, Any], body: bytes) -> st.SearchStrategy[bytes]:
    return (
        broken_documents(meta).map(lambda text: record(text, body))
        | st.builds(record, st.just(json_bytes(meta)), broken_bytes(body))
        | broken_bytes(record(json_bytes(meta), body))
    )


@broken
@given(content=broken_records(SHARD_META, SHARD_BODY) | broken_records(CHANGES_META, CHANGES_BODY))
def test_a_snapshot_with_a_broken_shard(folder: Path, snapshot: Any, content: bytes) -> None:
    path, valid = snapshot
    (path / "shard-0000-aaaaaaaa.bin").write_bytes(content)
    file = {"name": "shard-0000-aaaaaaaa.bin", "bytes": len(content), "checksum": 0}
    (path / "manifest.json").write_bytes(json_bytes({**valid, "files": {str(SHARD): file}}))
    with little_memory(), suppress(DataError):
        table = make_table(SPEC)
        open_snapshot(path).fill(table, [SHARD])
        table.push(np.array([7, 8]), np.ones((2, 2), np.float32))  # what was taken over can be used
        table.shrink()
        table.export(SHARD)


def served(folder: Path) -> Path:
    """Return the folder of a server that took a push."""
    state = folder / "state"
    service = Service()
    recovery = Recovery(service, SnapshotService(service), state)
    recovery.recover("job")
    worker = FakeWorker(service)
    worker.declare()
    worker.push(gradient((1, 2), 1.0))
    recovery.close()
    return state


@pytest.fixture(scope="module")
def log_records(folder: Path) -> tuple[Path, list[tuple[dict[str, Any], bytes]]]:
    state = served(folder)
    (segment,) = [path for path in state.glob("log-*") if path.stat().st_size]
    records = []
    for read in read_records(segment):
        meta = {**read.meta, "arrays": [[array.dtype.name, list(array.shape)] for array in read.arrays]}
        records.append((meta, b"".join(array.tobytes() for array in read.arrays)))
    return state, records


def recovered(state: Path) -> Service:
    service = Service()
    recovery = Recovery(service, SnapshotService(service), state)
    try:
        recovery.recover("job")
    finally:
        if service.log is not None:
            recovery.close()
    return service


@broken
@given(data=st.data())
def test_a_server_with_a_broken_log(log_records: Any, data: st.DataObject) -> None:
    state, records = log_records
    (first, first_body), (second, second_body) = records
    valid = record(json_bytes(first), first_body) + record(json_bytes(second), second_body)
    changed = data.draw(
        broken_json(first).map(lambda meta: record(json_bytes(meta), first_body))
        | broken_json(second).map(
            lambda meta: record(json_bytes(first), first_body) + record(json_bytes(meta), second_body)
        )
        | broken_bytes(valid)
    )
    for path in state.glob("log-*"):
        path.unlink()
    (state / "log-00000001").write_bytes(changed)
    with little_memory(), suppress(DataError):
        ServerReplica(state).poll()
    with little_memory(), suppress(DataError):
        recovered(state)


def test_other_files_beside_a_log_are_left_alone(tmp_path: Path) -> None:
    state = served(tmp_path)
    (state / "log-old").write_text("a note")
    (state / "log-").write_text("")
    assert recovered(state).state.tables.tables["items"].rows == 2
    assert Log(state, "process").segment > 1


# --- rank tables, clusters, Plans -------------------------------------------------------------------------------------

SERVERS = json.loads(rank_table.parse(
    json.dumps({
        "version": "1.0", "server_count": "1", "status": "completed",
        "server_list": [{"server_id": "10.0.0.1", "device": [
            {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"},
            {"device_id": "1", "rank_id": "1"},
        ]}],
    }), "made").to_json("server"))  # fmt: skip
GROUPS = json.loads(rank_table.parse(json.dumps(SERVERS), "made").to_json("group", "0x0000"))


@broken
@given(content=broken_documents(SERVERS) | broken_documents(GROUPS))
def test_a_broken_rank_table(folder: Path, content: bytes) -> None:
    path = folder / "rank_table.json"
    path.write_bytes(content)
    with little_memory(), suppress(ConfigError):
        table = rank_table.load(str(path))
        assert table.digest
        assert table.ranks_by_server
    with little_memory(), suppress(ConfigError):
        cluster_files.read(path, "cpu")


CLUSTER = {
    "nodes": [{"device": "h100", "devices": 8, "count": 2, "gbps": 400.0}],
    "devices": [{"name": "mine", "like": "h100", "tflops": {"bf16": 900}}],
}


@broken
@given(content=broken_documents(CLUSTER))
def test_a_broken_description_of_a_cluster(folder: Path, content: bytes) -> None:
    for name in ("cluster.json", "cluster.toml"):
        (folder / name).write_bytes(content)
        with little_memory(), suppress(ConfigError):
            cluster_files.read(folder / name, "")
    with suppress(ConfigError):
        read_measured(folder / "cluster.json")


PLAN = {
    "version": 1,
    **non_defaults(
        Plan(
            mesh=(Axis(name="dp", size=2),),
            params=(ParamRule(match="*", place=OnRanks(layout={"dp": Shard(dim=0)})),),
        )
    ),
}


@broken
@given(content=broken_documents(PLAN))
def test_a_broken_plan(folder: Path, content: bytes) -> None:
    path = folder / "plan.json"
    path.write_bytes(content)
    with little_memory(), suppress(PlanError):
        plan = load_plan(path)
        assert plan.digest()
        plan.rule_for("layer.weight")


# --- jobs -------------------------------------------------------------------------------------------------------------

JOB = {
    "name": "mnist",
    "command": "python train.py",
    "code": {"path": "."},
    "resources": {"nodes": 1, "cpu": 2, "memory": "8Gi"},
    "env": {"A": "b"},
    "datasets": [{"name": "d", "path": "/data", "mount": "/d"}],
    "max_runtime": "2h",
}
REQUEST = {
    "JobType": "PyTorchJob",
    "DisplayName": "mnist",
    "UserCommand": "python train.py",
    "JobSpecs": [
        {"Type": "Worker", "PodCount": 1, "Image": "i", "ResourceConfig": {"CPU": "2", "GPU": 1, "Memory": "8Gi"}}
    ],
    "Envs": {"A": "b"},
    "CodeSource": {"CodeSourceId": "c", "Branch": "main"},
    "DataSources": [{"DataSourceId": "d", "MountPath": "/d"}],
    "Priority": 1,
}
ODD_YAML = [
    "2020-99-99", "!!int x", "!!float x", "!!timestamp x", "!!bool x", "!!binary x", "!!int ''", "1:2:99:99", "a: 0o9",
    "? [a]\n: b", "? {a: b}\n: c", "a: &a [*a]", "&a {b: *a}", "<<: 3", "<<: [1]", "9" * 5000, "a: " + "9" * 5000,
    "!!python/object:os.system {}", "%YAML 9.9\n---\n", "\x01", "a: b: c", "- - - -", "--- 1\n--- 2", "0x" + "f" * 5000,
    "'\\ud800'", '"\\ud800"', "[" * 3000, "- " * 3000, "{a: " * 3000,
]  # fmt: skip


@broken
@given(
    content=(broken_documents(JOB) | broken_documents(REQUEST)).filter(lambda text: len(text) < 20_000)
    | st.sampled_from(ODD_YAML).map(str.encode)
)
def test_a_broken_job_file(folder: Path, content: bytes) -> None:
    path = folder / "job.yaml"
    path.write_bytes(content)
    with little_memory(), suppress(SpecError):
        read_job(path)


@broken
@given(value=broken_json(JOB) | broken_json(REQUEST), text=broken_bytes(yaml.safe_dump(JOB).encode()))
def test_a_broken_job_as_yaml(folder: Path, value: Any, text: bytes) -> None:
    path = folder / "job.yaml"
    with suppress(yaml.YAMLError, UnicodeEncodeError):
        text = yaml.safe_dump(value).encode()
    path.write_bytes(text)
    with little_memory(), suppress(SpecError):
        read_job(path)


@pytest.mark.parametrize("text", ODD_YAML)
def test_odd_yaml_in_a_setting_is_named(text: str) -> None:
    with suppress(SpecError):
        read_job(yaml.safe_dump(JOB), settings=[f"env={text}"])


def test_aliases_of_aliases_are_counted_before_they_are_written_out() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with little_memory(), pytest.raises(SpecError, match="holds more than 100,000 values once its aliases"):
        read_job("\n".join(lines))
    assert read_job("defaults: &x {A: b}\n".replace("defaults", "env") + "name: n\ncommand: python t.py\n").env == {
        "A": "b"
    }


@broken
@given(content=broken_documents({"job": "j", "attempt": 1, "spec": JOB, "home": "/h", "checkpoint": "/c"}))
def test_a_broken_order_to_a_node(folder: Path, content: bytes) -> None:
    (folder / "attempt.json").write_bytes(content)
    with suppress(BackendError):
        read_spec(folder)


@broken
@given(content=broken_documents({"outcome": "failed", "cause": "user_code", "message": "m", "rank": 1, "exit_code": 3}))
def test_a_broken_exit_record(folder: Path, content: bytes) -> None:
    paths.exit_record(folder, 0).parent.mkdir(parents=True, exist_ok=True)
    paths.exit_record(folder, 0).write_bytes(content)
    read_exit_record(folder, 0)


EVENT = {"step": 3, "loss": 0.5, "time": 1.0}


@broken
@given(
    lines=st.lists(broken_documents(EVENT), max_size=5),
    name=st.sampled_from(["0", "1", "²", "x", "", "٣", "-1", "9" * 30]),
    ended=broken_documents({"first": {"rank": 0, "role": "worker", "traceback": "", "last_lines": []}, "said": "x"}),
)
def test_what_a_job_writes_in_place_of_reports(folder: Path, lines: list[bytes], name: str, ended: bytes) -> None:
    """The folder of logs is the job's to write: whoever shows it must not fail for what is there."""
    logs = paths.logs(folder)
    logs.mkdir(parents=True, exist_ok=True)
    for path in logs.iterdir():
        path.unlink()
    (logs / f"events.{name}.jsonl").write_bytes(b"\n".join(lines))
    for rank in metrics.ranks(folder):
        metrics.read(folder, rank)
    (logs / ENDED).write_bytes(ended)
    failure(TrainingJob(name="n", command="python t.py"), 0, 1, output=logs / "out", logs=logs)

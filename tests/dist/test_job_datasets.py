"""Datasets from S3, OSS and HTTP servers on this machine, and mounts that one process alone sees."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import file_server
from phalanx.errors import BackendError, DataError, SpecError
from phalanx.jobs.sources.datasets import pin, provide
from phalanx.jobs.sources.mounts import Bind, check, prefix
from phalanx.jobs.spec.code_and_data import Dataset

pytestmark = pytest.mark.dist

KEY = "identity:key"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest) -> Any:
    login = {"aws_access_key_id": "identity", "aws_secret_access_key": "key", "region_name": "us-east-1"}
    made = boto3.resource("s3", endpoint_url=endpoint, **login).create_bucket(Bucket=f"b{abs(hash(request.node.name))}")
    for name in ("mnist/train/a.bin", "mnist/train/b.bin", "mnist/labels.txt", "mnist-other/x"):
        made.put_object(Key=name, Body=name.encode() * 1000, ACL="public-read" if "labels" in name else "private")
    return made


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_a_folder_of_a_bucket_is_pinned_fetched_once_and_cannot_be_written(
    bucket: Any, endpoint: str, tmp_path: Path, kind: str
) -> None:
    said = Dataset(
        name="mnist", kind=kind, uri=f"{kind}://{bucket.name}/mnist", endpoint=endpoint, secret="K", mount="in"
    )
    dataset = pin(said, None, KEY)
    assert dataset.size == sum(
        len(name) * 1000 for name in ("mnist/train/a.bin", "mnist/train/b.bin", "mnist/labels.txt")
    )
    assert pin(dataset, None, KEY) == dataset
    works = [tmp_path / f"work-{node}" for node in range(2)]
    with ThreadPoolExecutor() as nodes:
        found = list(nodes.map(lambda work: provide(dataset, tmp_path / "home", work, KEY), works))
    assert found == [work / "in" for work in works]
    assert len({place.resolve() for place in found}) == 1
    files = {str(path.relative_to(found[0])): path for path in found[0].rglob("*") if path.is_file()}
    assert sorted(files) == ["labels.txt", "train/a.bin", "train/b.bin"]
    assert files["train/b.bin"].read_bytes() == b"mnist/train/b.bin" * 1000
    assert files["train/b.bin"].stat().st_mode & 0o222 == 0

    bucket.put_object(Key="mnist/labels.txt", Body=b"new")
    assert provide(dataset, tmp_path / "home", works[0], KEY) == found[0], "what was fetched stays what it was"
    with pytest.raises(DataError, match="changed since submission"):
        provide(dataset, tmp_path / "elsewhere", works[0], KEY)
    with pytest.raises(SpecError, match="changed: expected version"):
        pin(dataset, None, KEY)
    assert not list((tmp_path / "elsewhere").rglob("*.part"))


def test_one_object_that_anybody_may_read_is_a_file(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    dataset = pin(Dataset(name="d", kind="s3", uri=f"s3://{bucket.name}/mnist/labels.txt", endpoint=endpoint), None)
    found = provide(dataset, tmp_path, tmp_path)
    assert (found.name, found.read_bytes()) == ("labels.txt", b"mnist/labels.txt" * 1000)


@pytest.mark.parametrize(
    ("uri", "secret", "message"),
    [
        ("s3://no-such-bucket/x", None, "cannot be read without a secret: "),
        ("s3://{bucket}/absent", None, "holds nothing. Check bucket and path"),
        ("s3://{bucket}/mnist", "only-an-identity", "Store it as ACCESS_KEY_ID:ACCESS_KEY_SECRET"),
    ],
)
def test_what_a_bucket_does_not_have_or_allow_is_said(
    bucket: Any, endpoint: str, uri: str, secret: str | None, message: str
) -> None:
    dataset = Dataset(name="d", kind="s3", uri=uri.format(bucket=bucket.name), endpoint=endpoint)
    with pytest.raises(SpecError, match=message) as caught:
        pin(dataset, None, secret)
    assert "only-an-identity" not in str(caught.value)


def test_a_service_that_is_not_there_is_said(unused_port: int) -> None:
    dataset = Dataset(name="d", kind="s3", uri="s3://bucket/x", endpoint=f"http://127.0.0.1:{unused_port}")
    with pytest.raises(SpecError, match="Check address, endpoint and secret"):
        pin(dataset, None)


def test_names_that_lead_out_of_the_cache_are_refused(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    bucket.put_object(Key="bad/../../../up.txt", Body=b"x")
    dataset = Dataset(name="d", kind="s3", uri=f"s3://{bucket.name}/bad", endpoint=endpoint)
    with pytest.raises(DataError, match="which is no path"):
        provide(dataset, tmp_path / "home", tmp_path)
    assert not list(tmp_path.rglob("up.txt"))


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[file_server.Server]:
    for name in file_server.PROXIES:
        monkeypatch.delenv(name, raising=False)
    with file_server.serving() as running:
        running.etags["data.bin"] = '"1"'
        yield running


def test_a_file_of_a_web_server_is_pinned_and_fetched_once(web: file_server.Server, tmp_path: Path) -> None:
    dataset = pin(Dataset(name="d", kind="http", uri=web.url("data.bin")), None)
    assert (dataset.version, dataset.size) == ('"1"', len(file_server.CONTENT))
    found = provide(dataset, tmp_path, tmp_path)
    assert found.read_bytes() == file_server.CONTENT
    asked = len(web.asked)
    assert provide(dataset, tmp_path, tmp_path) == found
    assert len(web.asked) == asked
    web.etags["data.bin"] = '"2"'
    with pytest.raises(DataError, match="changed since submission"):
        provide(dataset, tmp_path / "elsewhere", tmp_path)


def test_a_file_with_another_checksum_is_not_used(web: file_server.Server, tmp_path: Path) -> None:
    right = Dataset(name="d", kind="http", uri=web.url("data.bin"), sha256=sha256(file_server.CONTENT).hexdigest())
    assert provide(pin(right, None), tmp_path, tmp_path).exists()
    with pytest.raises(DataError, match="has the checksum"):
        provide(pin(right.model_copy(update={"sha256": "0" * 64}), None), tmp_path, tmp_path)


def test_an_address_without_a_file_is_said(web: file_server.Server, unused_port: int) -> None:
    with pytest.raises(SpecError, match="the server said 404 Not Found"):
        pin(Dataset(name="d", kind="http", uri=web.url("absent")), None)
    with pytest.raises(SpecError, match="cannot be reached"):
        pin(Dataset(name="d", kind="http", uri=f"http://127.0.0.1:{unused_port}/x"), None)


def test_an_absolute_mount_is_seen_by_one_process_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("5")
    target = tmp_path / "mnt"
    target.mkdir()
    found = [Bind(tmp_path / "data", target, True)]
    try:
        check(found)
    except BackendError as error:
        pytest.skip(f"no namespaces here: {error}")
    script = f"id -u; cat {target}/x; touch {target}/y 2>/dev/null || echo readonly"
    done = subprocess.run([*prefix(found), "sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{os.getuid()}\n5readonly\n"
    assert list(target.iterdir()) == []


def test_a_mount_that_cannot_be_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BackendError, match=r"file/under cannot be mounted for a job on this machine: .* relative mount"
    ):
        check([Bind(tmp_path, tmp_path / "file" / "under", True)])

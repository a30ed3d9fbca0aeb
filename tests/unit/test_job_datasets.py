"""Datasets that are folders and files of this machine, and where scripts find them."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from phalanx.errors import BackendError, SpecError
from phalanx.jobs.sources.datasets import content, pin, provide
from phalanx.jobs.sources.mounts import Bind, binds, prefix
from phalanx.jobs.spec.code_and_data import Dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(b"12345")
    return tmp_path / "data"


def test_a_path_is_meant_from_where_the_job_is_submitted(data: Path) -> None:
    assert pin(Dataset(name="d", kind="local", uri="data"), data.parent).uri == str(data)
    found = pin(Dataset(name="d", kind="local", uri="data/x.bin"), data.parent)
    assert (found.size, found.version) == (5, str((data / "x.bin").stat().st_mtime_ns))
    assert pin(found, None) == found
    with pytest.raises(SpecError, match="is a relative path, and this request comes from no folder"):
        pin(Dataset(name="d", kind="local", uri="data"), None)


def test_what_is_not_there_is_named(data: Path) -> None:
    with pytest.raises(SpecError, match="absent cannot be read on this machine: No such file"):
        pin(Dataset(name="d", kind="local", uri="absent"), data)
    nas = Dataset(name="d", kind="nas", uri="/no/such/mount", file_system="fs-1")
    with pytest.raises(SpecError, match="Mount file system fs-1 there"):
        pin(nas, data)
    assert pin(nas, None, on_this_machine=False) == nas, "pods mount it themselves"
    with pytest.raises(SpecError, match="which pods do not see"):
        pin(Dataset(name="d", kind="local", uri=str(data)), None, on_this_machine=False)
    (data / "empty").mkdir()
    with pytest.raises(SpecError, match="is empty"):
        pin(Dataset(name="d", kind="local", uri="empty"), data)
    with pytest.raises(BackendError, match="this machine cannot read /no/such/mount"):
        provide(nas, data, data)


def test_a_file_that_was_changed_is_said(
    data: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    pinned = pin(Dataset(name="d", kind="local", uri=str(data / "x.bin")), None)
    os.utime(data / "x.bin", ns=(1, 1))
    with caplog.at_level(logging.WARNING, "phalanx.jobs"):
        assert pin(pinned, None).version == "1"
    assert "was changed since it was pinned" in caplog.text


def test_a_relative_mount_is_a_link_that_several_nodes_may_make(data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    dataset = Dataset(name="d", kind="local", uri=str(data), mount="in/put")
    assert provide(dataset, tmp_path, work) == provide(dataset, tmp_path, work) == work / "in" / "put"
    assert (work / "in" / "put" / "x.bin").read_bytes() == b"12345"
    assert provide(dataset.model_copy(update={"mount": None}), tmp_path, work) == data
    assert provide(dataset.model_copy(update={"mount": "/mnt/d"}), tmp_path, work) == Path("/mnt/d")


def test_a_mount_takes_nothing_of_the_code_and_stays_in_it(data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").mkdir()
    (work / "out").symlink_to(tmp_path)
    dataset = Dataset(name="d", kind="local", uri=str(data), mount="data")
    with pytest.raises(BackendError, match="the code has something at data itself"):
        provide(dataset, tmp_path, work)
    with pytest.raises(BackendError, match="a link leads out/x out of the code"):
        provide(dataset.model_copy(update={"mount": "out/x"}), tmp_path, work)
    assert not (tmp_path / "x").exists()


def test_fetched_content_lies_apart_by_address_and_version(tmp_path: Path) -> None:
    one = Dataset(name="d", kind="s3", uri="s3://bucket/mnist", version="1")
    others = [{"version": "2"}, {"uri": "s3://other/mnist"}, {"endpoint": "http://127.0.0.1:1"}]
    places = {content(one.model_copy(update=change), tmp_path) for change in [{}, *others]}
    assert len(places) == 4
    assert {place.name for place in places} == {"mnist"}
    odd = Dataset(name="d", kind="http", uri="https://host/a/%2e%2e")
    assert content(odd, tmp_path).is_relative_to(tmp_path / "cache")
    assert content(odd, tmp_path).name == "data"


def test_only_absolute_mounts_away_from_the_content_are_bound(data: Path, tmp_path: Path) -> None:
    datasets = [
        Dataset(name="a", kind="local", uri=str(data), mount="/mnt/a"),
        Dataset(name="b", kind="nas", uri="/mnt/b", mount="/mnt/b", file_system="fs"),
        Dataset(name="c", kind="local", uri=str(data), mount="c"),
        Dataset(name="d", kind="local", uri=str(data)),
    ]
    assert binds(datasets, tmp_path) == [Bind(data, Path("/mnt/a"), True)]
    assert prefix([]) == []


def test_no_path_becomes_a_word_of_a_shell() -> None:
    words = prefix([Bind(Path("/a; touch x"), Path("/mnt/$(id)"), False)])
    assert [word for word in words if "touch" in word or "$(id)" in word] == ["/a; touch x", "/mnt/$(id)"]
    assert subprocess.list2cmdline(words).count("bind") == 1

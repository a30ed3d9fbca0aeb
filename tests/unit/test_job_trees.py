"""Trees of code in archives."""

import io
import tarfile

import pytest

from phalanx.errors import SpecError
from phalanx.jobs.sources.archive import pack, unpack


def test_what_is_packed_is_unpacked(tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "train.py").write_text("print(1)\n")
    (tree / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (tree / "sub" / "run.sh").chmod(0o755)
    (tree / "sub" / "here").symlink_to("run.sh")
    (tree / "data.bin").write_text("left out")
    (tree / ".phalanxignore").write_text("*.bin\n")
    pack(tree, tmp_path / "a.tar.gz")
    into = tmp_path / "into"
    into.mkdir()
    unpack(tmp_path / "a.tar.gz", into)
    assert sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()) == [
        ".phalanxignore",
        "sub/here",
        "sub/run.sh",
        "train.py",
    ]
    assert (into / "sub" / "run.sh").stat().st_mode & 0o100


@pytest.mark.parametrize("name", ["../up.py", "/etc/up.py", "a/../../up.py"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    _refused(tmp_path, tarfile.TarInfo(name), "cannot be read|must be relative")
    assert not (tmp_path / "up.py").exists()


def test_links_and_devices_are_refused(tmp_path):
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        member = tarfile.TarInfo("x")
        member.type = kind
        member.linkname = "/etc/passwd"
        _refused(tmp_path, member, "no file or folder|cannot be read")


def test_no_archive_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no archive at all")
    with pytest.raises(SpecError, match="cannot be read"):
        unpack(tmp_path / "a.tar", tmp_path)


def _refused(tmp_path, member, message):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member, io.BytesIO(b""))
    into = tmp_path / "into"
    into.mkdir(exist_ok=True)
    with pytest.raises(SpecError, match=message):
        unpack(tmp_path / "a.tar", into)

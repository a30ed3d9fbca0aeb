"""Which files of a folder are a job's code, and what keeps them apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import BackendError, SpecError
from phalanx.jobs.sources import code_tree
from phalanx.jobs.sources.code import check_out_code, pin, store_tree, tree
from phalanx.jobs.sources.code_tree import list_entries
from phalanx.jobs.spec.code_and_data import Code


def folder(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def paths(root: Path) -> list[str]:
    return [entry.path for entry in list_entries(root)]


def test_what_the_ignore_files_leave_out_is_not_code(tmp_path: Path) -> None:
    folder(
        tmp_path,
        {
            ".gitignore": "*.log\n/out/\n!keep.log\n",
            "train.py": "",
            "a.log": "",
            "keep.log": "",
            "out/x": "",
            "lib/out/x": "",
            "lib/.gitignore": "*.bin\n!b.log\n",
            "lib/b.log": "",
            "lib/c.bin": "",
            "d.bin": "",
            ".git/config": "",
            "lib/__pycache__/x.pyc": "",
            ".venv/bin/python": "",
        },
    )
    assert paths(tmp_path) == [
        *(".gitignore", "d.bin", "keep.log", "lib/.gitignore", "lib/b.log", "lib/out/x", "train.py"),
    ]
    (tmp_path / ".phalanxignore").write_text("lib\n")
    assert paths(tmp_path) == [".gitignore", ".phalanxignore", "a.log", "d.bin", "keep.log", "out/x", "train.py"]


def test_ignore_files_above_count_up_to_the_top_of_the_repository(tmp_path: Path) -> None:
    folder(tmp_path, {".gitignore": "*.py\n", "top/.git/config": "", "top/.gitignore": "*.log\n/lib/x\n"})
    folder(tmp_path / "top" / "lib", {"x": "", "a.log": "", "train.py": "", "cache/.gitignore": "*\n", "cache/y": ""})
    assert paths(tmp_path / "top" / "lib") == ["train.py"]
    (tmp_path / "top" / "lib" / ".git").mkdir()
    assert paths(tmp_path / "top" / "lib") == ["a.log", "train.py", "x"]


def test_a_tree_is_kept_once_for_each_content_and_copied_whole(tmp_path: Path) -> None:
    code, home = folder(tmp_path / "code", {"train.py": "1", "lib/run.sh": "x"}), tmp_path / "home"
    (code / "lib" / "run.sh").chmod(0o755)
    (code / "link.py").symlink_to("lib/run.sh")
    first = pin(Code(path="code"), home, tmp_path)
    assert first.path == str(code)
    assert first.digest is not None
    kept = (tree(first, home) / "train.py").stat().st_ino
    assert pin(Code(path=str(code)), home, None) == first
    assert (tree(first, home) / "train.py").stat().st_ino == kept, "the same content is not copied again"
    folder(code, {"train.py": "2"})
    second = pin(Code(path=str(code)), home, None)
    assert second.digest != first.digest

    into = folder(tmp_path / "work", {"left.over": "from a node that was killed"})
    check_out_code(first, home, into)
    assert sorted(entry.path for entry in list_entries(into)) == ["lib/run.sh", "link.py", "train.py"]
    assert (into / "train.py").read_text() == "1"
    assert os.access(into / "link.py", os.X_OK)
    (into / "train.py").write_text("changed by the job")
    assert (tree(first, home) / "train.py").read_text() == "1"
    assert [path.name for path in (home / "code").iterdir() if path.name.endswith(".part")] == []


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    one, other = (folder(tmp_path / name, {"a": "1", "b/c": "2"}) for name in ("one", "other"))
    assert store_tree(one, tmp_path / "home") == store_tree(other, tmp_path / "home")
    (other / "a").chmod(0o755)
    assert store_tree(one, tmp_path / "home") != store_tree(other, tmp_path / "home")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "lib/../../outside", "/"])
def test_links_that_lead_out_are_refused(tmp_path: Path, target: str) -> None:
    code = folder(tmp_path / "code", {"train.py": "", "lib/x": ""})
    (code / "way").symlink_to(target)
    with pytest.raises(SpecError, match="the link way leads out of the code"):
        store_tree(code, tmp_path / "home")
    (code / ".phalanxignore").write_text("way\n")
    store_tree(code, tmp_path / "home")


def test_a_link_through_another_link_cannot_lead_out(tmp_path: Path) -> None:
    code = folder(tmp_path / "code", {"lib/x": "", ".phalanxignore": "up\n"})
    (code / "up").symlink_to("..")
    (code / "way").symlink_to("up/other")
    with pytest.raises(SpecError, match="the link way leads out"):
        store_tree(code, tmp_path / "home")


def test_too_large_a_tree_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tree, "MOST_BYTES", 100)
    code = folder(tmp_path / "code", {"train.py": "x" * 10, "data/big.bin": "x" * 95, "data/small.bin": "x"})
    with pytest.raises(SpecError, match=r"3 files with .*largest are data/big.bin .*, train.py .*\.phalanxignore"):
        store_tree(code, tmp_path / "home")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="pipe is no file, folder or link"):
        list_entries(tmp_path)
    with pytest.raises(SpecError, match="absent is no folder"):
        list_entries(tmp_path / "absent")


def test_code_that_cannot_be_found_again_says_so(tmp_path: Path) -> None:
    folder(tmp_path / "code", {"train.py": ""})
    with pytest.raises(SpecError, match="'code' is a relative path, and this request comes from no folder"):
        pin(Code(path="code"), tmp_path, None)
    with pytest.raises(SpecError, match="the code has no folder 'src'"):
        pin(Code(path="code", subdir="src"), tmp_path, tmp_path)
    gone = Code(path="code", digest="0" * 64)
    with pytest.raises(SpecError, match="no such tree is kept"):
        pin(gone, tmp_path, tmp_path)
    with pytest.raises(BackendError, match="is not kept in"):
        check_out_code(gone, tmp_path, tmp_path / "work")


def test_a_tree_that_was_sent_is_named_by_its_digest(tmp_path: Path) -> None:
    sent = Code(digest=store_tree(folder(tmp_path / "sent", {"train.py": ""}), tmp_path / "home"))
    assert pin(sent, tmp_path / "home", None) == sent

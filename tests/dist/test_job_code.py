"""Code from git repositories: on this machine, over HTTP, and behind a password."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from git_server import commit, git, serving
from phalanx.errors import SpecError
from phalanx.jobs.sources.code import check_out_code, pin, tree
from phalanx.jobs.sources.code_tree import list_entries
from phalanx.jobs.sources.git import list_unpushed
from phalanx.jobs.spec.code_and_data import Code

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose main branch has two commits, with a tag on the first."""
    root = tmp_path_factory.mktemp("repositories") / "code"
    commit(root, {"train.py": "1", "lib/x.py": ""})
    git(root, "tag", "--annotate", "v1", "--message", "first")
    commit(root, {"train.py": "2"})
    git(root, "branch", "feature/x", "v1^{commit}")
    return root


def test_a_ref_is_fixed_to_a_commit_whose_tree_is_kept(repository: Path, tmp_path: Path) -> None:
    head, first = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "v1^{commit}")
    address = repository.as_uri()
    for ref, expected in (("HEAD", head), ("main", head), ("v1", first), ("feature/x", first), ("refs/tags/v1", first)):
        assert pin(Code(git=address, ref=ref), tmp_path, None).commit == expected, ref
    code = pin(Code(git=address, ref=first, subdir="lib"), tmp_path, None)
    assert code.commit == first
    check_out_code(code, tmp_path, tmp_path / "work")
    assert [entry.path for entry in list_entries(tmp_path / "work", everything=True)] == ["lib/x.py", "train.py"]
    assert (tmp_path / "work" / "train.py").read_text() == "1"
    assert not (tmp_path / "work" / ".git").exists()
    assert len([path for path in (tmp_path / "code").iterdir() if path.is_dir()]) == 2, "one tree for each commit"


def test_a_path_of_a_repository_is_meant_from_where_the_job_is_submitted(repository: Path, tmp_path: Path) -> None:
    code = pin(Code(git="./code"), tmp_path, repository.parent)
    assert code.git == str(repository)


def test_a_commit_stays_when_the_branch_moves_on(tmp_path: Path) -> None:
    commit(tmp_path / "code", {"train.py": "1"})
    code = pin(Code(git=str(tmp_path / "code"), ref="main"), tmp_path / "home", None)
    commit(tmp_path / "code", {"train.py": "2"})
    assert pin(code, tmp_path / "home", None) == code
    check_out_code(code, tmp_path / "elsewhere", tmp_path / "work")
    assert (tmp_path / "work" / "train.py").read_text() == "1"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"ref": "mian"}, r"no branch or tag 'mian'. Did you mean 'main'\?"),
        ({"ref": "0" * 40}, "cannot be read: .*0000"),
        ({"subdir": "src"}, "the code has no folder 'src'"),
        ({"git": "/nowhere/at/all"}, "cannot be read: .*/nowhere/at/all"),
    ],
)
def test_a_repository_or_ref_that_is_not_there_is_named(
    repository: Path, tmp_path: Path, code: dict[str, str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        pin(Code.model_validate({"git": repository.as_uri(), **code}), tmp_path, None)
    assert not list(tmp_path.glob("code/.*.part"))


def test_a_branch_and_a_tag_of_one_name_are_told_apart_by_the_user(tmp_path: Path) -> None:
    commit(tmp_path / "code", {"train.py": "1"})
    git(tmp_path / "code", "tag", "both")
    commit(tmp_path / "code", {"train.py": "2"})
    git(tmp_path / "code", "branch", "both")
    with pytest.raises(SpecError, match="Write refs/heads/both or refs/tags/both"):
        pin(Code(git=str(tmp_path / "code"), ref="both"), tmp_path / "home", None)
    assert pin(Code(git=str(tmp_path / "code"), ref="refs/heads/both"), tmp_path / "home", None).commit


def test_what_a_working_copy_has_that_the_job_will_not_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    commit(tmp_path / "served" / "code", {"train.py": "1"})
    with serving(tmp_path / "served") as server, caplog.at_level(logging.WARNING, "phalanx.jobs"):
        address = f"http://127.0.0.1:{server.server_port}/code/.git"
        git(tmp_path, "clone", "--quiet", address, "copy")
        copy = tmp_path / "copy"
        pin(Code(git=address), tmp_path / "home", copy)
        assert caplog.messages == []
        commit(copy, {"train.py": "2"})
        (copy / "train.py").write_text("3")
        (copy / "new.py").write_text("")
        pin(Code(git=address), tmp_path / "home", copy)
        git(copy, "push", "--quiet", str(tmp_path / "served" / "code"), "HEAD:refs/heads/other")
        git(copy, "fetch", "--quiet")
        assert list_unpushed(address, copy) == ["not committed: train.py", "not committed: new.py"]
        assert list_unpushed(address + "x", copy) == list_unpushed(address, tmp_path) == []
    said = [message.partition("; ")[2] for message in caplog.messages]
    assert said[:2] == ["not committed: train.py", "not committed: new.py"]
    assert said[2].startswith("not pushed: ")
    caplog.clear()
    pin(Code(git=str(copy)), tmp_path / "home", None)
    assert [message.partition("; ")[2] for message in caplog.messages] == said[:2]


def test_a_private_repository_is_read_with_a_secret_that_no_command_line_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path / "served" / "code", {"train.py": "1"})
    started: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda argv, **options: started.append(argv) or run(argv, **options))
    with serving(tmp_path / "served", password="hunter2") as server:
        address = f"http://127.0.0.1:{server.server_port}/code/.git"
        with pytest.raises(SpecError, match="cannot be read") as caught:
            pin(Code(git=address), tmp_path / "home", None)
        with pytest.raises(SpecError, match="Check its secret, too"):
            pin(Code(git=address, secret="TOKEN"), tmp_path / "home", None, "wrong")
        code = pin(Code(git=address, secret="TOKEN"), tmp_path / "home", None, "hunter2")
        assert "x-access-token:hunter2" in server.seen
        named = pin(Code(git=address.replace("//", "//me@"), secret="TOKEN"), tmp_path / "home", None, "hunter2")
        assert "me:hunter2" in server.seen
    assert named.commit == code.commit
    ours = [argv for argv in started if argv != ["git", "http-backend"]]
    assert len(ours) > 4
    assert "hunter2" not in f"{ours}{caught.value}"
    assert (tree(code, tmp_path / "home") / "train.py").read_text() == "1"
    with pytest.raises(SpecError, match="would carry it over the network unencrypted"):
        pin(Code(git="http://host.example/x.git", secret="TOKEN"), tmp_path / "home", None, "hunter2")


def test_nothing_of_a_repository_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, mark = tmp_path / "code", tmp_path / "mark"
    commit(root, {"train.py": "1", ".gitattributes": "*.py filter=run\n"})
    for hook in ("post-checkout", "reference-transaction", "pre-receive"):
        path = root / ".git" / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {mark}\n")
        path.chmod(0o755)
    git(root, "config", "core.fsmonitor", f"touch {mark}")
    git(root, "config", "filter.run.smudge", f"touch {mark}; cat")
    monkeypatch.setenv("GIT_DIR", str(root / ".git"))  # as in a hook that submits
    monkeypatch.chdir(root)
    pin(Code(git=str(root)), tmp_path / "home", root)
    assert not mark.exists()


def test_links_of_a_repository_that_lead_out_are_refused(tmp_path: Path) -> None:
    commit(tmp_path / "code", {"train.py": "1"})
    (tmp_path / "code" / "way").symlink_to("/etc")
    commit(tmp_path / "code", {"other": ""})
    with pytest.raises(SpecError, match="the link way leads out of the code"):
        pin(Code(git=str(tmp_path / "code")), tmp_path / "home", None)
    assert not [name for name in os.listdir(tmp_path / "home" / "code") if not name.endswith(".lock")]


def test_submodules_stay_empty_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, phalanx_propagates: None
) -> None:
    inner = commit(tmp_path / "inner", {"x.py": ""})
    commit(tmp_path / "code", {"train.py": "1"})
    git(tmp_path / "code", "update-index", "--add", "--cacheinfo", f"160000,{inner},lib/inner")
    git(tmp_path / "code", "commit", "--quiet", "--message", "submodule")
    with caplog.at_level(logging.WARNING, "phalanx.jobs"):
        pin(Code(git=str(tmp_path / "code")), tmp_path / "home", None)
    assert "the submodule lib/inner is not fetched" in caplog.text

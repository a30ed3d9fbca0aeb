"""`commit_of`: run git safely: resolve refs, check out a commit, list unpushed changes.

Only https, http, ssh and files are spoken; no hook, submodule, helper of a repository or question to a terminal is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.errors import SpecError, did_you_mean

_ASK_S = 60
_FETCH_S = 3600
_TRANSPORT_VARIABLES = ("GIT_SSH", "GIT_SSL", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
"""Variables of git about reaching repositories; the others belong to the repository that we may be started in."""

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.untrackedCache": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
}
# In a variable, as no secret may be on a command line, and for the address's own host alone.
_HELPER = '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" "$CODE_USER" "$CODE_SECRET"; }; f'


def commit_of(address: str, ref: str, secret: str | None = None) -> str:
    """Return the commit that a branch, tag, full ref or commit is in a repository now.

    Raises:
        SpecError: If the repository cannot be read, or has no such ref, or a branch and a tag of that name.
    """
    refs = _refs(address, _patterns(ref), secret)
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ref
    tag = refs.get(f"refs/tags/{ref}^{{}}") or refs.get(f"refs/tags/{ref}")
    branch = refs.get(f"refs/heads/{ref}")
    if tag and branch and tag != branch:
        raise SpecError(f"{address} has a branch and a tag {ref!r}. Write refs/heads/{ref} or refs/tags/{ref} as ref.")
    if commit := branch or tag or refs.get(f"{ref}^{{}}") or refs.get(ref):
        return commit
    names = [name.split("/", 2)[2] for name in _refs(address, ["refs/heads/*", "refs/tags/*"], secret)]
    hint = did_you_mean(ref, names)
    raise SpecError(f"{address} has no branch or tag {ref!r}.{hint} Write one of them, or a commit of 40 digits.")


def check_out(address: str, commit: str, into: Path, secret: str | None = None) -> list[str]:
    """Write the tree of one commit to the new folder `into`, and nothing else of the repository.

    Returns:
        Paths of submodules, whose folders stay empty.

    Raises:
        SpecError: If the repository cannot be read or does not hand out the commit.
    """
    with tempfile.TemporaryDirectory(prefix=".git-", dir=into.parent) as store:
        at = ("--git-dir", store, "--work-tree", str(into))
        _git(address, "init", "--quiet", "--bare", "--template=", store)
        fetch = ("fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", "--", address, commit)
        _git(address, "--git-dir", store, *fetch, secret=secret, timeout_s=_FETCH_S)
        into.mkdir()
        _git(address, *at, "read-tree", commit)
        _git(address, *at, "checkout-index", "--all", "--force", "--quiet", timeout_s=_FETCH_S)
        staged = _git(address, *at, "ls-files", "--stage", "-z").split("\0")
    return [line.split("\t", 1)[1] for line in staged if line.startswith("160000 ")]


def list_unpushed(address: str, folder: Path) -> list[str]:
    """Return what the working copy around `folder` has that its repository lacks, a line for each.

    Nothing is returned where `folder` is in no working copy of the repository at `address`.
    """
    top = _query(folder, "rev-parse", "--show-toplevel").strip()
    local = Path(address.removeprefix("file://"))
    is_itself = local.is_dir() and local.resolve() in (Path(top).resolve(), (Path(top) / ".git").resolve())
    if not top or not (is_itself or _bare(address) in map(_bare, _query(folder, "remote", "-v").split())):
        return []
    changed = [line[3:] for line in _query(folder, "status", "--porcelain", "-z").split("\0") if line[2:3] == " "]
    ahead = [] if is_itself else _query(folder, "log", "--format=%h %s", "HEAD", "--not", "--remotes").splitlines()
    return [f"not committed: {path}" for path in changed] + [f"not pushed: {line}" for line in ahead]


def _bare(address: str) -> str:
    return address.removesuffix("/").removesuffix(".git")


def _patterns(ref: str) -> list[str]:
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ["HEAD"]  # asked all the same: whether the repository may be read
    if ref == "HEAD" or ref.startswith("refs/"):
        return [ref, f"{ref}^{{}}"]
    return [f"refs/heads/{ref}", f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}"]


def _refs(address: str, patterns: list[str], secret: str | None) -> dict[str, str]:
    lines = _git(address, "ls-remote", "--quiet", "--", address, *patterns, secret=secret).splitlines()
    return {name: commit for commit, _, name in (line.partition("\t") for line in lines)}


def _git(address: str, *words: str, secret: str | None = None, timeout_s: int = _ASK_S) -> str:
    try:
        process = subprocess.run(
            ["git", *words],
            env=_environment(address, secret),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # no terminal to ask for a password
        )
    except FileNotFoundError:
        raise SpecError("code from a repository needs the program git, which is not here. Install git.") from None
    except subprocess.TimeoutExpired:
        raise SpecError(f"{address} did not answer within {timeout_s} s. Check the address and the network.") from None
    if process.returncode:
        lines = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("fatal:")), lines[0] if lines else "no reason given")
        key = "" if secret is None else " Check its secret, too."
        raise SpecError(f"{address} cannot be read: {reason.removeprefix('fatal: ')}. Check the address.{key}")
    return process.stdout.decode(errors="surrogateescape")


def _query(folder: Path, *words: str) -> str:
    """Return git's output about a working copy, empty if it fails."""
    try:
        return _git(str(folder), "-C", str(folder), *words)
    except SpecError:
        return ""


def _environment(address: str, secret: str | None) -> dict[str, str]:
    settings = dict(_SETTINGS)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_TRANSPORT_VARIABLES)
    }
    variables |= {
        "LC_ALL": "C",
        "GIT_ALLOW_PROTOCOL": "https:http:ssh:file",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    pairs = list(settings.items())
    if secret is not None:
        parts = urlsplit(address)
        host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        pairs += [("credential.helper", ""), (f"credential.{host}.helper", ""), (f"credential.{host}.helper", _HELPER)]
        variables |= {"CODE_USER": parts.username or "x-access-token", "CODE_SECRET": secret}
    for number, (key, value) in enumerate(pairs):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables | {"GIT_CONFIG_COUNT": str(len(pairs))}

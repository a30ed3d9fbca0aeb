"""`pin`, `check_out_code`: pin a job's code to a commit or digest, store its tree, check it out."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.errors import BackendError, SpecError
from phalanx.jobs.sources import code_tree, git
from phalanx.jobs.sources.build_once import build_once, remove
from phalanx.jobs.spec.addresses import is_local
from phalanx.jobs.spec.code_and_data import Code

logger = logging.getLogger("phalanx.jobs")

_NAMED = 10
"""How many changes of a working copy are named in a warning."""


def pin(code: Code, home: Path, base: Path | None, secret: str | None = None) -> Code:
    """Return `code` with its commit or digest, and store_tree its tree under `home`.

    Warns of what a working copy of the repository around `base` has that the commit lacks.

    Args:
        code: A repository or path.
        home: PHALANX_HOME.
        base: Folder that relative paths are meant from; None refuses them.
        secret: Value of `code.secret`.

    Raises:
        SpecError: If the repository, ref or folder cannot be read, is too large, or has links that lead out of it.
    """
    if code.git is None:
        code = _pin_path(code, home, base)
    else:
        address = code.git if not is_local(code.git) or "://" in code.git else str(absolute(code.git, base, "code.git"))
        _check_secret(address, secret)
        commit = git.commit_of(address, code.commit or code.ref, secret)
        code = code.model_copy(update={"git": address, "commit": commit})
        _warn_of_unpushed(code, base)
        _fetch_tree(code, home, secret)
    if not (tree(code, home) / code.subdir).is_dir():
        raise SpecError(f"code.subdir: the code has no folder {code.subdir!r}. Correct it, or commit the folder.")
    return code


def tree(code: Code, home: Path) -> Path:
    """Return the folder under `home` of the tree of pinned code, which may not be there yet."""
    if code.git is None:
        return home / "code" / str(code.digest)
    # Never a name that a digest can have: those are taken from anybody, repositories are asked first.
    return home / "code" / ("git-" + hashlib.sha256(f"{code.git}\0{code.commit}".encode()).hexdigest())


def store_tree(folder: Path, home: Path) -> str:
    """Store a copy of a folder of code under `home`, and return its digest; equal content is stored once.

    Raises:
        SpecError: If the folder cannot be read, is too large, has links that lead out of it, or changes meanwhile.
    """
    entries = code_tree.list_entries(folder)
    tree_digest = code_tree.digest(folder, entries)

    def copy(part: Path) -> None:
        code_tree.copy(folder, entries, part)
        if code_tree.digest(part, entries) != tree_digest:
            raise SpecError(f"code: {folder} changed while it was copied. Submit again when nothing writes to it.")

    build_once(home / "code" / tree_digest, copy)
    return tree_digest


def check_out_code(code: Code, home: Path, into: Path, secret: str | None = None) -> None:
    """Put the tree of pinned code into the folder `into`, in place of what may be there; it may be written to.

    Raises:
        BackendError: If the tree of a path is not kept on this machine.
        SpecError: If the repository cannot be read any more.
    """
    if code.git is not None:
        _check_secret(code.git, secret)
        _fetch_tree(code, home, secret)
    source = tree(code, home)
    if not source.is_dir():
        raise BackendError(
            f"the code {code.path} (digest {code.digest}) is not kept in {source} on this machine. Nodes must see the "
            "PHALANX_HOME of the machine that submitted; or give the code as a git repository."
        )
    remove(into)
    code_tree.copy(source, code_tree.list_entries(source, everything=True), into)


def absolute(path: str, base: Path | None, field: str) -> Path:
    """Return `path` from the folder `base`, or from the user's with a leading `~`.

    Raises:
        SpecError: If it is relative and there is no folder to start from.
    """
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise SpecError(f"{field}: {path!r} begins with the name of no user. Write it in full.") from None
    if not expanded.is_absolute() and base is None:
        raise SpecError(
            f"{field}: {path!r} is a relative path, and this request comes from no folder. Write it in full."
        )
    return (base or Path()) / expanded


def _pin_path(code: Code, home: Path, base: Path | None) -> Code:
    if code.digest is None:
        folder = absolute(str(code.path), base, "code.path")
        return code.model_copy(update={"path": str(folder), "digest": store_tree(folder, home)})
    if not tree(code, home).is_dir():
        raise SpecError(
            f"code.digest: no such tree is kept in {home / 'code'}. Leave it out, to copy {code.path} again."
        )
    return code


def _fetch_tree(code: Code, home: Path, secret: str | None) -> None:
    def fetch(part: Path) -> None:
        logger.info("fetching %s of %s", code.commit, code.git)
        submodules = git.check_out(str(code.git), str(code.commit), part, secret)
        code_tree.list_entries(part, everything=True)  # raises if it has bad links or is too large
        for path in submodules:
            logger.warning("%s: the submodule %s is not fetched; its folder is empty", code.git, path)

    build_once(tree(code, home), fetch)


def _check_secret(address: str, secret: str | None) -> None:
    parts = urlsplit(address)
    if secret is not None and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise SpecError(f"code.secret: {address} would carry it over the network unencrypted. Write https://.")


def _warn_of_unpushed(code: Code, base: Path | None) -> None:
    address = str(code.git)
    folder = Path(address.removeprefix("file://")) if is_local(address) else base
    if folder is None or not folder.is_dir():
        return
    lines = git.list_unpushed(address, folder)
    for line in lines[:_NAMED]:
        logger.warning("the job runs commit %.12s of %s; %s", code.commit, address, line)
    if len(lines) > _NAMED:
        logger.warning("the job runs commit %.12s of %s; and %d more", code.commit, address, len(lines) - _NAMED)

"""`pin`, `provide`: pin a job's datasets, fetch and cache them, link them where the script reads.

A dataset is found by the environment variable PHALANX_DATASET_*, its name in capitals; beside that it may lie at a
mount: a relative one is a link in the folder the command starts in, an absolute one is bound by `jobs/sources/mounts`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx.errors import BackendError, DataError, SpecError
from phalanx.jobs.sources import remote
from phalanx.jobs.sources.build_once import build_once
from phalanx.jobs.sources.code import absolute
from phalanx.jobs.sources.egress import EgressPolicy
from phalanx.jobs.spec.code_and_data import Dataset

logger = logging.getLogger("phalanx.jobs")


def pin(
    dataset: Dataset,
    base: Path | None,
    secret: str | None = None,
    *,
    on_this_machine: bool = True,
    egress: EgressPolicy | None = None,
) -> Dataset:
    """Return `dataset` with version and size as they are now, and its path in full.

    Args:
        dataset: A dataset with kind and address.
        base: Folder that relative paths are meant from; None refuses them.
        secret: Value of `dataset.secret`.
        on_this_machine: Whether what trains sees the folders of this machine.
        egress: Which hosts may be asked; None is no limit.

    Raises:
        SpecError: If it is not there or cannot be read, or is not what it was when it was pinned.
    """
    if dataset.is_path:
        return _pin_path(dataset, base, on_this_machine)
    remote_version = remote.look(dataset, secret, egress)
    if dataset.version not in (None, remote_version.version):
        raise SpecError(
            f"{dataset.uri} changed: expected version {dataset.version}, now it is {remote_version.version}. "
            "Leave version out, to train on what is there now."
        )
    return dataset.model_copy(update={"version": remote_version.version, "size": remote_version.size})


def content(dataset: Dataset, home: Path) -> Path:
    """Return the folder or file on this machine that has the dataset's content, or will have once it is fetched."""
    if dataset.is_path:
        return Path(str(dataset.uri))
    identity = "\0".join(str(part) for part in (dataset.uri, dataset.endpoint, dataset.version, dataset.sha256))
    name = unquote(urlsplit(str(dataset.uri)).path).rstrip("/").rsplit("/", 1)[-1]
    # The last name of the address stays, as scripts look at how a file's name ends.
    return home / "cache" / hashlib.sha256(identity.encode()).hexdigest() / (name if name not in ("", "..") else "data")


def provide(dataset: Dataset, home: Path, work: Path, secret: str | None = None) -> Path:
    """Return the folder or file that a script reads, fetched first if need be; any number of nodes may call it at once.

    Args:
        dataset: A dataset as submission fixed it.
        home: PHALANX_HOME.
        work: The folder the command starts in, where a relative mount becomes a link.
        secret: Value of `dataset.secret`.

    Raises:
        BackendError: If this machine does not see the path, or the mount is taken.
        DataError: If the content is not what it was at submission.
        SpecError: If it cannot be reached or read any more.
    """
    path = content(dataset, home)
    if dataset.is_path:
        if not os.access(path, os.R_OK):
            raise BackendError(f"dataset {dataset.name}: this machine cannot read {path}. Mount it there, or use s3.")
    elif dataset.kind == "http":
        _download(dataset, path)
    else:
        build_once(path, lambda part: _fetch(dataset, part, secret))
    if dataset.mount is None:
        return path
    if not Path(dataset.mount).is_absolute():
        _link(dataset, path, work)
    return work / dataset.mount


def _pin_path(dataset: Dataset, base: Path | None, on_this_machine: bool) -> Dataset:
    if dataset.kind == "local" and not on_this_machine:
        raise SpecError(f"{dataset.uri} is a path of this machine, which pods do not see. Use nas, s3, oss or http.")
    path = absolute(str(dataset.uri), None if dataset.kind == "nas" else base, "uri")
    if not on_this_machine:
        return dataset
    try:
        status = path.stat()
        is_file = path.is_file()
        readable = os.access(path, os.R_OK) if is_file else bool(os.listdir(path))
    except OSError as error:
        how = (
            f" Mount file system {dataset.file_system} there, or correct it." if dataset.file_system else " Correct it."
        )
        raise SpecError(f"{path} cannot be read on this machine: {error.strerror}.{how}") from None
    if not readable:
        raise SpecError(f"{path} {'may not be read' if is_file else 'is empty'}. Correct the path, or put data there.")
    pinned = {"uri": str(path)} | ({"version": str(status.st_mtime_ns), "size": status.st_size} if is_file else {})
    if is_file and dataset.version not in (None, pinned["version"]):
        logger.warning("dataset %s: %s was changed since it was pinned", dataset.name, path)
    return dataset.model_copy(update=pinned)


def _fetch(dataset: Dataset, part: Path, secret: str | None) -> None:
    _check_version(dataset, secret)
    logger.info("fetching dataset %s from %s", dataset.name, dataset.uri)
    remote.fetch(dataset, part, secret)


def _download(dataset: Dataset, target: Path) -> None:
    from phalanx.data.readers.download import download  # imports torch, which commands that only submit do not wait for

    if not target.exists() and dataset.sha256 is None:
        _check_version(dataset, None)
    # Never more than was announced at submission, if anything was.
    download(str(dataset.uri), target.parent, sha256=dataset.sha256, max_bytes=dataset.size or 1 << 62)


def _check_version(dataset: Dataset, secret: str | None) -> None:
    version = remote.look(dataset, secret).version
    if dataset.version not in (None, version):
        raise DataError(
            f"dataset {dataset.name}: {dataset.uri} changed since submission (version {dataset.version}, now "
            f"{version}). Submit the job again, to train on what is there now."
        )


def _link(dataset: Dataset, target: Path, work: Path) -> None:
    link = work / str(dataset.mount)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.parent.resolve().is_relative_to(work.resolve()):
        raise BackendError(f"dataset {dataset.name}: a link leads {dataset.mount} out of the code. Mount it elsewhere.")
    try:
        link.symlink_to(target)
    except FileExistsError:  # perhaps another node of this attempt was first
        if not (link.is_symlink() and Path(os.readlink(link)) == target):
            raise BackendError(
                f"dataset {dataset.name}: the code has something at {dataset.mount} itself. Mount it elsewhere."
            ) from None

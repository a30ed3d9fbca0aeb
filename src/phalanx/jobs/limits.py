"""`Limits`: allowlist of paths and hosts that members' jobs may use on a shared server.

A path in a job is read by the account that the server runs as. The owner of the store may read whatever that account
may; a member who comes over HTTP may name paths under the roots in HOME/server.yaml alone. No answer tells whether a
path outside them exists: nothing outside is looked at.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from phalanx.errors import ConfigError, SpecError
from phalanx.jobs.backend_registry import BACKENDS, BackendName, load
from phalanx.jobs.sources.egress import EgressPolicy, host_rule
from phalanx.jobs.spec.addresses import is_local
from phalanx.jobs.spec.code_and_data import Code, Dataset
from phalanx.jobs.spec.training_job import TrainingJob

logger = logging.getLogger("phalanx.jobs")

FILE = "server.yaml"


def _root(text: str) -> str:
    if not text.startswith("/") or ".." in PurePosixPath(text).parts:
        raise ValueError(f"{text!r} is no absolute path; write a folder as /data")
    return text


class _File(BaseModel):
    """HOME/server.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    roots: tuple[Annotated[str, AfterValidator(_root)], ...] = ()
    backends: tuple[BackendName, ...] | None = None
    namespaces: tuple[str, ...] | None = None
    kubernetes_patch: bool = False
    hosts: tuple[Annotated[str, AfterValidator(host_rule)], ...] = ()


@dataclass(frozen=True)
class Limits:
    """What members may name.

    Attributes:
        home: The folder of all state, of which nothing can be named, whatever the roots are.
        roots: Folders of this machine under which they may name code, repositories, data, mounts and checkpoints.
        backends: Where their jobs may run; None is no limit.
        namespaces: Of Kubernetes, which their jobs may be made in; None is no limit.
        kubernetes_patch: Whether they may patch pods freely, which can reach the files of a node.
        hosts: Hosts and networks that are not public, and whose addresses they may give all the same.
    """

    home: Path
    roots: tuple[str, ...] = ()
    backends: tuple[str, ...] | None = None
    namespaces: tuple[str, ...] | None = None
    kubernetes_patch: bool = False
    hosts: tuple[str, ...] = ()

    @property
    def egress(self) -> EgressPolicy:
        """Whom the server may connect to for members."""
        return EgressPolicy(self.hosts)

    @classmethod
    def read(cls, home: Path) -> Limits:
        """Return the limits of the server on `home`, as its file says them now.

        Raises:
            ConfigError: If the file cannot be read: then nothing is allowed.
        """
        path = home / FILE
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            return cls(home, **_File.model_validate(yaml.safe_load(text) or {}).model_dump())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
            logger.error("%s is written as `roots: [/data]`: %s", path, error)
            raise ConfigError(
                f"{FILE} of this server cannot be read, so nothing is taken from its members. Its administrator finds "
                "the reason in the server's log."
            ) from None

    def check(self, spec: TrainingJob) -> None:
        """Raise SpecError with everything in `spec` that a member may not say, but for code and datasets."""
        wrong = list(self._wrong(spec))
        if wrong:
            raise SpecError("\n  ".join(wrong))

    def _wrong(self, spec: TrainingJob) -> Iterator[str]:
        if self.backends is not None and spec.backend not in self.backends:
            yield f"backend: this server takes jobs for {' and '.join(self.backends) or 'none'}, not {spec.backend}."
        backend = BACKENDS[spec.backend]
        if backend.member_check is not None:
            yield from load(backend.member_check)(spec, self)
        if not backend.sees_local_paths:
            return
        if spec.checkpoint.dir is not None and spec.checkpoint.dir.startswith("/"):
            yield from self._refused("checkpoint.dir", spec.checkpoint.dir)
        for option in spec.slurm.options:
            # What an option names, as --output or --chdir, is written or entered by the server's account.
            for word in option.replace("=", " ").split():
                if "/" in word:
                    yield from self._refused("slurm.options", word)

    def code(self, code: Code) -> Code:
        """Return `code`, a path of this machine in it resolved.

        Raises:
            SpecError: If it is at a path that members may not name.
        """
        if code.path is not None:
            return code.model_copy(update={"path": self._allowed("code.path", code.path)})
        if code.git is not None and is_local(code.git):
            return code.model_copy(update={"git": self._allowed("code.git", _path_of(code.git))})
        return code

    def dataset(self, dataset: Dataset, *, sees_local_paths: bool) -> Dataset:
        """Return `dataset`, a path of this machine in it resolved.

        Args:
            dataset: With kind and address.
            sees_local_paths: Whether paths of the job are those of this machine; in a pod they are the pod's.

        Raises:
            SpecError: If it lies at, or would be mounted at, a path that members may not name.
        """
        field, paths = f"datasets.{dataset.name}", dict[str, str]()
        if dataset.kind == "local" or (dataset.kind == "nas" and sees_local_paths):
            paths["uri"] = self._allowed(f"{field}.uri", str(dataset.uri))
        if dataset.mount is not None and dataset.mount.startswith("/") and sees_local_paths:
            paths["mount"] = self._allowed(f"{field}.mount", dataset.mount)
        return dataset.model_copy(update=paths)

    def check_again(self, spec: TrainingJob) -> None:
        """Raise SpecError if members may not have a job of another's run again: it is read anew, but for kept code."""
        self.check(spec)
        for dataset in spec.datasets:
            self.dataset(dataset, sees_local_paths=BACKENDS[spec.backend].sees_local_paths)
        if spec.code.git is not None:
            self.code(spec.code)

    def _refused(self, field: str, path: str) -> Iterator[str]:
        try:
            self._allowed(field, path)
        except SpecError as error:
            yield str(error)

    def _allowed(self, field: str, path: str) -> str:
        """Return where `path` leads, which is under a root and is neither in the home nor around it."""
        pure = PurePosixPath(path)
        if ".." not in pure.parts and any(pure.is_relative_to(root) for root in self.roots):
            real = Path(os.path.realpath(path))
            home = Path(os.path.realpath(self.home))
            inside = any(real.is_relative_to(os.path.realpath(root)) for root in self.roots)
            if inside and not real.is_relative_to(home) and not home.is_relative_to(real):
                return str(real)
        raise SpecError(
            f"{field}: members of this server may not name {path} on its machine. {_INSTEAD[field.rpartition('.')[2]]} "
            f"Or its administrator lists a folder under `roots` in {FILE}."
        )


_INSTEAD = {
    "path": "Send the code with `phalanx job submit`, or give a git repository.",
    "git": "Give a repository over https or ssh, or send the code with `phalanx job submit`.",
    "uri": "Give the data as s3, oss or http.",
    "mount": "Write a relative mount, or read the path from PHALANX_DATASET_*.",
    "dir": "Leave it out, or write a path in the job's own folder.",
    "options": "Leave the path out.",
}


def _path_of(git: str) -> str:
    """Return the path that git reads for the address of a repository on this machine."""
    if not git.startswith("file://"):
        return git
    parts = urlsplit(git)
    # Git takes a name of a host before the path as a part of it; no such path is under a root.
    return unquote(f"{parts.netloc}{parts.path}")

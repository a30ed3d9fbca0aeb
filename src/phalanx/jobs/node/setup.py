"""`NodeSetup`: prepare a node: working copy, datasets, checkpoint folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import BackendError, PhalanxError
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt.files import AttemptSpec
from phalanx.jobs.attempt.launch_command import Rendezvous, distinct_hosts
from phalanx.jobs.sources.archive import unpack
from phalanx.jobs.sources.code import check_out_code
from phalanx.launch.request import machine

logger = logging.getLogger("phalanx.jobs")

RESOLVE_S = 600.0
"""How long to wait until the names of all nodes mean something; pods get theirs when they start."""


@dataclass(frozen=True)
class PreparedNode:
    """What a node found and made ready.

    Attributes:
        cwd: Where the command starts.
        hosts: Addresses of all nodes.
        variables: Where the data is.
        before: Words before the command, which mount data for it alone.
    """

    cwd: Path
    hosts: tuple[str, ...]
    variables: dict[str, str]
    before: tuple[str, ...] = ()


class NodeSetup:
    """The preparation of one node, which runs in a thread of its own.

    Attributes:
        doing: What is done now, in words.
        prepared: The result, None before the end.
        error: Why there is none.
    """

    def __init__(
        self,
        folder: Path,
        attempt_spec: AttemptSpec,
        rendezvous: Rendezvous,
        secrets: Mapping[str, str],
        *,
        in_pod: bool,
    ) -> None:
        """Prepare nothing yet.

        Args:
            folder: The attempt's folder.
            attempt_spec: What is to run.
            rendezvous: Which node this is, and the names or addresses of all.
            secrets: Values by name.
            in_pod: Whether this node has `folder` and all files for itself. Else the first node makes the working copy
                for all.
        """
        self.activity = "preparing"
        self.prepared: PreparedNode | None = None
        self.error: Exception | None = None
        self._folder, self._attempt_spec, self._secrets = folder, attempt_spec, secrets
        self._hosts = rendezvous.hosts
        self._in_pod, self._makes_work = in_pod, in_pod or rendezvous.node == 0
        self._stopped = threading.Event()

    def run(self) -> None:
        """Prepare; an error is stored in `error`."""
        try:
            self.prepared = self._prepare()
        except Exception as error:
            # Whatever a library raises here, the node must leave an exit record.
            if not isinstance(error, (PhalanxError, OSError)):
                logger.warning("%s", self.activity, exc_info=error)
            self.error = error

    def stop(self) -> None:
        """Wait no longer for another node."""
        self._stopped.set()

    def _prepare(self) -> PreparedNode:
        spec = self._attempt_spec.spec
        work = self._folder / "work"
        self.activity = "preparing code"
        if self._makes_work:
            self._make(work)
        else:
            self._wait_for(work)
        self._attempt_spec.checkpoint.mkdir(parents=True, exist_ok=True)
        cwd = work / spec.code.subdir
        if not cwd.is_dir():
            raise BackendError(f"code has no folder {spec.code.subdir}, which code.subdir names. Correct it.")
        variables, before = self._data(cwd) if spec.datasets else ({}, ())
        self.activity = "waiting for the names of all nodes"
        addresses = tuple(machine.resolve_within(host, RESOLVE_S) for host in self._hosts)
        hosts = distinct_hosts(addresses, self._attempt_spec.job, self._attempt_spec.attempt)
        return PreparedNode(cwd, hosts, variables, before)

    def _data(self, cwd: Path) -> tuple[dict[str, str], tuple[str, ...]]:
        """Make every dataset readable here; return variables with their paths, and the command that mounts them."""
        # What reads addresses is slow to import, and not every job has data.
        from phalanx.jobs.sources import mounts
        from phalanx.jobs.sources.datasets import provide

        variables = {}
        for dataset in self._attempt_spec.spec.datasets:
            self.activity = f"preparing dataset {dataset.name}"
            path = provide(dataset, self._attempt_spec.home, cwd, self._secret(dataset.secret))
            variables[dataset.variable] = str(path)
        binds = mounts.binds(self._attempt_spec.spec.datasets, self._attempt_spec.home)
        if not self._in_pod:
            return variables, tuple(mounts.prefix(binds))
        # A pod is the job's alone: nothing has to be hidden from anybody.
        for bind in binds:
            bind.target.parent.mkdir(parents=True, exist_ok=True)
            bind.target.symlink_to(bind.source)
        return variables, ()

    def _make(self, work: Path) -> None:
        """Put the code into `work`, whole or not at all; a working copy that is there already was made before."""
        if work.exists():
            return
        partial = work.with_name("work.partial")
        code = self._attempt_spec.spec.code
        packed = self._folder / "code.tar.gz"
        if self._in_pod and packed.exists() and code.digest:
            tree = self._attempt_spec.home / "code" / code.digest
            tree.mkdir(parents=True)
            unpack(packed, tree)
        check_out_code(code, self._attempt_spec.home, partial, self._secret(code.secret))
        partial.rename(work)

    def _wait_for(self, work: Path) -> None:
        while not work.exists():
            record = attempt_files.read_exit_record(self._folder, 0)
            if self._stopped.wait(0.1) or (record is not None and record.outcome != "succeeded"):
                raise BackendError("node 0 ended before it had prepared the code; its own record says why.")

    def _secret(self, name: str | None) -> str | None:
        return None if name is None else self._secrets.get(name)

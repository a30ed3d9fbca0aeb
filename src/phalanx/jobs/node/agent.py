"""`NodeAgent`: runs one node of an attempt: prepare, launch, heartbeat, exit record.

SIGTERM is passed on to what it started, which has the job's grace before all below this process is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

from phalanx.cluster.network import interface_towards, system_routes
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.attempt.files import HEARTBEAT_S, LOST_AFTER_HEARTBEATS, ExitRecord
from phalanx.jobs.models import Cause
from phalanx.jobs.node import exit_reason, usage_monitor
from phalanx.jobs.node.setup import NodeSetup, PreparedNode
from phalanx.launch.process import linux

logger = logging.getLogger("phalanx.jobs")

_HIDDEN_FROM_RANKS = ("PHALANX_SECRET_KEY", "PHALANX_STORE", "PHALANX_TOKEN")
"""Variables of the parent process that open the store or its secrets, and are not passed on."""

_LINKED = ("workerlog.*", "serverlog.*", "heterlog.*", "events.*.jsonl", "status.*.json")
_FULL_BYTES = 2**20
"""A disk with less space left is full to most who write."""

_SETTLE_S = 3.0
"""What a launcher gets beyond the grace period, to report what it killed."""


@dataclass
class StopReason:
    """Why this node ends before its command does."""

    outcome: str
    message: str
    cause: Cause | None = None
    is_delivered: bool = False
    """Whether what this node started has had the signal already."""


@dataclass
class NodeAgent:
    """One node of an attempt, from its start to its exit record."""

    folder: Path
    rendezvous: launch_command.Rendezvous
    secrets: Mapping[str, str]
    in_pod: bool = False
    """Whether this node sees no other's files, and reports its output and exit record to Kubernetes."""

    signals_reach_all: bool = False
    """Whether who sends this process a signal sends it to everything below too, as Slurm does."""

    started: float = field(default_factory=time.time)
    _stop: StopReason | None = None
    _activity: str = "preparing"
    _next_heartbeat: float = 0.0
    _silent_heartbeats: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """By file of another node: its time of change, and how many of our beats ago that changed."""

    def __post_init__(self) -> None:
        self.attempt_spec = attempt_files.read_spec(self.folder)
        self.spec = self.attempt_spec.spec
        self.logs = paths.logs(self.folder)
        # A launcher of ours clears its folder first, so that of each node has one of its own.
        self.own_logs = self.logs / f"node-{self.rendezvous.node}" if self.spec.launch == "phalanx" else self.logs
        self.log_path = self.logs / f"node-{self.rendezvous.node}.log"
        self.stop_signals = linux.StopSignals()

    def run(self) -> int:
        """Run this node's part; returns the exit code.

        The exit record is written whatever happens, last of all.
        """
        linux.adopt_orphans()
        self.logs.mkdir(parents=True, exist_ok=True)
        attempt_files.reserve_exit_record(self.folder, self.rendezvous.node)
        with self._output() as output:
            record = self._run(output)
            if record.outcome == "failed":
                record = self._on_a_full_disk(record)
                with contextlib.suppress(OSError):  # A disk that is full; the exit record has room of its own.
                    _write_line(output, f"node {self.rendezvous.node}: {record.message}")
        linux.kill_descendants()
        with contextlib.suppress(OSError):
            self._link_logs()
        attempt_files.write_exit_record(
            self.folder, self.rendezvous.node, replace(record, started=self.started, ended=time.time())
        )
        if record.outcome == "succeeded":
            return 0
        code = record.exit_code or 1
        return 128 + signal.SIGTERM if record.outcome == "stopped" else (128 - code if code < 0 else code)

    def _on_a_full_disk(self, record: ExitRecord) -> ExitRecord:
        free = shutil.disk_usage(self.folder).free
        if free > _FULL_BYTES:
            return record
        return replace(record, message=f"{record.message}; the disk of {self.folder} is full")

    @contextlib.contextmanager
    def _output(self) -> Iterator[BinaryIO]:
        """Where the command prints: a file, and in a pod also standard output, which the cluster stores."""
        if not self.in_pod:
            with self.log_path.open("ab", buffering=0) as file:
                yield file
            return
        tee = subprocess.Popen(
            ["tee", "-a", str(self.log_path)], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert tee.stdin is not None
        try:
            yield cast(BinaryIO, tee.stdin)
        finally:
            tee.stdin.close()
            # A process that was left behind may hold the pipe; it is killed soon.
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(_SETTLE_S)

    def _run(self, output: BinaryIO) -> ExitRecord:
        setup = NodeSetup(self.folder, self.attempt_spec, self.rendezvous, self.secrets, in_pod=self.in_pod)
        try:
            prepared = self._prepare(setup)
            if isinstance(prepared, ExitRecord):
                return prepared
            command = launch_command.build_command(
                self.spec,
                replace(self.rendezvous, hosts=prepared.hosts),
                python=sys.executable,
                logs=self.own_logs,
                log_files=not self.in_pod,
            )
            return self._train(command, prepared, output)
        except (OSError, ValueError) as error:
            verb = "supervised" if self._activity == "running" else "started"
            return ExitRecord("failed", Cause.SETUP, f"{self.spec.command!r} could not be {verb}: {error}")

    def _prepare(self, setup: NodeSetup) -> PreparedNode | ExitRecord:
        """Get code and data in a thread, so that signs of life and signals pass meanwhile."""
        worker = threading.Thread(target=setup.run, daemon=True)
        worker.start()
        deadline = None
        while worker.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._activity = setup.activity
            self._wait(None, 0.05)
            if self._stop is not None and deadline is None:
                deadline = time.monotonic() + self.spec.grace
                setup.stop()
        if self._stop is not None:
            return self._stopped(None)
        if setup.error is not None:
            return ExitRecord("failed", Cause.SETUP, str(setup.error) or type(setup.error).__name__)
        assert setup.prepared is not None
        return setup.prepared

    def _train(self, command: launch_command.LaunchCommand, prepared: PreparedNode, output: BinaryIO) -> ExitRecord:
        parent = os.getpid()
        stdout: BinaryIO = output
        if self.spec.launch == "env" and not self.in_pod:
            stdout = (self.logs / f"workerlog.{self.rendezvous.node}").open("ab", buffering=0)
        process = subprocess.Popen(
            [*prepared.before, *command.argv],
            cwd=prepared.cwd,
            env=self._variables(command, prepared),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: linux.die_with_parent(parent),
        )
        self._activity = "running"
        self._send_heartbeat()
        # What a pod wrote beside its log would go with it.
        with contextlib.nullcontext() if self.in_pod else usage_monitor.watch_usage(self.folder, self.rendezvous.node):
            code = self._watch(process)
        if self._stop is not None:
            return self._stopped(code)
        if code == 0:
            return ExitRecord("succeeded", exit_code=0)
        log = self.log_path if stdout is output else Path(stdout.name)
        return exit_reason.failure(self.spec, self.rendezvous.node, code, output=log, logs=self.own_logs)

    def _variables(self, command: launch_command.LaunchCommand, prepared: PreparedNode) -> dict[str, str]:
        """The environment of the command; the job's own variables override ours."""
        variables = {name: value for name, value in os.environ.items() if name not in _HIDDEN_FROM_RANKS}
        # `python` in a command is the one that the job was submitted with.
        variables["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), variables.get("PATH", os.defpath)])
        variables |= {"PHALANX_CHECKPOINT_DIR": str(self.attempt_spec.checkpoint), **prepared.variables}
        is_distributed = len(prepared.hosts) > 1
        if is_distributed and (name := interface_towards(prepared.hosts[0], system_routes())):
            variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} | variables
        variables |= command.variables | self.spec.env
        names = (*self.spec.secrets, "PHALANX_JOB_SECRET")
        return variables | {name: self.secrets[name] for name in names if name in self.secrets}

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of what was started, and bring it about where this node must stop."""
        deadline = None
        ended = os.pidfd_open(process.pid)
        try:
            while process.poll() is None:
                self._wait(ended, 0.5)
                if self._stop is not None and deadline is None:
                    settle_s = 0.0 if self.spec.launch == "env" else _SETTLE_S
                    deadline = time.monotonic() + self.spec.grace + settle_s
                    if not self._stop.is_delivered:
                        self._signal(process)
                if deadline is not None and time.monotonic() > deadline:
                    # Its own ranks die with it; what else is below this process is killed at the end.
                    os.killpg(process.pid, signal.SIGKILL)
        finally:
            os.close(ended)
        return process.returncode

    def _signal(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the command to end. Launchers signal their ranks themselves, once each."""
        if self.spec.launch == "env":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()

    def _stopped(self, code: int | None) -> ExitRecord:
        assert self._stop is not None
        return ExitRecord(self._stop.outcome, self._stop.cause, self._stop.message, exit_code=code)

    def _wait(self, ended: int | None, timeout_s: float) -> None:
        """Wait for a signal, `ended` or the time, then see to everything that is due."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.stop_signals.woken, selectors.EVENT_READ, self.stop_signals.clear)
            if ended is not None:
                ready.register(ended, selectors.EVENT_READ)
            for key, _ in ready.select(timeout_s):
                if key.data is not None:
                    key.data()
        if number := self.stop_signals.take():
            name = signal.Signals(number).name
            self._stop_for(StopReason("stopped", f"asked to end by {name}", is_delivered=self.signals_reach_all))
        limit = self.spec.max_runtime
        if limit is not None and time.time() > self.started + limit:
            self._stop_for(StopReason("failed", f"still running after max_runtime, {limit:g} s", Cause.TIMEOUT))
        if time.monotonic() >= self._next_heartbeat:
            self._send_heartbeat()
            self._link_logs()
            self._check_others()

    def _send_heartbeat(self) -> None:
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        attempt_files.write_heartbeat(self.folder, self.rendezvous.node, self._activity)

    def _stop_for(self, stop: StopReason) -> None:
        if self._stop is None:
            logger.info("%s", stop.message)
            self._stop = stop

    def _check_others(self) -> None:
        """End when all are asked to, or with another: no job of fixed size trains without a node that is lost."""
        if paths.stop(self.folder).exists():
            self._stop_for(StopReason("stopped", "asked to end"))
        if self.spec.resources.least_nodes is not None:
            return  # the launchers continue without nodes that are lost
        for node in range(len(self.rendezvous.hosts)):
            path = paths.heartbeat(self.folder, node)
            if node == self.rendezvous.node or not path.exists():
                continue
            record = attempt_files.read_exit_record(self.folder, node)
            if record is None:
                if self._missed_heartbeats(path) > LOST_AFTER_HEARTBEATS:
                    message = f"node {node} has not been heard of for {LOST_AFTER_HEARTBEATS * HEARTBEAT_S:g} s"
                    self._stop_for(StopReason("failed", message, Cause.NODE_FAILURE))
            elif record.outcome == "failed":
                self._stop_for(StopReason("stopped", f"ended with node {node}, which failed"))

    def _missed_heartbeats(self, path: Path) -> int:
        """Return for how many of our own beats a file has not changed.

        No clock of another host is asked, nor one that ran on while this process was suspended.
        """
        changed = path.stat().st_mtime_ns
        before, count = self._silent_heartbeats.get(path, (0, 0))
        count = count + 1 if before == changed else 0
        self._silent_heartbeats[path] = changed, count
        return count

    def _link_logs(self) -> None:
        """Show the logs of this node's launcher, which has a folder of its own, where those of all ranks are."""
        for pattern in _LINKED:
            for path in self.own_logs.glob(pattern):
                link = self.logs / path.name
                if not (link.exists() or link.is_symlink()):
                    link.symlink_to(path.relative_to(self.logs))


def _write_line(output: BinaryIO, text: str) -> None:
    output.write(f"{text}\n".encode())

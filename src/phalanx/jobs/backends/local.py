"""`Local`: the local backend: one detached process per node of an attempt, on this machine.

A node's process holds a lock on `node-K.lock` in the attempt's folder from before it exists until it is gone: it
inherits the lock from the process that starts it. So no controller starts a node twice, wherever another one died, and
none mistakes another process with the same pid for the node. GPUs are assigned in the same way, one lock each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cluster import proc
from phalanx.cluster.spec.detect import memory_bytes
from phalanx.errors import BackendError, SpecError
from phalanx.files import liveness_lock, write_atomically
from phalanx.jobs import paths
from phalanx.jobs.attempt import files as attempt_files
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.attempt.failures import lost_node_failure, oom_failure
from phalanx.jobs.backend import Phase, Status, Submission
from phalanx.jobs.models import Failure
from phalanx.jobs.scheduling.queue import Amount, needed_amount
from phalanx.jobs.spec.training_job import TrainingJob
from phalanx.launch.request.machine import Machine

MARK = "PHALANX_JOB_FOLDER"
"""Every process of an attempt has this in its environment, and is found by it when its parents are gone."""

NODE = (sys.executable, "-m", "phalanx.jobs.node")
_LATE_S = 10.0
"""How much later than its grace a node that was asked to end is killed from here; it does so itself before."""

_KILL_S = 5.0

_MOST_NODES = 64
"""Nodes of one job on this machine: each is a process with a launcher, and an address of its own."""

_CHILDREN: dict[Path, subprocess.Popen[bytes]] = {}
"""Nodes that this process started, by their lock: only it can take note of their end, whichever `Local` asks."""


class Local:
    """Runs attempts on this machine. Every call may be repeated, also by another process."""

    name = "local"

    def __init__(
        self, machine: Amount | None = None, *, gpus: Sequence[str] | None = None, node: Sequence[str] = NODE
    ) -> None:
        """Make the backend of this machine.

        Args:
            machine: What there is to give; None looks.
            gpus: Names of its GPUs, as CUDA_VISIBLE_DEVICES spells them; None looks.
            node: What runs a node; its arguments are the attempt's folder, `--node K` and `--secrets-fd N`.
        """
        self.gpus = tuple(Machine.detect(os.environ).gpus if gpus is None else gpus)
        self.machine = machine or this_machine(len(self.gpus))
        self._node = tuple(node)

    def check(self, spec: TrainingJob) -> None:
        """Raise SpecError if this machine could never run `spec`."""
        launch_command.check(spec)
        if spec.resources.nodes > _MOST_NODES:
            raise SpecError(
                f"The job asks for {spec.resources.nodes} nodes, and this machine plays {_MOST_NODES} at most. "
                "Ask for more procs_per_node instead, or submit it to `backend: slurm` or `kubernetes`."
            )
        need = needed_amount(spec, self.machine)
        if not need.within(self.machine):
            raise SpecError(
                f"The job asks for {need.describe()} on this machine, which has {self.machine.describe()}. "
                "Ask for less, or submit it to `backend: slurm` or `kubernetes`."
            )

    def render(self, submission: Submission, *, full: bool = False) -> str:
        """Return the commands that `submit` would start, one a line."""
        mark = f"{MARK}={shlex.quote(str(submission.folder))}"
        return "\n".join(f"{mark} {shlex.join(self._argv(submission, node))}" for node in _nodes(submission))

    def submit(self, submission: Submission) -> str:
        """Start every node that was not started before; return this host with this home, and their pids.

        Raises:
            BackendError: If no process can be started, or not enough GPUs are free.
        """
        attempt_files.write_spec(submission)
        pids = [self._start(submission, node) for node in _nodes(submission)]
        return " ".join([_origin(submission), *(str(pid) for pid in pids if pid)])

    def status(self, submission: Submission, handle: str) -> Status:
        """Return where the attempt is; with a failure while it still runs if one of its nodes is lost.

        Raises:
            BackendError: If another home that shares the database started it: nothing can be known of it here.
        """
        folder, nodes = submission.folder, _nodes(submission)
        # A host may get another name; what was started from a home that is still the same has its folder there.
        if handle and not folder.exists() and not f"{handle} ".startswith(f"{_origin(submission)} "):
            raise BackendError(
                f"Attempt {submission.attempt} of {submission.job} was started from another home ({handle}), whose "
                "controller looks after it. If it waits there, end the controller here."
            )
        # A node leaves its record, then its lock: looked at in the other order, it would seem to have left without one.
        alive = [node for node in nodes if self._is_alive(folder, node)]
        started = [node for node in nodes if _was_started(folder, node)]
        if not started and not alive:
            return Status(Phase.GONE, "was not started")
        records = {node: attempt_files.read_exit_record(folder, node) for node in nodes}
        may_lose = alive and submission.spec.resources.least_nodes is not None
        lost = None if may_lose else next((n for n in started if n not in alive and records[n] is None), None)
        failure = None if lost is None else _lost_failure(folder, lost)
        if not alive and failure is None:
            failure = next(filter(None, (_oom_failure(folder, node) for node in nodes)), None)
        host = (os.uname().nodename,)
        if alive:
            activity = attempt_files.read_activity(folder, alive[0])
            return Status(Phase.RUNNING if activity == "running" else Phase.PREPARING, activity, host, failure)
        phase = Phase.SUCCEEDED if attempt_files.all_succeeded(records.values()) else Phase.FAILED
        return Status(phase, "", host, failure)

    def collect(self, submission: Submission, handle: str) -> None:
        """Do nothing: nodes write into the attempt's folder themselves."""

    def stop(self, submission: Submission, handle: str, grace_s: float) -> None:
        """Send SIGTERM to every node once; kill what is left of the attempt long after its grace."""
        folder = submission.folder
        for node in _nodes(submission):
            if not self._is_alive(folder, node):
                continue
            stop_file = folder / f"node-{node}.stop"
            if not stop_file.exists():
                stop_file.touch()
                _signal_node(folder, node)
            elif time.time() > stop_file.stat().st_mtime + grace_s + _LATE_S:
                _kill_marked(folder)

    def cleanup(self, submission: Submission, handle: str) -> None:
        """Kill what an attempt that has ended left behind, as ranks of a node that was killed."""
        _kill_marked(submission.folder)
        for node in _nodes(submission):
            self._is_alive(submission.folder, node)

    def _argv(self, submission: Submission, node: int) -> list[str]:
        return [*self._node, str(submission.folder), "--node", str(node)]

    def _start(self, submission: Submission, node: int) -> int | None:
        """Start a node, or find it; return its pid, None for one that has gone again."""
        folder = submission.folder
        with liveness_lock(_lock_file(folder, node)) as lock:
            if lock is None:
                return _running_pid(folder, node)
            if _was_started(folder, node):
                return None
            with contextlib.ExitStack() as locks:
                gpus = self._free_gpus(submission, locks)
                child = self._spawn(submission, node, lock, gpus)
        _CHILDREN[_lock_file(folder, node)] = child
        note = {"pid": child.pid, "ticks": proc.start_ticks(child.pid), "oom_kills": _oom_kills()}
        write_atomically(_pid_file(folder, node), json.dumps(note))
        return child.pid

    def _spawn(self, submission: Submission, node: int, lock: int, gpus: dict[str, int]) -> subprocess.Popen[bytes]:
        # A pipe takes 64 KiB before its writer waits, a memory file takes all: the node may read when it likes.
        secrets = os.memfd_create("secrets")
        os.write(secrets, json.dumps(submission.secrets).encode())
        os.lseek(secrets, 0, os.SEEK_SET)
        log = paths.logs(submission.folder) / f"node-{node}.log"
        environment = {**os.environ, MARK: str(submission.folder)}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            with log.open("ab") as output:
                return subprocess.Popen(
                    [*self._argv(submission, node), "--secrets-fd", str(secrets)],
                    cwd=submission.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[lock, secrets, *gpus.values()],
                )
        except OSError as error:
            raise BackendError(f"Node {node} of {submission.job} could not be started: {error}.") from error
        finally:
            os.close(secrets)

    def _free_gpus(self, submission: Submission, locks: contextlib.ExitStack) -> dict[str, int]:
        """Lock as many GPUs as a node asks for; names and descriptors, which the node inherits."""
        count, locked = submission.spec.resources.gpu, dict[str, int]()
        for gpu in self.gpus:
            if len(locked) == count:
                break
            name = gpu.replace("/", "_")
            lock = locks.enter_context(liveness_lock(submission.folder.parents[2] / "cards" / f"{name}.lock"))
            if lock is not None:
                locked[gpu] = lock
        if len(locked) < count:
            raise BackendError(f"A node of {submission.job} needs {count} gpu, and {len(locked)} are free.")
        return locked

    def _is_alive(self, folder: Path, node: int) -> bool:
        """Return whether a node's process is there, and forget it when it was ours and is not."""
        path = _lock_file(folder, node)
        if not path.exists():
            return False
        with liveness_lock(path) as lock:
            if lock is None:
                return True
        if child := _CHILDREN.pop(path, None):
            child.wait()
        return False


def this_machine(gpus: int | None = None) -> Amount:
    """Return what this machine has to give, with so many GPUs, or those that are there."""
    count = len(Machine.detect(os.environ).gpus) if gpus is None else gpus
    return Amount(len(os.sched_getaffinity(0)) * 1000, memory_bytes() // 2**20, count)


def _nodes(submission: Submission) -> range:
    return range(submission.spec.resources.nodes)


def _origin(submission: Submission) -> str:
    return f"{os.uname().nodename}:{submission.folder.parents[2]}"


def _lock_file(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.lock"


def _pid_file(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.pid"


def _was_started(folder: Path, node: int) -> bool:
    """Return whether a node ever ran: it writes its first beat before it starts anything of the user's."""
    signs = (_pid_file(folder, node), paths.heartbeat(folder, node), paths.exit_record(folder, node))
    return any(path.exists() for path in signs)


def _pid(folder: Path, node: int) -> int | None:
    """Return the pid of a running node, found by its arguments if its starter died before it noted the pid."""
    note = _read_pid_note(folder, node)
    if note and proc.start_ticks(note["pid"]) == note["ticks"]:
        return note["pid"]
    arguments = [str(folder), "--node", str(node)]
    for pid in _marked_pids(folder):
        words = _read(pid, "cmdline").decode(errors="replace").split("\0")
        if any(words[at : at + 3] == arguments for at in range(len(words))):
            return pid
    return None


def _running_pid(folder: Path, node: int) -> int:
    """Return the pid of a node whose lock is held.

    Raises:
        BackendError: If another process looks at the lock, or starts the node, at this moment.
    """
    if (pid := _pid(folder, node)) is None:
        raise BackendError(f"Node {node} in {folder} is being started by another process.")
    return pid


def _read_pid_note(folder: Path, node: int) -> dict[str, int]:
    try:
        note: dict[str, int] = json.loads(_pid_file(folder, node).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return note


def _lost_failure(folder: Path, node: int) -> Failure:
    """Return why a node is gone that left no record."""
    return _oom_failure(folder, node) or lost_node_failure(node, "its process is gone")


def _oom_failure(folder: Path, node: int) -> Failure | None:
    """Return an out-of-memory failure if the kernel killed processes since the node started."""
    kills = _oom_kills()
    kills -= _read_pid_note(folder, node).get("oom_kills", kills)
    return oom_failure(node, kills) if kills > 0 else None


def _oom_kills() -> int:
    """Return how many processes the kernel has killed so far because memory ran out, of the machine or of a cgroup."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="utf-8"), re.MULTILINE)
    return int(match[1]) if match else 0


def _signal_node(folder: Path, node: int) -> None:
    if (pid := _pid(folder, node)) is not None:
        with contextlib.suppress(ProcessLookupError):  # It ended by itself a moment before.
            os.kill(pid, signal.SIGTERM)


def _kill_marked(folder: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while pids := _marked_pids(folder):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise BackendError(f"Processes {pids} of {folder} do not end after SIGKILL; the kernel holds them.")
        time.sleep(0.01)


def _marked_pids(folder: Path) -> list[int]:
    """Return the pids of an attempt's processes; zombies have no environment any more."""
    mark = f"{MARK}={folder}".encode()
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if mark in _read(pid, "environ").split(b"\0")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # It ended meanwhile, or is another user's.
        return b""

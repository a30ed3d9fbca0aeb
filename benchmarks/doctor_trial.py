"""`Trial`: one run of a fault, with what it needs of the machine, and the end of all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from benchmarks import network_spaces
from benchmarks.doctor_faults import Fault
from benchmarks.elastic_jobs import MARK, end
from benchmarks.network_spaces import NetworkSpaces

LIMIT_S = 120.0
_QUOTA_US = 10_000
"""Of each 100 ms: a tenth of a core."""

_SWAP_LIMIT = 128 << 20
"""What a rank may keep of the memory that it takes once it is in the group: half of what it then touches."""

_DISK = 'mount -t tmpfs -o size=256k tmpfs disk && exec "$@"'


def why_not(fault: Fault) -> str:
    """Return why a fault cannot be drawn on this machine; empty where it can."""
    if not fault.needs:
        return ""
    if os.getuid() != 0:
        return "needs root"
    if fault.needs == "network" and not network_spaces.are_possible():
        return "needs the right to make network namespaces"
    if fault.needs == "swap" and len(Path("/proc/swaps").read_text(encoding="utf-8").splitlines()) < 2:
        return "needs swap, and this machine has none (swapon)"
    return ""


class Trial:
    """A context in which launchers of one job run.

    Args:
        fault: What happens.
        script: What runs in place of its script.
    """

    def __init__(self, fault: Fault, script: str = "") -> None:
        self.fault = fault
        self.mark = uuid.uuid4().hex
        self.started = time.time()
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.spaces: NetworkSpaces | None = None
        self._script = script or fault.script
        self._stack = ExitStack()
        self._environment: dict[str, str] = {}
        self._enter: tuple[str, ...] = ()
        self._has_struck = False

    def __enter__(self) -> Trial:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        (self.folder / "train.py").write_text(self._script)
        if self.fault.needs in ("quota", "swap"):
            self._environment["FAULT_CGROUP"] = str(self._stack.enter_context(_control_group(self.fault.needs)))
        elif self.fault.needs == "network":
            self.spaces = self._stack.enter_context(NetworkSpaces(self.fault.ranks))
        elif self.fault.needs == "disk":
            (self.folder / "disk").mkdir()
            self._enter = ("unshare", "-m", "sh", "-c", _DISK, "sh")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in self.launchers:
            try:
                launcher.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        end(self.mark)  # a rank that holds its interpreter lock hears no SIGTERM, and torchrun may be gone before it
        self._stack.close()

    @property
    def nodes(self) -> int:
        """Launchers that the job has."""
        return 1 if self.spaces is None else len(self.spaces.addresses)

    def start(self, command: Sequence[object], node: int = 0, **environment: str) -> None:
        """Start a launcher; what it prints goes to one file."""
        enter = self._enter if self.spaces is None else self.spaces.enter(node)
        known = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self.mark}
        with (self.folder / "output").open("ab") as output:
            self.launchers.append(
                subprocess.Popen(
                    [*enter, *map(str, command)],
                    cwd=self.folder,
                    env={**os.environ, **known, **self._environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def wait_until(self, is_over: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait for a moment of the job; False if all launchers have ended, or time is over, before it came."""
        deadline = time.monotonic() + limit_s
        while not is_over():
            if time.monotonic() > deadline or all(launcher.poll() is not None for launcher in self.launchers):
                return is_over()
            if self.spaces is not None and not self._has_struck and self.fault_at is not None:
                self._has_struck = True
                self.spaces.unplug(self.nodes - 1)
            time.sleep(0.05)
        return True

    @property
    def output(self) -> str:
        """What the launchers have said so far."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def fault_at(self) -> float | None:
        """When the fault came about."""
        try:
            return float((self.folder / "fault").read_text())
        except (OSError, ValueError):  # not yet, or half written
            return None

    def seconds(self) -> float:
        """Return the time since the fault, or since the start where none came about."""
        return time.time() - (self.fault_at or self.started)


@contextmanager
def _control_group(needs: str) -> Iterator[Path]:
    """A control group with a quota, or a limit of memory, which a rank joins by its `cgroup.procs`."""
    controller = "cpu" if needs == "quota" else "memory"
    v1 = Path("/sys/fs/cgroup") / controller
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"phalanx-bench-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if v1.is_dir():
            name, value = (
                ("cpu.cfs_quota_us", _QUOTA_US) if needs == "quota" else ("memory.limit_in_bytes", _SWAP_LIMIT)
            )
            (group / name).write_text(str(value))
        else:
            name, text = ("cpu.max", f"{_QUOTA_US} 100000") if needs == "quota" else ("memory.high", str(_SWAP_LIMIT))
            (group / name).write_text(text)
        yield group
    finally:
        deadline = time.monotonic() + 5.0
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()

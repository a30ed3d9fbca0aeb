"""Run the real launcher from a test, and see that nothing of it is left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warm_launcher import WarmProcess

BIN = Path(sys.executable).parent
RUN = (str(BIN / "phalanx"), "run")

WARM = ("warm",)
"""A launcher that is forked where torch is imported already: see `warm_launcher`."""

SPARSE_MODEL = """
import torch, torch.nn.functional as F
from torch import nn
import phalanx as px
from phalanx import fleet

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = px.ps.SparseEmbedding(4, init=px.ps.Constant(0.1))
        self.head = nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.ids(ids).flatten(1))
"""
"""How a script begins that trains a table and a dense layer."""


@dataclass
class Launch:
    """One launcher under test. Every process it starts carries a mark in its environment."""

    arguments: tuple[str, ...]
    cwd: Path
    program: tuple[str, ...] = RUN
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | WarmProcess = field(init=False)
    out: str = ""
    err: str = ""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment = {**inherited, "LAUNCH_TEST_MARK": self.mark, **self.environment}
        if self.program == WARM:
            self.process = WarmProcess(self.arguments, self.cwd, environment)
            return
        self.process = subprocess.Popen(
            [*self.program, *self.arguments],
            cwd=self.cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, timeout_s: float = 60.0) -> Launch:
        """Wait for the end; the test fails with everything said when it does not come."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s\n{self._kill()}") from None
        return self

    def _kill(self) -> str:
        """Kill every process, as any of them holds the pipes open; returns everything said."""
        self.process.kill()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "\n".join(self.process.communicate())

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        assert self.process.returncode is not None
        return self.process.returncode

    def log(self, name: str) -> str:
        """Text of a file in the default log folder."""
        return (self.cwd / "log" / name).read_text()

    def alive(self) -> list[int]:
        """Pids of every process that carries the mark or is of a warm launcher's session, the launcher included."""
        if isinstance(self.process, WarmProcess):
            return [pid for pid in _pids() if _session(pid) == self.process.pid]
        return [pid for pid in _pids() if f"LAUNCH_TEST_MARK={self.mark}".encode() in _environment(pid)]

    def gone_within(self, timeout_s: float) -> float:
        """Seconds until no process is left, or an assertion naming those that are."""
        started = time.monotonic()
        while left := self.alive():
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"still there after {timeout_s} s: {[_command(pid) for pid in left]}")
            time.sleep(0.01)
        return time.monotonic() - started

    def wait_for(self, path: Path, timeout_s: float = 30.0) -> str:
        """Wait until a file of the job exists and has text; returns it."""
        deadline = time.monotonic() + timeout_s
        while not (path.exists() and path.read_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{path} did not come:\n{self._kill()}")
            time.sleep(0.01)
        return path.read_text()


def launch(cwd: Path, *arguments: str, timeout_s: float = 60.0, **more: object) -> Launch:
    """Run the launcher to its end and see that no process is left."""
    done = Launch(arguments, cwd, **more).wait(timeout_s)  # type: ignore[arg-type]
    done.gone_within(0.5)
    return done


def launch_servers(cwd: Path, servers: int, workers: int, *arguments: str, **more: object) -> Launch:
    """Run a job with parameter servers, as `launch` does."""
    return launch(cwd, "--server-num", str(servers), "--worker-num", str(workers), *arguments, **more)  # type: ignore[arg-type]


launch_warm = functools.partial(launch, program=WARM)
"""`launch` for a test of what happens after ranks have begun."""

launch_servers_warm = functools.partial(launch_servers, program=WARM)
"""The same with parameter servers."""


def free_ports(count: int) -> list[int]:
    """Return ports for processes that must agree on them beforehand. Each is free until somebody binds it."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))  # free on every address: nodes of a test have several
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> str:
    """Return one of `free_ports`, as a flag takes it."""
    return str(free_ports(1)[0])


def wait_until(look: Callable[[], Any], timeout_s: float = 60.0, pause_s: float = 0.01) -> Any:
    """Wait for something that another process does, which nothing announces; return what `look` then returns."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"it did not come within {timeout_s:g} s"
        time.sleep(pause_s)
    return found


def result_of(log: str) -> Any:
    """Return what a script printed as JSON after the word RESULT."""
    return json.loads(log.rpartition("RESULT ")[2].splitlines()[0])


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def _environment(pid: int) -> bytes:
    # Zombies and processes that ended meanwhile have none.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _session(pid: int) -> int:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return 0
    return 0 if state == "Z" else int(session)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"{pid} (gone)"

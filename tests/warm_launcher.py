"""`WarmProcess`: a launcher forked from the server of the ranks of tests, where torch is imported already.

What it starts, it forks in turn: the job has the launcher, the fork server and the ranks of any other, and is spared
three to five seconds of processor time in which each of them would import torch. What a test is about that comes before
the first rank (imports, the environment in which libraries are loaded), or about shares of processors, which sessions
have of their own on Linux, needs a launcher that is started from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ranks import PRELOAD, bare_main

TESTS = str(Path(__file__).parent)

LAUNCHER = ("phalanx.launch.cli.flags", "phalanx.launch.job.launcher", "phalanx.launch.process.fork_server")


class WarmProcess:
    """A launcher, as `subprocess.Popen` shows one whose output is read as text."""

    def __init__(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *LAUNCHER])
        (out, write_out), (err, write_err) = os.pipe(), os.pipe()
        arguments, environment = [os.fspath(argument) for argument in arguments], dict(environment)
        self._process: BaseProcess = context.Process(
            target=_run_launcher, args=(arguments, str(cwd), environment, _Streams(write_out, write_err)), daemon=False
        )
        with bare_main():
            self._process.start()
        os.close(write_out)
        os.close(write_err)
        self.stdout, self.stderr = map(os.fdopen, (out, err))

    @property
    def pid(self) -> int:
        """Of the launcher; its session has this number too."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the number of a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a launcher that runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("phalanx run", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both outputs to their ends, wait, and return them."""
        texts = ["", ""]

        def read(number: int, stream: TextIO) -> None:
            with stream:
                texts[number] = stream.read()

        readers = [threading.Thread(target=read, args=it) for it in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return texts[0], texts[1]


class _Streams:
    """The two descriptors of an output, as they are passed to a process that is about to start."""

    def __init__(self, out: int, err: int) -> None:
        self._numbers = out, err

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, tuple(DupFd(number) for number in self._numbers)


def _detached(*duplicates: Any) -> tuple[int, ...]:
    return tuple(duplicate.detach() for duplicate in duplicates)


def _run_launcher(arguments: list[str], cwd: str, environment: dict[str, str], streams: tuple[int, int]) -> NoReturn:
    code = 1
    try:
        _become_program(arguments, cwd, environment, streams)
        from phalanx.launch.cli.command import main
        from phalanx.launch.job import fork_server_handle

        fork_server_handle.start_process = _fork_server
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 -- nothing may continue in the server's own code
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_program(arguments: list[str], cwd: str, environment: dict[str, str], streams: tuple[int, int]) -> None:
    """Leave nothing that a program started by itself would not have."""
    os.setsid()
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["phalanx", "run", *arguments]
    sys.path[:] = [folder for folder in sys.path if not folder.startswith(TESTS)]
    sys.modules.pop("phalanx.ps.server.main")  # a rank that serves is known by it
    _forget_parent()


def _forget_parent() -> None:
    """Undo what makes a process a child of `multiprocessing`'s server: start methods and workers are the script's."""
    from multiprocessing import forkserver, process, resource_tracker

    multiprocessing.set_start_method(None, force=True)
    process._parent_process = None
    main = multiprocessing.current_process()
    main.name, main._identity, main._parent_pid = "MainProcess", (), None
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()


def _fork_server(fd: int) -> int:
    """Fork what `fork_server_handle.start_process` starts."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        from phalanx.launch import preload
        from phalanx.launch.process import fork_server, wire

        os.dup2(fd, wire.SERVER_FD)
        os.closerange(wire.SERVER_FD + 1, 1024)
        signal.set_wakeup_fd(-1)
        load = preload.preload

        def load_and_set_threads(needed: Sequence[str]) -> None:
            load(needed)
            import torch

            if count := os.environ.get("OMP_NUM_THREADS"):
                torch.set_num_threads(int(count))

        preload.preload = load_and_set_threads
        fork_server.main()
    finally:
        os._exit(1)

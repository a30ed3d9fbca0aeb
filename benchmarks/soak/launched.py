"""`LaunchedJob`: the launchers of one job, in a /dev/shm of their own; what they say, and what they leave."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.elastic_jobs import MARK, ROOT, await_end, end, marked

RUN = (sys.executable, "-m", "phalanx", "run")
_KEEP = (
    'mount -t tmpfs -o size="$1" tmpfs /dev/shm && { [ -z "$2" ] || mount -t tmpfs -o size="$3" tmpfs "$2"; } && echo'
)


@functools.cache
def can_mount() -> bool:
    """Return whether this user may mount: jobs then have a /dev/shm, and disks, of their own."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


class LaunchedJob:
    """A context that ends, and counts, all that its launchers have left.

    Args:
        folder: Where everything runs; created if missing.
        shm: Size of the /dev/shm of the job, where this user may mount.
        disk: A folder of the job that is to be a file system of its own, and its size.
    """

    def __init__(self, folder: Path, *, shm: str = "64m", disk: tuple[Path, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.has_timed_out = False
        self._mark = uuid.uuid4().hex
        self._shm, self._disk = shm, disk
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> LaunchedJob:
        if can_mount():
            path, size = self._disk or ("", "")
            script = f"{_KEEP} && exec cat"  # until this process has ended, in whatever way
            words = ["unshare", "-m", "sh", "-c", script, "sh", self._shm, str(path), size]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._keeper = subprocess.Popen(words, **pipes, text=True, start_new_session=True)
            assert self._keeper.stdout is not None
            self._keeper.stdout.readline()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        end(self._mark)
        for launcher in self.launchers:
            launcher.wait()
        if self._keeper is not None:
            self._keeper.communicate()

    def inside(self, path: Path) -> Path:
        """Return where this process sees a path of the job."""
        return path if self._keeper is None else Path(f"/proc/{self._keeper.pid}/root{path}")

    def start(
        self, *arguments: object, enter: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `phalanx run` with arguments; its output goes to a file of the folder."""
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = [*RUN, *map(str, arguments)]
        if self._keeper is not None:
            into = ["nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", "sh", "-c", 'cd "$0" && exec "$@"']
            command = [*into, str(self.folder), *command]
        with (self.folder / f"launcher.{len(self.launchers)}").open("wb") as output:
            launcher = subprocess.Popen(
                [*enter, *command],
                cwd=self.folder,
                env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: self._mark, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what ends the soak must not end this job at the same time
            )
        self.launchers.append(launcher)
        return launcher

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        """Wait for a moment of the job; False when all launchers have ended, or time is over, before it came."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline or all(launcher.poll() is not None for launcher in self.launchers):
                return is_so()
            time.sleep(0.01)
        return True

    def wait(self, timeout_s: float) -> list[int]:
        """Wait for the end of all launchers; returns their exit codes. One that takes too long is killed."""
        deadline = time.monotonic() + timeout_s
        for launcher in self.launchers:
            try:
                launcher.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.has_timed_out = True
                self._show_stacks()
                end(self._mark)
                launcher.wait()
        return [launcher.returncode for launcher in self.launchers]

    def _show_stacks(self) -> None:
        for pid in marked(self._mark):
            try:
                if pid not in [launcher.pid for launcher in self.launchers]:
                    os.kill(pid, signal.SIGUSR1)  # the ranks of the soak then write where they are
            except ProcessLookupError:
                continue
        time.sleep(0.5)

    def remaining(self) -> list[str]:
        """Return in words which processes and files in /dev/shm are left."""
        left = await_end(self._mark, 2.0)
        if self._keeper is not None:
            shm = Path(f"/proc/{self._keeper.pid}/root/dev/shm")
            left += [f"/dev/shm/{name}" for name in sorted(os.listdir(shm))]
        return left

    def output(self) -> str:
        """Return what the launchers have said so far."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("launcher.*")))

    def report(self) -> str:
        """Return the end of all that was said, for whoever looks for the reason."""
        paths = [*sorted(self.folder.glob("launcher.*")), *sorted(self.folder.glob("log*/*log.*"))]
        return "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

"""`LogFolder`: the log folder of a job, locked; logs of the previous run are archived."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from phalanx.cluster.disk_space import describe_full, is_full, named_errors
from phalanx.errors import LaunchError
from phalanx.files import temporary_path, try_lock, write_atomically
from phalanx.i18n import tr
from phalanx.launch.hang.verdict import Verdict

logger = logging.getLogger("phalanx.launch")

ENDED = "ended.json"
"""How the job ended, for programs: the launcher's exit code with the first failure, or the launcher's own error."""

HANG = "hang.json"
"""Why the job is stalled, for programs; there while it does not."""

SLOW = "slow.json"
"""Which ranks the others wait for, and why, for programs: of the last minute, or of a run that has ended."""

_BLOCK = 4096
"""Bytes without which a file can hardly grow."""

_LAUNCHER_BYTES = 16 << 10
"""Bytes that a start needs for the launcher's own files."""

_OURS = (
    ENDED,
    HANG,
    SLOW,
    "workerlog.*",
    "serverlog.*",
    "heterlog.*",
    "endpoints.log",
    "error.*",
    "events.*",
    "status.*",
    "flight.*",
    "launcher.*",
    "attempt-*",
    "servers",
    "rank_[0-9]*",
    "server_[0-9]*",
    "heter_worker_[0-9]*",
)


class LogFolder:
    """The folder this job writes to, locked for as long as the launcher lives."""

    def __init__(self, log_dir: str) -> None:
        """Take `asked`, or `asked.2`, `asked.3`, ... while other jobs that still run hold those before.

        Raises:
            LaunchError: If the folder cannot be made or written to, or is full.
        """
        self.path, self._lock = _lock_folder(log_dir)
        self._is_full = self._is_gone = False
        _check_disk_space(self.path, log_dir)
        if str(self.path) != os.path.abspath(log_dir):
            logger.warning("%s is in use by another job that runs now; this one writes to %s", log_dir, self.path)
        try:
            self._move("previous", replace=True)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            raise LaunchError(
                tr("--log-dir {folder} cannot be written to ({why}). Choose another folder.", folder=log_dir, why=why)
            ) from None

    def archive_attempt(self, attempt: int) -> None:
        """Move the files of an attempt that failed to `attempt-N`, if there is room for a folder."""
        with self.tolerating(f"attempt-{attempt}"):
            self._move(f"attempt-{attempt}", replace=False)

    def record_end(self, **values: Any) -> None:
        """Write how the job ended, atomically; a full disk is no error: the job has ended all the same."""
        record, path = json.dumps(values), self.path / ENDED
        with self.tolerating(ENDED):
            self.path.mkdir(parents=True, exist_ok=True)  # deleted while the job ran
            with named_errors(temporary_path(path), len(record)):
                write_atomically(path, record)

    def record_hang(self, verdict: Verdict | None) -> None:
        """Write why the job is stalled, or with None that it does again."""
        path = self.path / HANG
        with self.tolerating(HANG):
            if verdict is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json.dumps(verdict.to_json()))

    def record_slow(self, lines: Sequence[str], **facts: Any) -> None:
        """Write which ranks are slow, and why, in words and in numbers; no lines where none is."""
        path = self.path / SLOW
        with self.tolerating(SLOW):
            if lines:
                write_atomically(path, json.dumps({"lines": [*lines], **facts}))
            else:
                path.unlink(missing_ok=True)

    @contextmanager
    def tolerating(self, name: str) -> Iterator[None]:
        """Warn, and no more, when a file of this folder cannot be written: how the job ends is for its ranks to say."""
        try:
            yield
        except OSError as error:
            logger.warning(
                tr(
                    "{what} was not written ({why}). The job is not affected.",
                    what=self.path / name,
                    why=error.strerror,
                )
            )

    def check_disk_space(self) -> None:
        """Warn when the folder is deleted, or its file system has become full: output of the ranks is lost then."""
        try:
            was_full, self._is_full = self._is_full, shutil.disk_usage(self.path).free < _BLOCK
        except FileNotFoundError as error:
            if not self._is_gone:
                logger.warning(
                    tr("{what} was not written ({why}). The job is not affected.", what=self.path, why=error.strerror)
                )
            self._is_gone = True
            return
        if self._is_full and not was_full:
            logger.warning(
                tr(
                    "What the ranks print is lost until there is room: {why}. The job continues.",
                    why=describe_full(self.path, _BLOCK),
                )
            )

    def _move(self, name: str, *, replace: bool) -> None:
        paths = [p for pattern in _OURS for p in self.path.glob(pattern) if p.name != name]
        if not replace:
            paths = [p for p in paths if not p.name.startswith("attempt-")]
        if paths:
            _move_all(paths, self.path / name, replace=replace)


def _move_all(paths: list[Path], target: Path, *, replace: bool) -> None:
    if replace:
        shutil.rmtree(target, ignore_errors=True)
    target.mkdir(exist_ok=True)
    for path in paths:
        try:
            path.rename(target / path.name)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EXDEV):
                raise
            # A mount stays where it is, and what is in it moves inside it.
            within = [p for p in path.iterdir() if p.name != target.name]
            _move_all(within, path / target.name, replace=replace)


def _check_disk_space(path: Path, log_dir: str) -> None:
    """Raise LaunchError where not even the launcher's own files would find room."""
    probe = path / ".room"
    try:
        with named_errors(probe, _LAUNCHER_BYTES):
            probe.write_bytes(bytes(_LAUNCHER_BYTES))
        probe.unlink()
    except OSError as error:
        why = describe_full(log_dir, _LAUNCHER_BYTES) if is_full(error) else error.strerror
        raise LaunchError(
            tr("--log-dir {folder} cannot be written to ({why}). Choose another folder.", folder=log_dir, why=why)
        ) from None


def _lock_folder(log_dir: str) -> tuple[Path, TextIO]:
    for number in range(1, 1000):
        path = Path(os.path.abspath(log_dir if number == 1 else f"{log_dir}.{number}"))
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = try_lock(path / ".lock")
        except OSError as error:
            why = error.strerror
            raise LaunchError(
                tr("--log-dir {folder} cannot be written to ({why}). Choose another folder.", folder=log_dir, why=why)
            ) from None
        if descriptor is not None:
            return path, os.fdopen(descriptor, "a")
    raise LaunchError(f"--log-dir {log_dir}: 999 jobs write there already. Choose another folder.")


def append_event(log_dir: str, event: Mapping[str, Any], *, node: int = 0) -> None:
    """Append to the events of a run's launcher. A full disk is no reason to stop."""
    path = f"{log_dir}/events.launcher.{node}.jsonl"
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")

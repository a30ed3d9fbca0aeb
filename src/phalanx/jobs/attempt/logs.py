"""`LogPart`: read, follow and cap the log files of an attempt.

A rank that writes without end keeps its first and its last bytes: the middle of its file is given back to the file
system as a hole, so offsets stay what they are, and reading continues behind the hole, saying how much is gone.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import NotFoundError
from phalanx.jobs import paths, redact

logger = logging.getLogger("phalanx.jobs")

CAP_BYTES = 64 * 2**20
"""What one log may take on disk, and what it may grow by between two looks of the controller."""

HEAD_BYTES = 8 * 2**20
TAIL_BYTES = 24 * 2**20
"""What remains of a log that takes more."""

MOST_BYTES = 2**20
"""Most that one call reads."""

_REPORT_BYTES = 2**16
"""Most of a hang report."""

_LEAST_BYTES = 16
"""Fewer could be less than one letter."""

_FILES = {"": "workerlog.{}", "server-": "serverlog.{}", "heter-": "heterlog.{}", "node-": "node-{}.log"}
"""Prefix of a log's name and the file it means."""

_PUNCH_HOLE = 0x1 | 0x2
_NOISE = re.compile(r"^.*Error waiting on exit barrier.*$", re.MULTILINE)
_NOISE_NOTE = "  [phalanx: harmless after a success: the first node was done and had closed its store]"


@dataclass(frozen=True)
class LogPart:
    """Some of one log of an attempt.

    Attributes:
        text: What was read, bytes that are no UTF-8 replaced, values of secrets removed; empty at the present end.
        next: Byte offset to continue from.
        ended: Whether the attempt has ended and nothing lies behind `next`.
    """

    text: str
    next: int
    ended: bool


def list_logs(folder: Path) -> list[str]:
    """Return the names of the logs of an attempt: "0", "1", ... of ranks, then "server-0", ... and "node-0", ..."""
    log_names = []
    for prefix, pattern in _FILES.items():
        start, end = pattern.split("{}")
        numbers = [
            path.name[len(start) : len(path.name) - len(end)] for path in paths.logs(folder).glob(f"{start}*{end}")
        ]
        log_names += [f"{prefix}{number}" for number in sorted((n for n in numbers if n.isdecimal()), key=int)]
    return log_names


def read(
    folder: Path, name: str, offset: int = 0, limit: int = 2**16, *, secrets: Collection[str] = (), ended: bool = False
) -> LogPart:
    """Return text of one log from a byte offset on, in whole lines where it can.

    Args:
        folder: The attempt's folder.
        name: The log, as `list_logs` has it.
        offset: Where to begin; a negative one counts from the end.
        limit: Most bytes to read, up to MOST_BYTES.
        secrets: Values to strike out, also those that lie across the ends of what is read.
        ended: Whether the attempt has ended. Until then what may be half a secret, or half a letter, is left.

    Raises:
        NotFoundError: If there can be no such log.
    """
    path = _path(folder, name)
    if path is None:
        return LogPart("", max(0, offset), ended)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        first, note = _behind_hole(file.fileno(), start, size)
        hole = os.lseek(file.fileno(), first, os.SEEK_HOLE) if first < size else size
        values = _values(secrets)
        overlap = max(map(len, values), default=1) - 1
        before = os.pread(file.fileno(), min(overlap, first), first - min(overlap, first))
        limit = min(max(_LEAST_BYTES, min(limit, MOST_BYTES)), hole - first)
        raw = os.pread(file.fileno(), limit + overlap, first)
    body = raw[:limit]
    if first + len(body) < size:
        body = body[: body.rfind(b"\n") + 1 or _whole_letters(body)]
    elif not ended:
        body = body[: min(_whole_letters(body), len(body) - _half_a_secret(body, values))]
    text = _redact_bytes(before, body, raw[len(body) : len(body) + overlap], values).decode(errors="replace")
    end = first + len(body)
    return LogPart(note + _NOISE.sub(lambda line: line[0] + _NOISE_NOTE, text), end, ended and end == size)


def last_sign(folder: Path) -> float:
    """Return when any log or run event of an attempt last grew, in seconds since the epoch; 0 if there is none."""
    return max((file.stat().st_mtime for file in _all(folder)), default=0.0)


def last_signs(folder: Path) -> dict[str, float]:
    """Return when the log or the run events of each rank last grew, in seconds since the epoch, by name of its log."""
    last: dict[str, float] = {}
    for name in list_logs(folder):
        files = [_path(folder, name), paths.logs(folder) / f"events.worker.{name}.jsonl"]
        times = [file.stat().st_mtime for file in files if file is not None and file.is_file()]
        if name.isdecimal() and times:
            last[name] = max(times)
    return last


def cap_sizes(folder: Path) -> None:
    """Give back the middle of every log that takes more than CAP_BYTES on disk."""
    for path in _all(folder):
        status = path.stat()
        if status.st_blocks * 512 > CAP_BYTES:
            # Whole blocks only: parts of one would not be freed but filled with zeros, which a reader would see.
            block = status.st_blksize
            _punch(path, -(-HEAD_BYTES // block) * block, (status.st_size - TAIL_BYTES) // block * block)


def _all(folder: Path) -> list[Path]:
    # Files of a launcher lie in a folder of its node, and are linked; links are left out, so each counts once.
    return [path for path in paths.logs(folder).rglob("*") if path.is_file() and not path.is_symlink()]


def is_own(folder: Path, path: Path) -> bool:
    """Return whether a file is in the logs of an attempt: jobs write there, and could link to what is not theirs."""
    return path.resolve().is_relative_to(paths.logs(folder).resolve())


def read_report(folder: Path, name: str) -> str:
    """Return the lines of a report that an attempt's first launcher wrote; "" where there is none.

    Args:
        folder: The attempt's.
        name: Name of the file, such as `hang.json`.
    """
    path = paths.launcher_logs(folder, 0) / name
    try:
        if not path.is_file() or not is_own(folder, path):
            return ""
        with path.open("rb") as file:
            lines = json.loads(file.read(_REPORT_BYTES))["lines"]
        text = "\n".join(line for line in lines if isinstance(line, str))
        text.encode()  # half a pair of surrogates could not be sent
        return text
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""  # there is none, or a script wrote a file of that name


def server_files(folder: Path) -> list[Path]:
    """Return the files in which the parameter servers of an attempt report what they hold."""
    return [path for path in paths.logs(folder).glob("status.server.*.json") if is_own(folder, path)]


def _path(folder: Path, name: str) -> Path | None:
    """Return the file of a log, None while there is none."""
    match = re.fullmatch(r"(|server-|heter-|node-)(\d{1,6})", name, re.ASCII)
    if match is None:
        raise NotFoundError(f"There is no log {name!r}. Logs are called 0, 1, ... by rank, server-0 and node-0.")
    path = paths.logs(folder) / _FILES[match[1]].format(match[2])
    if not path.is_file():  # Nor what a job made in its place: a pipe would be waited for, without end.
        return None
    if not is_own(folder, path):
        raise NotFoundError(f"Log {name!r} is a link out of the attempt's folder, which is not followed.")
    return path


def _behind_hole(descriptor: int, start: int, size: int) -> tuple[int, str]:
    """Return where data begins from `start` on, and a note about what was dropped before it."""
    try:
        first = os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        first = size
    if first == start:
        return first, ""
    extent = f"its first {HEAD_BYTES >> 20} MiB and last {TAIL_BYTES >> 20} MiB"
    return first, f"[phalanx: {first - start} bytes were dropped here; a long log keeps {extent}]\n"


def _values(secrets: Collection[str]) -> list[bytes]:
    """Return what to look for, the longest first: values, and the lines of those that have several."""
    return [part.encode() for part in redact.parts(secrets)]


def _redact_bytes(before: bytes, body: bytes, after: bytes, values: list[bytes]) -> bytes:
    """Return `body` with every value replaced, seen together with what lies around it."""
    if not values:
        return body
    whole, low, high = before + body + after, len(before), len(before) + len(body)
    parts, at = [], low
    for match in re.finditer(b"|".join(map(re.escape, values)), whole):
        if match.end() <= low or match.start() >= high:
            continue
        parts.append(whole[at : max(at, match.start())])
        if match.start() >= low:
            parts.append(redact.MARK.encode())
        at = min(match.end(), high)
    return b"".join([*parts, whole[at:high]])


def _half_a_secret(body: bytes, values: list[bytes]) -> int:
    """Return how many bytes at the end of `body` may be the beginning of a value."""
    lengths = (n for value in values for n in range(min(len(value) - 1, len(body)), 0, -1) if body.endswith(value[:n]))
    return max(lengths, default=0)


def _whole_letters(body: bytes) -> int:
    """Return the length of `body` without an unfinished UTF-8 letter at its end."""
    for back in range(1, min(4, len(body)) + 1):
        byte = body[-back]
        if byte & 0xC0 == 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(body) if back >= needed else len(body) - back
        if byte < 0x80:
            break
    return len(body)


def _punch(path: Path, start: int, end: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    offset, length = ctypes.c_int64(start), ctypes.c_int64(end - start)
    with path.open("r+b", buffering=0) as file:
        if end > start and libc.fallocate64(file.fileno(), _PUNCH_HOLE, offset, length) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(path))
            logger.warning(
                "%s takes more than %d MiB, and its file system can free no part of it.", path, CAP_BYTES >> 20
            )

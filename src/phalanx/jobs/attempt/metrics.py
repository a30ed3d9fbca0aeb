"""`Reports`: read training metrics of an attempt from the ranks' event files: steps, losses, samples per second."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.jobs import paths

_LIMIT = 1 << 20
"""Most bytes read from one rank's file at once."""


LAUNCHER = "launcher."
"""How the name of a launcher's events begins."""


@dataclass(frozen=True)
class Reports:
    """Events of one rank, and where to read on.

    Attributes:
        rank: As in the file's name: `worker.0`, `server.1`.
        events: `{"time", "step", "loss", ...}`, in the order they were written.
        offset: Bytes read so far; given back, it yields what came after.
    """

    rank: str
    events: list[dict[str, Any]]
    offset: int


def ranks(folder: Path) -> list[str]:
    """Return the ranks of the attempt in `folder` that have a file of run events, in order."""
    names = [name for name in _names(folder) if not name.startswith(LAUNCHER)]
    return sorted(names, key=lambda name: (name.rpartition(".")[0], _number(name)))


def read(folder: Path, rank: str, offset: int = 0) -> Reports:
    """Return what `rank` reported after `offset`; whole lines only, at most 1 MiB of them.

    Args:
        folder: The attempt's folder.
        rank: One of `ranks(folder)`, or `launcher.N`, which has the changes of the members of an elastic job; anything
            else has no events.
        offset: Where an earlier call ended; a negative one counts from the end, and the event it cuts is left out.
    """
    if rank not in _names(folder):
        return Reports(rank, [], 0)
    with (paths.logs(folder) / f"events.{rank}.jsonl").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        file.seek(start)
        text = file.read(_LIMIT)
    whole = text[: text.rfind(b"\n") + 1]
    return Reports(rank, [event for line in whole.splitlines() if (event := _event(line))], start + len(whole))


def _files(folder: Path) -> list[Path]:
    # Jobs write here: what is no file would not be read to its end, and what is no text could not be sent.
    candidates = paths.logs(folder).glob("events.*.jsonl")
    return [path for path in candidates if path.is_file() and path.name.isprintable()]


def _names(folder: Path) -> list[str]:
    return [path.name.removeprefix("events.").removesuffix(".jsonl") for path in _files(folder)]


def _number(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _event(line: bytes) -> dict[str, Any] | None:
    """The event on a line, or None: a rank that was killed may leave half a line, others write what they like.

    Those without a step are no metrics: a rank ran out of memory, or the split over the ranks changed. They stay in the
    file, beside the log that says the same.
    """
    try:
        event = json.loads(line)
        json.dumps(event, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "step" in event else None

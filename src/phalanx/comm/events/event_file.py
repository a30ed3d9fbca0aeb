"""The event file of this rank: JSON lines that `phalanx ps` and the console read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

EVENTS_VARIABLE = "PHALANX_EVENTS_FILE"
"""Names the file; the launcher sets it."""


def open_events(path: str) -> BinaryIO:
    """Return an event file to append to, unbuffered: what could not be written must not be tried again."""
    return open(path, "ab", buffering=0)


def append_line(file: BinaryIO, event: Mapping[str, Any]) -> bool:
    """Append an event; return whether it is there: a full file system is not worth a training."""
    line = (json.dumps(event) + "\n").encode()
    try:
        return file.write(line) == len(line)
    except OSError:
        return False


def append_event(kind: str, **values: Any) -> bool:
    """Append an event that is no step, such as a change of the split over the ranks; return whether it is there.

    It has a time, a kind and JSON values, and no step, by which readers tell reports of steps. Without a launcher there
    is no file, and nothing happens.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    if not path:
        return False
    try:
        with open_events(path) as file:
            return append_line(file, {"time": round(time.time(), 3), "kind": kind, **values})
    except OSError:
        return False

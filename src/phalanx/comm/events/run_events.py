"""`record_event`: append what happened to this process to the run's event file, beside the steps it reports."""

from __future__ import annotations

import json
import os
import time

VARIABLE = "PHALANX_EVENTS_FILE"


def record_event(kind: str, **values: float | int | str) -> None:
    """Append one JSON line, with the time and the kind; it has no step, by which readers tell reports of steps.

    Without a launcher there is no file and nothing happens. A file that cannot be written is not worth a training.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **values}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError:
        return

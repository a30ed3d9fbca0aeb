"""`last_lines`: the last lines of a rank's log for a report: progress bars settled, of a crash its own thread alone.

`faulthandler` dumps the stack of every thread when native code crashes: https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import os

from phalanx.launch.process.source_files import STARTER

_TAIL_BYTES = 65536


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log, with what a progress bar overwrote left out."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return _shorten_crash([line for line in lines if line.strip()], count)


def _shorten_crash(lines: list[str], count: int) -> list[str]:
    """Return the last `count` lines, or up to as many that begin with the fatal error of a log that ends with one."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not starts:
        return lines[-count:]
    dump = lines[starts[-1] :]
    current = next((i for i, line in enumerate(dump) if line.startswith("Current thread ")), None)
    if current is None:
        return dump[:count]
    frames = []
    for line in dump[current + 1 :]:
        if not line.startswith("  File ") or STARTER in line:
            break
        frames.append(line)
    return [dump[0], dump[current], *frames][:count]

"""Who holds a TCP port of this host, read from the tables the system shows; nothing here opens a socket."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.cluster import messages

_LISTENING = "0A"


def owner(port: int) -> str:
    """Return `pid N (command)` of the process that holds a TCP port of this host, as far as we may see.

    Of several (a server and its connections) the one that listens is named.
    """
    for inodes in (_inodes(port, listening=True), _inodes(port, listening=False)):
        for entry in Path("/proc").iterdir():
            if inodes and entry.name.isdigit() and _holds(entry / "fd", inodes):
                return f"pid {entry.name} ({command_line(int(entry.name)) or 'unknown command'})"
    return messages.text("unknown owner")


def command_line(pid: int) -> str:
    """Return the command line of `pid`, or an empty string when it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _inodes(port: int, *, listening: bool) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            is_wanted = int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0"
            if is_wanted and (fields[3] == _LISTENING or not listening):
                found.add(fields[9])
    return found


def _holds(folder: Path, inodes: set[str]) -> bool:
    try:
        targets = [os.readlink(entry) for entry in folder.iterdir()]
    except OSError:
        return False  # Another user's process, or one that just ended.
    return any(target[:8] == "socket:[" and target[8:-1] in inodes for target in targets)

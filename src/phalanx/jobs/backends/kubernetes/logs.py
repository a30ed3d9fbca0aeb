"""`LogCursor`: how far a pod's log was read, by time stamp."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_MARGIN_S = 2


@dataclass
class LogCursor:
    """How far the log of a pod was read; stored in a file beside it."""

    stamp: str = ""
    lines: int = 0
    """How many lines with that stamp were taken."""

    @classmethod
    def read(cls, log: Path) -> LogCursor:
        """Return what was taken into `log` so far."""
        path = _note(log)
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def seconds_ago(self) -> int:
        """Return for how many seconds to ask back, so that nothing after the last line is missed."""
        # Nanoseconds are cut, which datetime does not know.
        when = datetime.fromisoformat(self.stamp[:19]).replace(tzinfo=UTC)
        return max(1, math.ceil((datetime.now(UTC) - when).total_seconds()) + _MARGIN_S)

    def append(self, log: Path, text: bytes) -> None:
        """Append to `log` what is new in `text`, whole lines that begin with their time stamps."""
        last_stamp, last_count, repeats, new_lines = self.stamp, self.lines, 0, list[bytes]()
        for line in text.split(b"\n")[:-1]:
            stamp, _, content = line.partition(b" ")
            name = stamp.decode(errors="replace")
            repeats += name == last_stamp
            if name < last_stamp or (name == last_stamp and repeats <= last_count):
                continue
            self.stamp, self.lines = name, (self.lines + 1 if name == self.stamp else 1)
            new_lines.append(content + b"\n")
        if not new_lines:
            return
        with log.open("ab") as file:
            file.writelines(new_lines)
        _note(log).write_text(json.dumps({"stamp": self.stamp, "lines": self.lines}))


def _note(log: Path) -> Path:
    return log.with_name(f".{log.name}.seen")

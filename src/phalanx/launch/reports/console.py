"""`Console`: the launcher's terminal output: one rank's log live, warnings and errors of the others."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from dataclasses import dataclass, field

from phalanx.i18n import tr

_ALARM = re.compile(
    r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^[WEF]\d{4} \d\d:\d\d|^\[[WEF]\d+|\w+Warning: "
    r"|^([A-Za-z_][\w.]*)?(Error|Exception|Interrupt)\b|^Fatal Python error|^terminate called"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
"""What torch puts before the lines of a traceback; we name the rank ourselves."""

_VARYING = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?|\b\d\d:\d\d:\d\d([.,]\d+)?|^[WEF]\d{4}|(?<=\s)\d+(?= \S+:\d+\])"
)
"""Times, and the process ids of glog lines: what differs between ranks that say the same."""

_TRACEBACK = "Traceback (most recent call last):"
_LARGEST_BLOCK = 200


class AlarmFilter:
    """Picks warnings and errors out of one process's output, a traceback as one block."""

    def __init__(self) -> None:
        self._partial = ""
        self._traceback: list[str] = []

    def feed(self, text: str) -> list[str]:
        """Return the alarms completed by `text`, each one line or one whole traceback."""
        lines = (self._partial + text).split("\n")
        self._partial = lines.pop()
        return [alarm for line in lines if (alarm := self._line(line.rstrip("\r").rpartition("\r")[2]))]

    def _line(self, line: str) -> str | None:
        line = _RANK_PREFIX.sub("", line)
        if line.startswith(_TRACEBACK):
            self._traceback = [line]
            return None
        if self._traceback:
            self._traceback.append(line)
            if line.startswith((" ", "\t")) and len(self._traceback) < _LARGEST_BLOCK:
                return None
            block, self._traceback = "\n".join(self._traceback), []
            # Whoever pressed Ctrl-C knows; rank 0's own says where the job was.
            return None if line == "KeyboardInterrupt" else block
        return line if _ALARM.search(line) else None


@dataclass(slots=True)
class _PendingAlarm:
    since: float
    text: str
    titles: list[str] = field(default_factory=list)
    count: int = 0


class AlarmAggregator:
    """Holds alarms a moment, so that the same text from many ranks, or many times, becomes one line."""

    def __init__(self, hold_s: float = 0.3, again_s: float = 5.0) -> None:
        """Make a folder.

        Args:
            hold_s: Seconds a new text waits for others like it.
            again_s: Seconds between two lines for a text that keeps coming.
        """
        self._hold_s = hold_s
        self._again_s = again_s
        self._held: dict[str, _PendingAlarm] = {}
        self._shown_at: dict[str, float] = {}

    def add(self, title: str, text: str, now: float) -> None:
        """Count one alarm of one process."""
        pending = self._held.setdefault(_VARYING.sub("", text), _PendingAlarm(now, text))
        pending.count += 1
        if title not in pending.titles:
            pending.titles.append(title)

    def due(self, now: float) -> list[str]:
        """Return the lines to show now."""
        lines = []
        for key, pending in list(self._held.items()):
            ready = pending.since + self._hold_s
            if key in self._shown_at:
                ready = max(ready, self._shown_at[key] + self._again_s)
            if now >= ready:
                lines.append(self._pop(key, now))
        return lines

    def drain(self, *, drop_tracebacks: bool) -> list[str]:
        """Return all that is held; a report that follows shows the traceback that matters by itself."""
        keys = [key for key in self._held if not (drop_tracebacks and key.startswith(_TRACEBACK))]
        lines = [self._pop(key, 0.0) for key in keys]
        self._held.clear()
        return lines

    def _pop(self, key: str, now: float) -> str:
        pending = self._held.pop(key)
        self._shown_at[key] = now
        if len(self._shown_at) > 1000:
            del self._shown_at[next(iter(self._shown_at))]
        return fold(pending.titles, pending.text, pending.count)


def fold(titles: list[str], text: str, count: int) -> str:
    """Return `rank 1: text`, or `rank 1, rank 2: text (x2)` when it came more than once."""
    lines = text.split("\n")
    if count > 1:
        lines[-1] += f" (x{count})"
    names = ", ".join(titles)
    return "\n".join(f"{names}: {line}" for line in lines)


class _Tail:
    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115 -- lives as long as the attempt
        self._file.seek(0, os.SEEK_END)  # what an attempt before wrote was shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        return self._decoder.decode(self._file.read())

    def close(self) -> None:
        self._file.close()


class Console:
    """Standard output, shared by the launcher's lines and the ranks'."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._live: _Tail | None = None
        self._others: list[tuple[str, _Tail, AlarmFilter]] = []
        self._folder = AlarmAggregator()

    def write(self, text: str) -> int:
        """Write lines of the launcher; called by its log handler too."""
        if not self._at_line_start:
            sys.stdout.write("\n")
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()

    def follow(self, live: str | None, others: list[tuple[str, str]]) -> None:
        """Follow what is added to the log files of one attempt, which must exist.

        Args:
            live: File shown as it grows.
            others: (title, file) of the processes of which only alarms are shown.
        """
        self._live = _Tail(live) if live else None
        self._others = [(title, _Tail(path), AlarmFilter()) for title, path in others]

    def follow_another(self, title: str, path: str) -> None:
        """Follow one more log file, of which alarms are shown, unless it is followed already."""
        if (title, path) not in [(name, tail.path) for name, tail, _ in self._others]:
            self._others.append((title, _Tail(path), AlarmFilter()))

    def show_live(self, path: str) -> None:
        """Show a file that is followed as it grows, in place of the one that was: its process has ended."""
        for entry in self._others:
            title, tail, _ = entry
            if tail.path == path:
                self._others.remove(entry)
                if self._live is not None:
                    self._write(self._live.read())
                    self._live.close()
                self._live = tail
                self.write(tr("from here on this is {title}", title=title) + "\n")
                return

    @property
    def live_path(self) -> str:
        """The file that is shown as it grows; empty for none."""
        return "" if self._live is None else self._live.path

    def poll(self) -> None:
        """Show what is new."""
        if self._live is not None and (text := self._live.read()):
            self._write(text)
        now = time.monotonic()
        for title, tail, alarms in self._others:
            for alarm in alarms.feed(tail.read()):
                self._folder.add(title, alarm, now)
        for line in self._folder.due(now):
            self.write(line + "\n")

    def finish(self, *, failed: bool) -> None:
        """Show the rest and stop following."""
        self.poll()
        for line in self._folder.drain(drop_tracebacks=failed):
            self.write(line + "\n")
        for tail in [self._live, *(tail for _, tail, _ in self._others)]:
            if tail is not None:
                tail.close()
        self._live, self._others = None, []

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            # The reader left (`phalanx run ... | head`), the terminal is closed, or the disk behind `> file` is full:
            # the job continues and its log files have everything.
            sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: SIM115
        self._at_line_start = text.endswith("\n")

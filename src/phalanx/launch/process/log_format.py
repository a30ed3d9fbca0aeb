"""`LineFormatter`: logging format of the launcher and of ranks."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from typing import Protocol

from phalanx.cluster.log_line import LOG_LINE

FORMATS = ("default", "bar", "json")
"""Values of `--log-format`."""


class LineFormatter(logging.Formatter):
    """One line per record: level, local time with milliseconds, file and line, message.

    `default`: `INFO 2021-05-06 11:32:50,806 launch.py:47] message`
    `bar`: `INFO|2021-05-06T11:32:50|/path/launch.py|47|message`
    `json`: the same fields as an object.
    """

    def __init__(self, name: str) -> None:
        super().__init__(LOG_LINE)
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback when the record has one."""
        if self._name == "default":
            return super().format(record)
        time = datetime.fromtimestamp(record.created)
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._name == "bar":
            stamp = time.isoformat(timespec="seconds")
            return f"{record.levelname}|{stamp}|{record.pathname}|{record.lineno}|{message}"
        fields = {
            "level": record.levelname,
            "time": time.isoformat(timespec="milliseconds"),
            "path": record.pathname,
            "line": record.lineno,
            "message": message,
        }
        return json.dumps(fields, ensure_ascii=False)


class _StandardOutput:
    """Whatever `sys.stdout` is at that moment, as a script may replace it."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


class Stream(Protocol):
    """Where log lines go."""

    def write(self, text: str, /) -> int:
        """Take text."""

    def flush(self) -> None:
        """Pass on what was taken."""


def _install(logger: logging.Logger, name: str, stream: Stream) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(name))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def configure_launcher(name: str, stream: Stream) -> None:
    """Show the launcher's own log lines on `stream`."""
    _install(logging.getLogger("phalanx"), name, stream)
    logging.getLogger("phalanx").propagate = False


def configure_rank(name: str | None) -> None:
    """Show log lines in a rank's output.

    Args:
        name: A format the user asked for, which then holds for the script's own lines too; None leaves those alone and
            shows ours in the default format.
    """
    if name is not None:
        _install(logging.getLogger(), name, _StandardOutput())
        return
    _install(logging.getLogger("phalanx"), "default", _StandardOutput())
    logging.getLogger("phalanx").propagate = False

"""`LOG_LINE`: format strings of log lines, used by the launcher and by ranks."""

from __future__ import annotations

LOG_LINE = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
"""A format of `logging`."""

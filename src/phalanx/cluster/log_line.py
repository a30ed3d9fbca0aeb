"""How a log line of the launcher and of ranks looks."""

from __future__ import annotations

LOG_LINE = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
"""A format of `logging`."""

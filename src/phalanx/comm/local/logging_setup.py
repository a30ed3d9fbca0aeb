"""`speak`: a default log handler for scripts that never configured logging: INFO on rank 0, warnings on all ranks.

A run's contract (global batch, learning rate, collectives) must be seen, also under `python train.py` and torchrun.
A script that configures logging, and our launcher, decide for themselves; then nothing here prints.
"""

from __future__ import annotations

import logging
import sys

from phalanx.cluster.log_line import LOG_LINE


class _Voice(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error until the script configures logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            # What is standard error now: a progress bar puts lines above itself.
            self.setStream(sys.stderr)
            super().emit(record)


def speak(rank: int) -> None:
    """Show INFO lines of rank 0 and warnings of the others, unless logging is configured. Safe to call twice."""
    logger = logging.getLogger("phalanx")
    if logging.getLogger().handlers or logger.handlers:
        return
    voice = _Voice(sys.stderr)
    voice.setFormatter(logging.Formatter(LOG_LINE))
    logger.addHandler(voice)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)

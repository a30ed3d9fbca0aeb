"""`ReplayRequest`: which steps of an earlier run this process does again, and from which checkpoint.

It writes no checkpoint, and whatever the script loads is the checkpoint that was asked for.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from phalanx.cluster.env.environment import REPLAY_VARIABLE
from phalanx.parallel.observe.flight_log import flight_log


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to do again."""

    log: str
    """File for the flight log of the replay."""

    until: int
    """Updates after which it ends, counted from the start of the run."""

    start: int = 0
    """Updates that are in the checkpoint."""

    checkpoint: str | None = None
    """Where to begin; the start of the run when None."""

    def to_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


@cache
def replay_request() -> ReplayRequest | None:
    """Return what this process is to do again; None in any other."""
    text = os.environ.get(REPLAY_VARIABLE)
    return ReplayRequest(**json.loads(text)) if text else None


def begin_replay(text: str) -> None:
    """Log this process's updates, and end it after the last that was asked for."""
    request = ReplayRequest(**json.loads(text))

    def end(updates: int) -> None:
        if updates >= request.until:
            raise SystemExit(0)

    flight_log.begin(Path(request.log))
    # Checkpoints have numbers of their own where a script gives none.
    flight_log.loaded_step = request.start
    flight_log.after_update = end

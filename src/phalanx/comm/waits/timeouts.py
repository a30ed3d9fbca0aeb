"""`collective_timeout`: timeouts of collective calls, from PHALANX_COLLECTIVE_TIMEOUT_S or torch's default."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.constants import default_pg_timeout

from phalanx.cluster.env.environment import Environment


def collective_timeout() -> timedelta:
    """Return how long an operation of a group may take: PHALANX_COLLECTIVE_TIMEOUT_S, or torch's 30 minutes.

    Raises:
        RoleError: If the variable is not a number of seconds.
    """
    seconds = Environment(os.environ).seconds("PHALANX_COLLECTIVE_TIMEOUT_S")
    return timedelta(seconds=seconds) if seconds else default_pg_timeout


def chosen_timeout(timeout: timedelta) -> timedelta:
    """Return the timeout of a group that torch makes: the one the script gave it, else that of all groups."""
    return collective_timeout() if timeout == default_pg_timeout else timeout

"""`open_jobs`: connect to the API server of PHALANX_API, or open the local store."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.jobs import paths
from phalanx.jobs.models import Actor, JobState
from phalanx.jobs.protocol import Jobs


@contextmanager
def open_jobs() -> Iterator[Jobs]:
    """Open the jobs for the user of this process.

    Raises:
        ConfigError: If PHALANX_API is set without PHALANX_TOKEN, or the store cannot be used.
    """
    if address := os.environ.get("PHALANX_API"):
        from phalanx.jobs.client import Client

        with Client(address, _token()) as client:
            yield client
        return
    from phalanx.jobs.backend_registry import Backends
    from phalanx.jobs.service.service import JobService
    from phalanx.jobs.store import JobDatabase

    home = paths.home()
    with JobDatabase(None, home) as store:
        # The controller may have been killed since: any command starts a new one.
        if store.jobs.find(states=[state for state in JobState if not state.is_terminal], limit=1):
            _wake(home)
        yield JobService(store, Backends(), local_actor(home), wake=_wake, remote=False)


def local_actor(home: Path) -> Actor:
    """Return the user of this process, who owns the store if the folder `home` is theirs."""
    user = os.getuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)  # a container may know no name for its user
    return Actor(name, owner=home.stat().st_uid == user)


def _wake(home: Path) -> None:
    from phalanx.jobs.control.controller import ensure_controller

    ensure_controller(home)


def _token() -> str:
    if token := os.environ.get("PHALANX_TOKEN"):
        return token
    raise ConfigError(
        "PHALANX_API names a server, and PHALANX_TOKEN is not set. Make a token where the store is "
        "(phalanx token add NAME) and set it; or unset PHALANX_API, for the jobs of this machine."
    )

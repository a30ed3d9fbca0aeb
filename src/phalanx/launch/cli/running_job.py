"""`find_job`: the running job that a command names."""

from __future__ import annotations

from typing import Any

from phalanx.errors import NotFoundError
from phalanx.launch.job import registry


def find_job(name: str) -> dict[str, Any]:
    """Return what the registry tells of the one job on this host whose name begins so, or whose launcher has this pid.

    Raises:
        NotFoundError: If it is none, or several.
    """
    running = registry.jobs()
    matches = [job for job in running if job["job_id"].startswith(name) or str(job["pid"]) == name]
    if len(matches) != 1:
        names = ", ".join(job["job_id"] for job in running) or "none"
        raise NotFoundError(
            f"{'Several jobs are' if matches else 'No job is'} called {name} on this host; running: {names}. "
            "Give the name or the pid that phalanx ps shows."
        )
    return matches[0]

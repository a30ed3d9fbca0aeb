"""`find_ranks`: the ranks of a job that somebody else started (torchrun, mpirun, srun), by their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.cluster import proc
from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.hang.observe import Watched
from phalanx.launch.hang.processes import state_of

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables that say which rank a process is."""

_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables that are the same for all ranks of a job."""


def find_ranks(pid: int) -> list[Watched]:
    """Return the ranks of the job that a process belongs to, on this host.

    Args:
        pid: A rank, or what started the ranks.

    Raises:
        LaunchError: If there is no such process, or it is not ours to look into, or it has no ranks.
    """
    if state_of(pid).is_gone:
        raise LaunchError(tr("There is no process {pid}. `phalanx ps` lists jobs, and ps the others.", pid=pid))
    if not proc.is_readable(pid):
        raise LaunchError(tr("Process {pid} belongs to another user. Run this as that user, or as root.", pid=pid))
    own = proc.environment(pid)
    if _rank_of(own) is not None:
        others = [other for other in proc.pids() if other != os.getpid()]
        candidates = {other: env for other in others if _is_same_job(own, env := proc.environment(other))}
    else:
        candidates = {
            other: env for other in proc.descendants(pid) if _rank_of(env := proc.environment(other)) is not None
        }
    # What a rank started, such as data workers, has the rank's environment.
    ranks = {other: env for other, env in candidates.items() if proc.parent(other) not in candidates}
    if ranks:
        return sorted(
            (Watched(title=f"rank {_rank_of(env)}", role="worker", pid=other) for other, env in ranks.items()),
            key=lambda process: int(process.title.split()[1]),
        )
    return [Watched(title=f"process {other}", role="worker", pid=other) for other in [pid, *proc.descendants(pid)]]


def _rank_of(env: Mapping[str, str]) -> int | None:
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), None)


def _is_same_job(own: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return _rank_of(other) is not None and all(own.get(name) == other.get(name) for name in _JOB)

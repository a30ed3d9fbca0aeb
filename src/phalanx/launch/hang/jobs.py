"""Find the ranks of a job that somebody else started (torchrun, mpirun, srun), by their environment in /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.errors import LaunchError
from phalanx.i18n import tr
from phalanx.launch.hang.observe import Watched
from phalanx.launch.hang.processes import environment_of, state_of
from phalanx.launch.process import linux

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
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        raise LaunchError(tr("Process {pid} belongs to another user. Run this as that user, or as root.", pid=pid))
    own = environment_of(pid)
    if _rank_of(own) is not None:
        candidates = {other: env for other in _pids() if _is_same_job(own, env := environment_of(other))}
    else:
        candidates = {
            other: env for other in linux.descendants(pid) if _rank_of(env := environment_of(other)) is not None
        }
    # What a rank started, such as data workers, has the rank's environment.
    ranks = {other: env for other, env in candidates.items() if _parent(other) not in candidates}
    if ranks:
        return sorted(
            (Watched(title=f"rank {_rank_of(env)}", role="worker", pid=other) for other, env in ranks.items()),
            key=lambda process: int(process.title.split()[1]),
        )
    return [Watched(title=f"process {other}", role="worker", pid=other) for other in [pid, *linux.descendants(pid)]]


def _rank_of(env: Mapping[str, str]) -> int | None:
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), None)


def _is_same_job(own: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return _rank_of(other) is not None and all(own.get(name) == other.get(name) for name in _JOB)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0

"""`share_cores`: divide the host's cores among its ranks: the default number of torch threads."""

from __future__ import annotations

import logging
import os
import socket

import torch

from phalanx.cluster.role.role import Role
from phalanx.comm import process_group

logger = logging.getLogger("phalanx.comm")


def share_cores(role: Role) -> None:
    """Divide the cores by the ranks of this host, as `phalanx run` does: each rank would use all of them.

    OMP_NUM_THREADS and another number of threads than torch's own stay. `srun` and `mpirun` may have bound a rank to
    cores of its own, which it then keeps.

    Args:
        role: Who this process is; the ranks have met.
    """
    cores = len(os.sched_getaffinity(0))
    is_bound = role.launcher in ("slurm", "mpi") and cores < (os.cpu_count() or cores)
    if "OMP_NUM_THREADS" in os.environ or is_bound or not role.is_worker:
        return
    ranks = max(role.local_world_size, _ranks_here())
    threads = max(1, cores // ranks)
    # torch starts with a thread for every core, or for every other one where two share a unit.
    if ranks == 1 or torch.get_num_threads() not in (cores, cores // 2) or torch.get_num_threads() <= threads:
        return
    torch.set_num_threads(threads)
    if role.local_rank == 0:
        logger.info(
            "each of the %d ranks of this host computes with %d of %d cores; OMP_NUM_THREADS sets another number",
            ranks,
            threads,
            cores,
        )


def _ranks_here() -> int:
    """Return how many of the ranks that met are on this host, where none has said so."""
    peers = process_group.meeting().peers if process_group.has_met() else []
    return sum(peer.host == socket.gethostname() for peer in peers)

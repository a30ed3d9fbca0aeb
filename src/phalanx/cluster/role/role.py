"""`Role`: rank, world size, endpoints and kind (worker or server) of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.errors import RoleError

Kind = Literal["worker", "server", "heter_worker"]
LAYOUT_FILE = "layout.json"
"""In the folder of the servers' state: which servers the job has, once their number has changed."""

Launcher = Literal["none", "phalanx", "torchrun", "fleet", "slurm", "mpi", "rank table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One process's place in the job. The default is a job of one process.

    `rank` and `world_size` count processes of the same kind: for a server they count servers, and the number of
    workers is `len(worker_endpoints)`.
    """

    kind: Kind = "worker"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this kind on this host."""

    local_world_size: int = 1
    device_index: int | None = None
    """GPU of this process among those it sees; None where it is the one of its local rank."""

    node_rank: int = 0
    node_count: int = 1
    master_addr: str = ""
    """Host where the job's key-value store listens; empty when nothing needs one."""

    master_port: int = 0
    """Port of the store; 0 when nothing needs one."""

    worker_endpoints: tuple[str, ...] = ()
    """`host:port` of every worker by rank; empty when the launcher did not say."""

    server_endpoints: tuple[str, ...] = ()
    heter_endpoints: tuple[str, ...] = ()
    endpoint: str = ""
    """`host:port` of this process; empty when the launcher did not say."""

    least_workers: int = 0
    """Fewest workers that a job with servers continues with, as they come and go; 0 where their number is fixed."""

    attempt: int = 0
    """How many times the job was restarted before this run."""

    job_id: str = ""
    log_dir: str = ""
    """Folder of the ranks' log files; empty when the launcher keeps none."""

    launcher: Launcher = "none"
    secret: bytes = field(default=b"", repr=False)
    """What servers and workers of the job prove to each other that they know; empty when the launcher gave none."""

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.node_count),
        ):
            if not 0 <= rank < size:
                raise RoleError(
                    f"{name} {rank} of a {self.kind} does not fit a total of {size} (launcher: {self.launcher}). "
                    "Ranks run from 0 to total - 1; correct the launcher's numbers."
                )

    @classmethod
    def detect(cls, env: Mapping[str, str] | None = None) -> Role:
        """Return this process's role from its environment.

        Process level first: `PHALANX_*`, torchrun's names, Fleet's `PADDLE_*`, which must agree where more than one is
        set. Then a direct `srun` or `mpirun` step. Variables of an allocation (`sbatch`, Kubeflow's `PET_*`, DLC's
        counts of nodes) are the launcher's to read and mean nothing here. Last, a rank that a loop started by hand from
        a rank table: `RANK_TABLE_FILE` and `DEVICE_ID`. With none of them: a job of one process.

        Args:
            env: Variables to read; the process's own when omitted.

        Raises:
            RoleError: If variables are missing, malformed or disagree; names variables and values.
            ConfigError: If the rank table of a rank started by hand is wrong.
        """
        from phalanx.cluster.role.launcher_env import read_role

        return read_role(os.environ if env is None else env)

    @property
    def is_worker(self) -> bool:
        """Whether this process trains (heterogeneous workers compute for others and do not count)."""
        return self.kind == "worker"

    @property
    def is_server(self) -> bool:
        """Whether this process holds tables."""
        return self.kind == "server"

    @property
    def worker_num(self) -> int:
        """Number of workers in the job, whatever this process is."""
        return self.world_size if self.is_worker else len(self.worker_endpoints)

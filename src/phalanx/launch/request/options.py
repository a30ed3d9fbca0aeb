"""`Options`, `flag_of`: the parsed flags of `phalanx run`, before defaults are filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from phalanx.cluster.allocation import Counts
from phalanx.cluster.rank_table.rank_table import RankTable
from phalanx.cluster.role.rank_table_role import MEETING_PORT

DEFAULT_PORT = MEETING_PORT
"""Port on the first host at which the launchers of several hosts meet, unless `--http-port` says otherwise."""


def flag_of(name: str) -> str:
    """Return the flag that sets a field, as the help spells it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The flags of `phalanx run`; None or empty where the user said nothing."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    gpus: str | None = None
    nproc_per_node: int | None = None
    least_nproc: int | None = None
    """The smaller number of -n a:b; `nproc_per_node` is the larger."""

    ips: str | None = None
    nnodes: int | None = None
    least_nnodes: int | None = None
    """The smaller number of --nnodes a:b; `nnodes` is the larger."""

    node_rank: int | None = None
    master_addr: str | None = None
    http_port: int | None = None
    servers: str = ""
    workers: str = ""
    heter_workers: str = ""
    server_num: int | None = None
    worker_num: int | None = None
    least_workers: int | None = None
    """The smaller number of --worker-num a:b; `worker_num` is the larger."""

    heter_worker_num: int | None = None
    rank_table: str | None = None
    log_dir: str = "log"
    per_rank_dir: bool = False
    log_format: str | None = None
    max_restarts: int = 0
    replacements: int | None = None
    """Ranks of an elastic job that may be replaced in all; None where --max-restarts was not given."""

    replicas: int | None = None
    check_nan_inf: bool = False
    flight_log: bool = False
    server_dir: str | None = None
    timeout_s: float = 60.0
    hang_after_s: float = 10.0
    hang_timeout_s: float = 300.0
    slow_share: float = 0.05
    world_size_counts: Counts | None = None
    """What RANK and WORLD_SIZE of the launcher's own environment count."""

    origins: Mapping[str, str] = field(default_factory=dict)
    """Which environment variable filled a field that the user left open."""

    table: RankTable | None = None
    """What hosts, processes and GPUs were taken from."""

    host_names: tuple[str, ...] = ()
    """Every host in order, for messages, where a scheduler lists them."""

    is_verbose: bool = False
    """Whether the start shows every setting and the environment of the first process, as Fleet's launcher does."""

    wants_servers: bool = field(default=False)
    """Started as `launch_ps`, so parameter-server mode is meant whatever the flags."""

    @property
    def misplaced_flag(self) -> str:
        """The first of the script's arguments that looks as if it were meant for the launcher, or ""."""
        return next((a for a in self.training_script_args if a.partition("=")[0].replace("_", "-") in _MISPLACED), "")

    def describe_option(self, name: str) -> str:
        """Return a field as the user would find it: `--node-rank 1`, or `PET_NODE_RANK=1`."""
        value = getattr(self, name)
        return f"{self.origins[name]}={value}" if name in self.origins else f"{flag_of(name)} {value}"

    @property
    def origin_lines(self) -> list[str]:
        """One line with the settings that a scheduler, a rank table or the environment filled in, if any did."""
        shown = [f"{name}: {value}" for name, value in self.banner_items() if " (from " in value]
        return [", ".join(shown)] if shown else []

    def banner_items(self) -> list[tuple[str, str]]:
        """Return the 13 settings of the banner, sorted by name, as (name, shown value with its source)."""
        shown = {f.name: str(getattr(self, f.name)) + self._source(f.name) for f in fields(self) if f.name in _BANNER}
        shown["ips"] = f"{self.ips}{self._source('ips')}" if self.ips else self._hosts()
        if self.least_nproc is not None:
            shown["nproc_per_node"] = f"{self.least_nproc}:{self.nproc_per_node}"
        if self.least_workers is not None:
            shown["worker_num"] = f"{self.least_workers}:{self.worker_num}"
        shown["training_script_args"] = str(list(self.training_script_args))
        return sorted(shown.items())

    def _source(self, name: str) -> str:
        return f" (from {self.origins[name]})" if name in self.origins else ""

    def _hosts(self) -> str:
        if self.nnodes is None or self.nnodes == 1:
            return "127.0.0.1"
        return f"{self.master_addr} and {self.nnodes - 1} more{self._source('master_addr')}"


_MISPLACED = {
    flag_of(name)
    for name in ("nproc_per_node", "gpus", "ips", "nnodes", "node_rank", "master_addr", "http_port", "server_num",
                 "worker_num", "servers", "workers", "max_restarts", "rank_table", "per_rank_dir")
} | {"-n"}  # fmt: skip
"""The launcher's own flags; those that scripts have too are left out."""

_BANNER = {
    "gpus",
    "heter_worker_num",
    "heter_workers",
    "http_port",
    "ips",
    "log_dir",
    "nproc_per_node",
    "server_num",
    "servers",
    "training_script",
    "training_script_args",
    "worker_num",
    "workers",
}
